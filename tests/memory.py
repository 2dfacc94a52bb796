"""Peaks of memory: of what Python allocates in a call, and of the whole process."""

import ctypes
import gc
import multiprocessing
import os
import traceback
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MMAP_THRESHOLD = -3


def python_peak(call: Callable[[], object]) -> int:
    """Return the peak of what Python allocates in a call, made in a forked process.

    tracemalloc counts the allocations of all threads, and before Python 3.12.9 it can crash a process whose other
    threads allocate while it stops. A forked process has one thread.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        pid = os.fork()
    if not pid:
        try:
            tracemalloc.start()
            call()
            os.write(writer, b"%d" % tracemalloc.get_traced_memory()[1])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    assert answer, "the call failed in its process, which printed why"
    return int(answer)


@dataclass
class Peak:
    num_bytes: int = 0


@contextmanager
def resident_peak() -> Iterator[Peak]:
    """Measure by how much the resident memory of this process rises, at its highest."""
    libc, peak = ctypes.CDLL("libc.so.6"), Peak()
    # Every large block in pages of its own, which go back when it is freed; what malloc keeps would blur the peak.
    libc.mallopt(MMAP_THRESHOLD, 1 << 16)
    try:
        gc.collect()
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        yield peak
        peak.num_bytes = status_bytes("VmHWM") - before
    finally:
        libc.mallopt(MMAP_THRESHOLD, 32 << 20)


def peak_of_second_call(call: Callable[[], object]) -> int:
    """Return the resident peak of a call in a process of its own, where it was made once before.

    The first call imports what it needs. In a process that has run other tests the memory that they freed, and their
    threads, would count as well.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_second_peak, call).result()


def _second_peak(call: Callable[[], object]) -> int:
    call()
    with resident_peak() as peak:
        result = call()
    del result  # after the peak was read, so that what the call returns is part of it
    return peak.num_bytes


def status_bytes(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
