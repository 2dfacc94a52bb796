"""Large pages for weights: a decoding step reads all of them, and in pages of 4 KiB it often waits for addresses."""

import bisect
import ctypes
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS = Path("/proc/self/maps")
_LARGE = 1 << 21
_COLLAPSE = 25
"""``MADV_COLLAPSE``, since Linux 6.1: make large pages of small ones. Older kernels refuse it, and nothing changes."""
_ALIGNMENT = 64
_CHUNK = 1 << 23
"""Bytes that are copied together; of the file, no more than this is in memory beside the copies."""


def use_large_pages(model: nn.Module) -> None:
    """Keep the weights of a model in large pages, unless the system has none.

    Weights that are mapped from a file are copied; the system forgets the file's pages meanwhile. Embeddings stay where
    they are, unless they are the head's weight too: a pass reads few of their rows.
    """
    if sys.platform != "linux" or not _SETTING.exists() or "[never]" in _SETTING.read_text("ascii"):
        return
    modules = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    parameters = {id(one): one for module in modules for one in module.parameters(recurse=False)}
    found = [one for one in parameters.values() if one.device.type == "cpu" and one.is_contiguous() and one.nbytes]
    mapped = _mapped([one.data_ptr() for one in found])
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    _copy([one for one, is_mapped in zip(found, mapped, strict=True) if is_mapped], advise)
    own = [one for one, is_mapped in zip(found, mapped, strict=True) if not is_mapped]
    places = {
        place for one in own for place in range(one.data_ptr() // _LARGE, (one.data_ptr() + one.nbytes) // _LARGE)
    }
    for place in sorted(places):
        advise(place * _LARGE, _LARGE, _COLLAPSE)


def _mapped(addresses: list[int]) -> list[bool]:
    """Return which addresses are in files that this process has mapped."""
    ranges = []
    for line in _MAPS.read_text("utf-8", "replace").splitlines():
        place, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            ranges.append(tuple(int(end, 16) for end in place.split("-")))
    ranges.sort()
    before = [bisect.bisect_right(ranges, (address, sys.maxsize)) - 1 for address in addresses]
    return [i >= 0 and address < ranges[i][1] for i, address in zip(before, addresses, strict=True)]


def _copy(parameters: list[nn.Parameter], advise: "ctypes._NamedFuncPointer") -> None:
    size = sum(-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in parameters)
    if size == 0:
        return
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    place = 0
    for one in parameters:
        source = one.data.view(-1)
        copy = torch.frombuffer(memory, dtype=source.dtype, count=source.numel(), offset=place)
        step = _CHUNK // source.element_size()
        for to, part in zip(copy.split(step), source.split(step), strict=True):
            to.copy_(part)
            _forget(part, advise)
        one.data = copy.view(one.shape)
        place += -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT


def _forget(part: Tensor, advise: "ctypes._NamedFuncPointer") -> None:
    """Let the system forget the pages of a mapped file that only this part has: it can read them again."""
    first = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        advise(first, last - first, mmap.MADV_DONTNEED)
