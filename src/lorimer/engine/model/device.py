"""Devices: which one to use, in which dtype, and how much memory it has.

Other modules ask a ``Device`` and contain no ``if cuda``. CPU numbers are measured here; those of CUDA and MPS come
from torch. ``upload`` and ``download`` are the only copies between host and device in a pass: reading one value makes
the host wait until the device has computed everything before it.
"""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lorimer.engine.config import EngineConfig
from lorimer.engine.reservations import HOST, host_free_bytes, reserved_bytes
from lorimer.errors import InvalidInput


@dataclass(frozen=True)
class Device:
    handle: torch.device
    dtype: torch.dtype
    memory_bytes: int
    """Memory available besides the base weights."""

    @property
    def type(self) -> str:
        return self.handle.type

    @property
    def product_dtype(self) -> torch.dtype:
        """What to multiply bfloat16 numbers in: float32 on a CPU that computes in float32, as without units it does."""
        return self.dtype if self.type == "cpu" else torch.bfloat16

    def with_float64(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on a device that has float64: a copy on the CPU for MPS, which has none."""
        return tensor.cpu() if self.type == "mps" else tensor


_ALIGNMENT = 16
"""Where arrays begin in a copy of several: kernels read vectors of this many bytes."""


def upload(arrays: Sequence[NDArray[Any]], device: torch.device | None) -> list[Tensor]:
    """Return arrays as tensors of ``device``: one copy from pinned memory, which the host does not wait for.

    On the CPU they share the memory of the arrays.
    """
    if device is None or device.type in ("cpu", "mps"):
        return [torch.from_numpy(array).to(device) for array in arrays]
    places, size = [], 0
    for array in arrays:
        places.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    joined = np.zeros(size, np.uint8)
    for place, array in zip(places, arrays, strict=True):
        joined[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied = torch.from_numpy(joined).pin_memory().to(device, non_blocking=True)
    return [
        copied[place : place + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for place, array in zip(places, arrays, strict=True)
    ]


def download(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return tensors as arrays of the host: one copy, for which the host waits."""
    if any(tensor.device.type in ("cpu", "mps") for tensor in tensors) or not tensors:
        return [tensor.cpu().numpy() for tensor in tensors]
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    joined = torch.cat(parts).cpu().numpy()
    arrays, place = [], 0
    for tensor, part in zip(tensors, parts, strict=True):
        kind = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        arrays.append(joined[place : place + len(part)].copy().view(kind).reshape(tensor.shape))
        place += len(part)
    return arrays


def describe_failure(failure: Exception) -> str:
    """Return in one line what torch cannot compute on a device; its messages can have a stack of C++ calls."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:200]}" if lines else type(failure).__name__


def open_device(config: EngineConfig, rank: int = 0) -> Device:
    """Open the device of one rank: a GPU of its own, or its part of the cores and the memory."""
    ranks = config.ranks
    device = _choose(config.device, config.device_index + rank)
    if ranks > 1 and (device.type == "mps" or (device.type == "cuda" and torch.cuda.device_count() < ranks)):
        raise InvalidInput(f"ranks is {ranks}, but this machine has fewer GPUs; each rank needs one, or device = 'cpu'")
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or max(1, _num_cores() // ranks))
    dtype = choose_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    free = max(0, free_bytes(device) - reserved_bytes(label(device))) // (ranks if device.type == "cpu" else 1)
    return Device(device, dtype, config.memory_bytes or int(0.7 * free))


def _choose(name: str, index: int) -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, is_there in available.items() if is_there)
    if not available[name]:
        there = ", ".join(kind for kind, is_there in available.items() if is_there)
        raise InvalidInput(f"device {name!r} is not available on this machine; it has {there}")
    return torch.device(name, index % torch.cuda.device_count()) if name == "cuda" else torch.device(name)


def device_variables(config: EngineConfig, device: Device) -> dict[str, str]:
    """Return environment variables that give vLLM the devices of an engine, or its number of threads and memory."""
    if device.type == "cuda":
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = listed.split(",") if listed else [str(index) for index in range(torch.cuda.device_count())]
        own = [visible[(config.device_index + number) % len(visible)] for number in range(config.num_devices)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    found = {"OMP_NUM_THREADS": str(config.num_threads)} if config.num_threads else {}
    return found | ({"VLLM_CPU_KVCACHE_SPACE": str(max(1, config.memory_bytes >> 30))} if config.memory_bytes else {})


def _num_cores() -> int:
    # Not every system can list the cores that a process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def label(device: torch.device) -> str:
    """Return the name of a device that is the same in all processes of this machine."""
    if device.type == "cuda":
        return f"cuda:{torch.cuda.get_device_properties(device).uuid}"
    return HOST if device.type == "cpu" else device.type


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return host_free_bytes()


def used_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return psutil.Process().memory_info().rss


def return_freed_memory() -> None:
    """Return memory that was freed to the system; glibc keeps what loading and comparing a model took."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        gc.collect()
        trim(0)


def choose_dtype(device: torch.device, seconds: float = 1.0) -> torch.dtype:
    """Choose float32 or bfloat16 by the speed of matrix products of a training step and of a decoding step.

    Many CPUs have no bfloat16 units and emulate them many times slower; accelerators always gain.
    """
    if device.type != "cpu":
        return torch.bfloat16
    rates = gemm_rates(seconds)
    # Half a speed-up is not worth the lost digits.
    return torch.bfloat16 if rates[torch.bfloat16] > 1.3 * rates[torch.float32] else torch.float32


_DTYPES = (torch.float32, torch.bfloat16)


def gemm_rates(seconds: float = 1.0) -> dict[torch.dtype, float]:
    """Measure matrix products per second on the CPU in each dtype, for the slower of two shapes."""
    return {dtype: min(_gemm_rate(dtype, rows, seconds / 4) for rows in (16, 512)) for dtype in _DTYPES}


def _gemm_rate(dtype: torch.dtype, rows: int, seconds: float) -> float:
    """Return the best rate of products (rows, 512) by (512, 1536) seen within ``seconds``."""
    x, w = torch.ones(rows, 512, dtype=dtype), torch.ones(1536, 512, dtype=dtype)
    F.linear(x, w)
    best, stop = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < stop:
        F.linear(x, w)
        best = min(best, time.perf_counter() - start)
    return 1 / best
