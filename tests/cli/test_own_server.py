"""The server beside a program: it ends with it, comes back when it is killed, and says why it cannot start."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

import lorimer
from lorimer.cli.own_server import own_server
from lorimer.errors import LorimerError
from tests.client.examples import batch


def servers_of(data) -> list[int]:
    """The ids of processes that serve this data directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_server = b"serve" in (process / "cmdline").read_bytes().split(b"\0")
            if is_server and f"LORIMER_DATA={data}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


@pytest.fixture
def data(tmp_path, monkeypatch):
    path = tmp_path / "data"
    monkeypatch.setenv("LORIMER_DATA", str(path))
    return path


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are found in /proc")
def test_killed_server_comes_back_and_the_run_goes_on(data, tmp_path):
    told = []
    with own_server("lorimer/debug", tmp_path / "log" / "server.log", told.append) as url:
        with lorimer.ServiceClient(base_url=url) as service:
            trainer = service.create_lora_training_client("lorimer/debug", rank=4)
            before = trainer.forward_backward(batch(), "cross_entropy").result().loss
            (pid,) = servers_of(data)
            os.kill(pid, signal.SIGKILL)
            trainer.optim_step(lorimer.AdamParams(learning_rate=1e-2)).result(timeout=120)
            assert trainer.forward(batch(), "cross_entropy").result(timeout=120).loss < before
        (again,) = servers_of(data)
        assert again != pid
        second = own_server("lorimer/debug", tmp_path / "second.log", print)
        with pytest.raises(LorimerError, match=r"could not start: .* is in use by "), second:
            pass
    assert len(told) == 1 and "(-9)" in told[0]
    assert servers_of(data) == []
