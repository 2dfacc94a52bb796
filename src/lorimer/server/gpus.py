"""Utilisation and memory of NVIDIA GPUs, read from the driver's library NVML without loading CUDA.

Machines without the library have no GPUs here; other makers' GPUs are not read.
"""

import ctypes
import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True)
class GpuSample:
    index: int
    percent: float | None
    """How much of the last moment a kernel was running; None if the GPU does not report it."""
    used_bytes: int | None
    total_bytes: int | None


class Gpus:
    """All GPUs that the driver knows. Not thread-safe: call from one thread at a time."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._handles: list[ctypes.c_void_p] = []
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError:
            return
        count = ctypes.c_uint(0)
        failed = self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        if failed:
            logger.warning("GPUs are not sampled: %s answered error %d", library, failed)
            return
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if not self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
                self._handles.append(handle)

    def sample(self) -> list[GpuSample]:
        return [self._sample(index, handle) for index, handle in enumerate(self._handles)]

    def _sample(self, index: int, handle: ctypes.c_void_p) -> GpuSample:
        busy, memory = _Utilization(), _Memory()
        has_busy = not self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy))
        has_memory = not self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        return GpuSample(
            index,
            float(busy.gpu) if has_busy else None,
            int(memory.used) if has_memory else None,
            int(memory.total) if has_memory else None,
        )
