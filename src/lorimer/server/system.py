"""Samples this machine and the processes of this server every few seconds: CPU, memory, GPUs, disk, queues, tokens/s.

Everything that may block is read in a thread. Names are ``kind/what``: ``cpu/machine``, ``memory/engine NAME``. Of a
cluster every process samples itself; the owners of replicas also sample their engines, queues and throughput.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from lorimer.scheduler.stats import ServedModel
from lorimer.server.gpus import Gpus
from lorimer.store import system
from lorimer.store.database import Store

QUEUED = ("forward_backward", "optim_step", "sample")
"""Kinds of requests that are counted even before there was one."""


def resident_bytes(pids: Sequence[int]) -> int | None:
    """Return the resident memory of processes, or None if none of them exists."""
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            found.append(psutil.Process(pid).memory_info().rss)
    return sum(found) if found else None


class Sampler:
    def __init__(
        self,
        store: Store,
        source: str,
        data: Path,
        replicas: Callable[[], Sequence[ServedModel]],
        queued: Callable[[], Mapping[str, int]] | None,
    ) -> None:
        """``replicas`` are those whose engines this process runs, ``queued`` its unfinished requests by kind.

        A process that computes nothing has no queues: ``queued`` is None.
        """
        self._store, self.source, self._data = store, source, data
        self._replicas, self._queued = replicas, queued
        self._process = psutil.Process()
        self._engines: dict[int, psutil.Process] = {}
        self._tokens: dict[tuple[str, str], tuple[float, int]] = {}
        """When a replica's total of a kind was read, and the total."""
        self._kinds = set(QUEUED)
        """Of requests: an empty queue is a zero, not a gap."""
        self._gpus: Gpus | None = None
        psutil.cpu_percent()  # later calls measure since the one before
        self._process.cpu_percent()

    async def sample(self) -> None:
        """Take a sample and store it."""
        now, replicas = time.time(), self._replicas()
        values = self._lengths()
        for replica in replicas:
            values |= self._rates(replica, time.monotonic())
        values |= await asyncio.to_thread(self._measure, {one.replica: pid for one in replicas for pid in one.pids})
        await self._store.write(system.add, self.source, int(now), values)

    def _lengths(self) -> dict[str, float]:
        """Return the lengths of the queues by kind."""
        if self._queued is None:
            return {}
        queued = self._queued()
        self._kinds |= queued.keys()
        return {f"queue/{kind}": float(queued.get(kind, 0)) for kind in self._kinds}

    def _rates(self, replica: ServedModel, now: float) -> dict[str, float]:
        """Return the tokens per second since the last sample. A replica that began to count again has none yet."""
        found = {}
        for kind, total in (("training", replica.tokens_trained), ("sampling", replica.tokens_sampled)):
            then, before = self._tokens.get((replica.replica, kind), (now, total))
            self._tokens[replica.replica, kind] = now, total
            if now > then and total >= before:
                found[f"tokens/{kind} {replica.replica}"] = (total - before) / (now - then)
        return found

    def _measure(self, engines: Mapping[str, int]) -> dict[str, float]:
        memory = psutil.virtual_memory()
        values = {
            "cpu/machine": psutil.cpu_percent(),
            "cpu/server": self._process.cpu_percent() / (psutil.cpu_count() or 1),
            "memory/machine": float(memory.total - memory.available),
            "memory/server": float(self._process.memory_info().rss),
        }
        with suppress(OSError):
            disk = shutil.disk_usage(self._data)
            values |= {"disk/used": float(disk.used), "disk/free": float(disk.free)}
        for name, pid in engines.items():
            values |= self._measure_engine(name, pid)
        self._engines = {pid: one for pid, one in self._engines.items() if pid in engines.values()}
        return values | self._measure_gpus()

    def _measure_engine(self, name: str, pid: int) -> dict[str, float]:
        """Return CPU and memory of an engine's process; the first measurement of CPU has nothing to compare with."""
        with suppress(psutil.Error):
            if known := self._engines.get(pid):
                busy = {f"cpu/engine {name}": known.cpu_percent() / (psutil.cpu_count() or 1)}
            else:
                known = self._engines[pid] = psutil.Process(pid)
                known.cpu_percent()
                busy = {}
            return busy | {f"memory/engine {name}": float(known.memory_info().rss)}
        return {}

    def _measure_gpus(self) -> dict[str, float]:
        self._gpus = self._gpus or Gpus()
        found: dict[str, float] = {}
        for gpu in self._gpus.sample():
            if gpu.percent is not None:
                found[f"gpu/{gpu.index}"] = gpu.percent
            if gpu.used_bytes is not None:
                found[f"gpu_memory/{gpu.index}"] = float(gpu.used_bytes)
        return found
