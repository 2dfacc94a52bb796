"""Functions for decoding on a CPU in C (``decoding.c``), compiled when an engine first needs them.

A C compiler is all they take; where there is none, or what it made is not right, torch computes the same. The library
is kept in the user's cache, under the digest of what it depends on. ``stepping.py`` and ``linear.py`` call them.

Legend: N rows, H hidden size, Q query heads, K key/value heads, D head size, C capacity of the slab, I inner size.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.model.attention import Shape

SOURCE = Path(__file__).with_name("decoding.c")
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
MAX_GROUP = 32
"""Query heads of one key head."""
LANES = 16
"""Sizes of rows are multiples of this many numbers."""
_DTYPES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
_FLAGS = ("-O3", "-fPIC", "-shared")
# Not on macOS: a second OpenMP library beside torch's would end the process.
_THREADS: tuple[tuple[str, ...], ...] = ((),) if sys.platform == "darwin" else (("-fopenmp",), ())
_CHOICES = tuple((cpu, *threads) for cpu in ("-march=native", "-mcpu=native") for threads in _THREADS)
"""The first that the compiler accepts is taken. For any CPU of a kind they would be slower than torch."""
_SECONDS = 60
_ALONE = 100_000
"""Multiplications that one thread does faster than several."""
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64


class _Pass(ctypes.Structure):
    _fields_ = [
        ("num_rows", _INT),
        ("num_threads", _INT),
        ("rows", _POINTER),
        ("lengths", _POINTER),
        ("pasts", _POINTER),
        ("past_lengths", _POINTER),
        ("scratch", _POINTER),
        ("scratch_size", _INT),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("num_heads", _INT),
        ("num_kv", _INT),
        ("head_dim", _INT),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", _INT),
        ("sinks", _POINTER),
        ("q_eps", ctypes.c_float),
        ("k_eps", ctypes.c_float),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        ("k", _POINTER),
        ("v", _POINTER),
        ("capacity", _INT),
        ("past_k", _POINTER),
        ("past_v", _POINTER),
        ("past_capacities", _POINTER),
    ]


class Norm(Protocol):
    """An RMS norm with a weight of float32 or of the dtype of the pass, which a full run replaces."""

    weight: Tensor
    eps: float


@dataclass
class LayerAttention:
    """The attention of a layer, and the norms of its heads, which have weights of the dtype of the pass."""

    num_heads: int
    num_kv: int
    head_dim: int
    shape: Shape
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __post_init__(self) -> None:
        shape = self.shape
        self.struct = _Layer(
            num_heads=self.num_heads,
            num_kv=self.num_kv,
            head_dim=self.head_dim,
            scale=shape.scale,
            softcap=shape.softcap or 0.0,
            window=shape.window or 0,
            sinks=None if shape.sinks is None else shape.sinks.data_ptr(),
            q_eps=self.q_norm.eps if self.q_norm else 0.0,
            k_eps=self.k_norm.eps if self.k_norm else 0.0,
        )
        self.reference = ctypes.byref(self.struct)

    @property
    def is_possible(self) -> bool:
        return self.head_dim in HEAD_DIMS and self.num_heads // self.num_kv <= MAX_GROUP


CachePart = tuple[Tensor, Tensor]
"""Keys and values, ``(K, capacity, D)`` of a prompt or ``(rows, K, C, D)`` of the slab."""


class PassAttention:
    """Which rows of the slab a pass extends, and what they continue, for the attention of all its layers."""

    def __init__(self, order: Sequence[int], lengths: Sequence[int], pasts: Sequence[int], past_lengths: Sequence[int]):
        """Each has a number for each row of the pass; ``pasts`` are numbers of prompts, -1 for none."""
        self._table = np.array([order, lengths, pasts, past_lengths], np.int64)
        self._longest = int((self._table[1] + self._table[3]).max()) + 1
        self._scratch: Tensor | None = None
        self._group = 0

    def reference(self, group: int) -> object:
        """Return the structure for layers with ``group`` query heads for each key head."""
        if group != self._group:
            num_threads, size = torch.get_num_threads(), (self._longest + LANES) // LANES * LANES * group
            self._scratch, self._group = torch.empty(num_threads * size, dtype=torch.float32), group
            address, step = self._table.ctypes.data, self._table.strides[0]
            self._struct = _Pass(
                self._table.shape[1],
                num_threads,
                *(address + i * step for i in range(4)),
                self._scratch.data_ptr(),
                size,
            )
            self._reference = ctypes.byref(self._struct)
        return self._reference


class Pasts:
    """The prompts that rows continue: keys and values of one layer each."""

    def __init__(self, layers: Sequence[CachePart]) -> None:
        self.num = len(layers)
        self.keys, self.values = ((_POINTER * self.num)(*(pair[i].data_ptr() for pair in layers)) for i in (0, 1))
        self.capacities = (_INT * self.num)(*(pair[0].shape[1] for pair in layers))


_PAIR = np.dtype(
    [(name, np.int64) for name in ("a", "b_t", "rank", "start", "stop", "out_features", "offset", "inner")]
    + [("scale", np.float64)]
)
_A_TASK, _B_TASK = 8, 256
"""Columns of one task, as in ``decoding.c``."""


@dataclass(frozen=True)
class LowRank:
    """A pair ``A (R, I)``, ``B (O, R)`` of one adapter, which rows ``start:stop`` of a pass are multiplied with."""

    a: Tensor
    b: Tensor
    start: int
    stop: int
    offset: int
    """First column of the output that it adds to."""
    scale: float

    @property
    def is_possible(self) -> bool:
        """Whether compiled functions multiply with it: A row by row, B column by column."""
        sizes = (self.a.shape[-1], self.b.shape[0])
        is_arranged = self.a.dim() == self.b.dim() == 2 and self.a.is_contiguous() and self.b.t().is_contiguous()
        return is_arranged and not any(size % LANES for size in sizes)


class PairTable:
    """The low-rank pairs that a pass adds to the output of one matrix. It keeps the tensors that it points to."""

    def __init__(self, pairs: Sequence[LowRank]) -> None:
        self._pairs, inner, rows = pairs, 0, []
        tasks: list[tuple[int, int]] = []
        for pair in pairs:
            rank, size = len(pair.a), len(pair.b)
            places = (pair.a.data_ptr(), pair.b.data_ptr(), rank, pair.start, pair.stop, size, pair.offset)
            rows.append((*places, inner, pair.scale))
            inner += rank * (pair.stop - pair.start)
        for size, step in ((0, _A_TASK), (1, _B_TASK)):
            for number, pair in enumerate(pairs):
                tasks += [(number, first) for first in range(0, (len(pair.a), len(pair.b))[size], step)]
            if size == 0:
                self.num_a = len(tasks)
        self.in_features = pairs[0].a.shape[1] if pairs else 0
        self._rows, self._tasks = np.array(rows, _PAIR), np.array(tasks, np.int32)
        self._scratch = torch.empty(inner, dtype=torch.float32)
        self.num_tasks, self.num_operations = len(tasks), inner * self.in_features
        self.pairs, self.tasks, self.scratch = self._rows.ctypes.data, self._tasks.ctypes.data, self._scratch.data_ptr()


class Decoding:
    """The compiled functions for one dtype."""

    def __init__(self, path: Path, compiler: str, dtype: torch.dtype) -> None:
        library = ctypes.CDLL(str(path))
        self.compiler, self._dtype = compiler, dtype
        self._normalise, self._gate, self._attend = library.add_and_normalise, library.gate_with_silu, library.attend
        self._add_pairs = library.add_pairs
        self._normalise.argtypes = [_POINTER] * 4 + [ctypes.c_float, _INT, _INT, _POINTER]
        self._gate.argtypes = [_POINTER, _INT, _INT, _POINTER]
        self._attend.argtypes = [_POINTER] * 9
        self._add_pairs.argtypes = [_POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT]
        for function in (self._normalise, self._gate, self._attend, self._add_pairs):
            function.restype = None

    def accepts(self, *tensors: Tensor) -> bool:
        """Return whether the functions can read and write tensors."""
        return all(tensor.dtype == self._dtype and tensor.is_contiguous() for tensor in tensors)

    def _address(self, tensor: Tensor, num_columns: int) -> int:
        if not self.accepts(tensor) or tensor.shape[-1] != num_columns:
            raise ValueError(
                f"a tensor of {tensor.dtype}, {tuple(tensor.shape)}, is not laid out for compiled functions"
            )
        return tensor.data_ptr()

    def normalise(self, norm: Norm, x_NH: Tensor, added_NH: Tensor | None = None) -> Tensor:
        """Return the norm of ``x``, to which ``added`` is added first, in place."""
        weight = norm.weight
        size, is_wide = len(weight), weight.dtype == torch.float32
        x, added = self._address(x_NH, size), None if added_NH is None else self._address(added_NH, size)
        out = torch.empty_like(x_NH)
        self._normalise(
            x,
            added,
            None if is_wide else weight.data_ptr(),
            weight.data_ptr() if is_wide else None,
            norm.eps,
            x_NH.shape[0],
            size,
            out.data_ptr(),
        )
        return out

    def gate(self, both_N2I: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` of rows that have the gate first."""
        num_rows, size = both_N2I.shape[0], both_N2I.shape[1] // 2
        out = both_N2I.new_empty(num_rows, size)
        self._gate(self._address(both_N2I, 2 * size), num_rows, size, out.data_ptr())
        return out

    def attend(
        self,
        current: PassAttention,
        layer: LayerAttention,
        slab: CachePart,
        pasts: Pasts | None,
        qkv: Tensor,
        cos_ND: Tensor,
        sin_ND: Tensor,
    ) -> Tensor:
        """Store the keys and values of a pass, ``(N, (Q + 2 K) D)``, and attend from its queries; return ``(N, Q D)``.

        ``qkv`` is used up.
        """
        out = qkv.new_empty(qkv.shape[0], layer.num_heads * layer.head_dim)
        size, num_heads = layer.head_dim, layer.num_heads + 2 * layer.num_kv
        cache = _Cache(self._address(slab[0], size), self._address(slab[1], size), slab[0].shape[2])
        if pasts is not None:
            cache.past_k, cache.past_v, cache.past_capacities = (
                ctypes.addressof(x) for x in (pasts.keys, pasts.values, pasts.capacities)
            )
        self._attend(
            current.reference(layer.num_heads // layer.num_kv),
            layer.reference,
            ctypes.byref(cache),
            self._address(qkv, num_heads * size),
            self._address(cos_ND, size),
            self._address(sin_ND, size),
            None if layer.q_norm is None else layer.q_norm.weight.data_ptr(),
            None if layer.k_norm is None else layer.k_norm.weight.data_ptr(),
            out.data_ptr(),
        )
        return out

    def add_pairs(self, x: Tensor, y: Tensor, table: PairTable) -> None:
        """Add the products of low-rank pairs with ``x`` to ``y``."""
        self._add_pairs(
            table.pairs,
            table.tasks,
            table.num_a,
            table.num_tasks,
            x.data_ptr(),
            table.in_features,
            y.data_ptr(),
            y.shape[1],
            table.scratch,
            torch.get_num_threads() if table.num_operations > _ALONE else 1,
        )


# ── compilation ───────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def load(dtype: torch.dtype) -> Decoding | str:
    """Return the functions for a dtype on this machine's CPU, or why there are none."""
    if dtype not in _DTYPES:
        return f"there are none for {dtype}"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        return "there is no C compiler (CC, cc, gcc or clang)"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_SECONDS, check=True).stdout
        name = version.decode(errors="replace").partition("\n")[0]
        with _cache_directory() as directory:
            path = _library(directory, compiler, name, _DTYPES[dtype])
            try:
                return Decoding(path, name, dtype)
            except OSError:  # it was cut off, by a crash of the machine
                path.unlink()
                return Decoding(_library(directory, compiler, name, _DTYPES[dtype]), name, dtype)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        return f"{compiler} cannot compile them: {error}"


def _library(directory: Path, compiler: str, version: str, flags: tuple[str, ...]) -> Path:
    """Return the compiled library, from ``directory`` if it is there."""
    machine = [version, torch.__version__, platform.machine(), _cpu_features()]
    depends = [SOURCE.read_text("utf-8"), *machine, repr((_FLAGS, _CHOICES)), *flags]
    digest = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:32]
    path = directory / f"decoding-{digest}.so"
    if path.exists() and _is_ours(path):
        return path
    descriptor, made = tempfile.mkstemp(".so", dir=directory)
    os.close(descriptor)
    try:
        said = ""
        for choice in _CHOICES:
            command = [compiler, *_FLAGS, *choice, *flags, "-o", made, str(SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
            if done.returncode == 0:
                os.chmod(made, 0o700)  # a linker may have made the file anew, by the user's mask
                os.replace(made, path)
                return path
            said = (done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise OSError(said)
    finally:
        Path(made).unlink(missing_ok=True)


def _cpu_features() -> str:
    """Return what decides what ``-march=native`` means: a home may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


@contextlib.contextmanager
def _cache_directory() -> Iterator[Path]:
    """Yield a directory that only this user can write to, because what is in it will be run."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        directory = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "lorimer" / "kernels"
        directory.mkdir(0o700, parents=True, exist_ok=True)
        is_good = _is_ours(directory) and os.access(directory, os.W_OK)
    except (OSError, RuntimeError):  # there is no home, or it cannot be written to
        is_good = False
    if is_good:
        yield directory
    else:
        with tempfile.TemporaryDirectory(prefix="lorimer-kernels-") as temporary:
            yield Path(temporary)


def _is_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
