"""The sampler on this machine, against psutil, and GPUs read through a library that answers as NVIDIA's does."""

import os
import shutil
import subprocess
import time
from dataclasses import fields

import psutil
import pytest

from lorimer.scheduler.stats import ServedModel
from lorimer.server.gpus import Gpus, GpuSample
from lorimer.server.system import Sampler
from lorimer.store import Store, system

NVML = r"""
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) { *handle = (void *)(unsigned long)(i + 1); return 0; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    if (handle == (void *)2) return 3;
    rates[0] = 87; rates[1] = 12; return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *sizes) {
    sizes[0] = 80000000000ull; sizes[2] = 60000000000ull * (unsigned long)handle / 2; sizes[1] = sizes[0] - sizes[2];
    return 0;
}
"""


@pytest.fixture
def store(tmp_path):
    store = Store.open(None, tmp_path / "data")
    yield store
    store.close()


def replica(name, **values):
    known = {field.name: 0 for field in fields(ServedModel)} | {"name": name, "replica": f"{name}#0", "state": "ready"}
    return ServedModel(**known | {"stage": "", "error": "", "info": None, "pids": ()} | values)


async def test_samples_are_those_of_the_machine(store, tmp_path):
    """This process stands for the server and for an engine."""
    state = {"trained": 100}
    sampler = Sampler(
        store,
        "here",
        tmp_path,
        lambda: [replica("m", pids=(os.getpid(),), tokens_trained=state["trained"])],
        lambda: {"sample": 4, "forward_backward": 1},
    )
    began = time.monotonic()
    await sampler.sample()
    deadline = began + 1.2
    while time.monotonic() < deadline:  # keep one core busy
        pass
    state["trained"] = 600
    await sampler.sample()
    seconds = time.monotonic() - began
    now = int(time.time())
    found = {name: points for (_, name), points in store.read_now(system.read, "hour", now).items()}
    last = {name: points[-1][1] for name, points in found.items()}
    assert (last["queue/sample"], last["queue/forward_backward"]) == (4, 1)
    assert last["tokens/training m#0"] == pytest.approx(500 / seconds, rel=0.2)
    assert last["tokens/sampling m#0"] == 0
    own = psutil.Process().memory_info().rss
    assert last["memory/server"] == pytest.approx(own, rel=0.2) == pytest.approx(last["memory/engine m#0"], rel=0.2)
    memory = psutil.virtual_memory()
    assert last["memory/machine"] == pytest.approx(memory.total - memory.available, rel=0.3)
    disk = shutil.disk_usage(tmp_path)
    assert last["disk/used"] + last["disk/free"] == pytest.approx(disk.used + disk.free, rel=0.05)
    assert 0 < last["cpu/server"] <= 100 and 0 < last["cpu/engine m#0"] <= 100 and 0 < last["cpu/machine"] <= 100


async def test_an_engine_that_is_gone_or_counts_again_has_no_points(store, tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    totals = iter([50, 20, 30])
    sampler = Sampler(
        store, "x", tmp_path, lambda: [replica("m", pids=(ended.pid,), tokens_sampled=next(totals))], dict
    )
    for _ in range(2):
        await sampler.sample()
    names = {name for _, name in store.read_now(system.read, "hour", int(time.time()))}
    assert "memory/engine m#0" not in names and "tokens/sampling m#0" not in names and "cpu/machine" in names
    await sampler.sample()
    assert ("x", "tokens/sampling m#0") in store.read_now(system.read, "hour", int(time.time()))


def test_gpus_are_read_from_the_drivers_library(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvml.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, tmp_path / "nvml.c"], check=True)
    total = 80_000_000_000
    assert Gpus(str(library)).sample() == [
        GpuSample(0, 87.0, 30_000_000_000, total),
        GpuSample(1, None, 60_000_000_000, total),
    ]
    assert Gpus("libthere-is-none.so").sample() == []
