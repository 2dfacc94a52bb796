"""The functions of ``decode.c``: attention and the products of adapters in decoding.

``model/stepping.py`` and ``model/linear.py`` call them. A model uses those that gave its layers' results on a probe.

Legend: N rows, Q query heads, K key/value heads, D head size, C capacity of the slab, I inner size.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.model.attention import Shape
from lorimer.engine.native.library import INT, LANES, POINTER, Library, declare
from lorimer.engine.native.rowwise import Rowwise

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
MAX_GROUP = 32
"""Query heads of one key head."""
_ALONE = 100_000
"""Multiplications that one thread does faster than several."""


class _Pass(ctypes.Structure):
    _fields_ = [
        ("num_rows", INT),
        ("num_threads", INT),
        ("rows", POINTER),
        ("lengths", POINTER),
        ("pasts", POINTER),
        ("past_lengths", POINTER),
        ("scratch", POINTER),
        ("scratch_size", INT),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("num_heads", INT),
        ("num_kv", INT),
        ("head_dim", INT),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", INT),
        ("sinks", POINTER),
        ("q_eps", ctypes.c_float),
        ("k_eps", ctypes.c_float),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        ("k", POINTER),
        ("v", POINTER),
        ("capacity", INT),
        ("past_k", POINTER),
        ("past_v", POINTER),
        ("past_capacities", POINTER),
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
        self.keys, self.values = ((POINTER * self.num)(*(pair[i].data_ptr() for pair in layers)) for i in (0, 1))
        self.capacities = (INT * self.num)(*(pair[0].shape[1] for pair in layers))


_PAIR = np.dtype(
    [(name, np.int64) for name in ("a", "b_t", "rank", "start", "stop", "out_features", "offset", "inner")]
    + [("scale", np.float64)]
)
_A_TASK, _B_TASK = 8, 256
"""Columns of one task, as in ``decode.c``."""


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


class Decoding(Rowwise):
    """The compiled functions for one dtype."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        functions = library.functions
        self._attend = declare(functions.attend, *9 * [POINTER])
        pairs = [POINTER, POINTER, INT, INT, POINTER, INT, POINTER, INT, POINTER, INT]
        self._add_pairs = declare(functions.add_pairs, *pairs)

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
