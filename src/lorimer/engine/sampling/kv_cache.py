"""Keys and values of sequences being sampled, and of prompts that may be reused.

A prompt is computed into a ``PromptCache``; its samples copy that into their rows of the ``Slab``, one rectangle of
memory for all sequences that decode together. ``PrefixStore`` keeps prompts for reuse, keyed by (salt, weights,
tokens), within a memory limit, and evicts the least recently used.

Legend: N rows, H query heads, K key/value heads, G = H / K, C capacity in positions, D head size.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.model.attention import Shape, attend_rows, softmax_with_sinks

BLOCK = 16
"""Prompts share prefixes in whole blocks of this many tokens."""


@dataclass
class PromptCache:
    """Keys and values of one prompt, a pair of ``(K, capacity, D)`` for each layer; ``length`` positions are filled."""

    capacity: int
    length: int = 0
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def extend(self, layer: int, k_KTD: Tensor, v_KTD: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write positions from ``start``; return all keys and values up to the last one written."""
        if layer == len(self.layers):
            pair = tuple(x.new_empty(x.shape[0], self.capacity, x.shape[2]) for x in (k_KTD, v_KTD))
            self.layers.append((pair[0], pair[1]))
        stop = start + k_KTD.shape[1]
        for cache, new in zip(self.layers[layer], (k_KTD, v_KTD), strict=True):
            cache[:, start:stop] = new
        return self.layers[layer][0][:, :stop], self.layers[layer][1][:, :stop]

    def copy_prefix(self, length: int, capacity: int) -> "PromptCache":
        copy = PromptCache(capacity, length)
        for pair in self.layers:
            new = tuple(x.new_empty(x.shape[0], capacity, x.shape[2]) for x in pair)
            for target, source in zip(new, pair, strict=True):
                target[:, :length] = source[:, :length]
            copy.layers.append((new[0], new[1]))
        return copy

    @property
    def memory_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for pair in self.layers for x in pair)


@dataclass(frozen=True)
class PrefillSpan:
    """Tokens ``start:stop`` of the pass continue ``cache``."""

    start: int
    stop: int
    cache: PromptCache


class PrefillAttention:
    """The attention of a pass that computes prompts, or pieces of them."""

    def __init__(self, spans: list[PrefillSpan]) -> None:
        self._spans = spans

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, shape: Shape) -> Tensor:
        out_THD = q_HTD.new_empty(q_HTD.shape[1], q_HTD.shape[0], v_KTD.shape[2])
        for span in self._spans:
            tokens, past = slice(span.start, span.stop), span.cache.length
            k, v = span.cache.extend(layer, k_KTD[:, tokens], v_KTD[:, tokens], past)
            q = q_HTD[:, tokens].reshape(len(k), -1, span.stop - span.start, q_HTD.shape[2])
            out_THD[tokens] = attend_rows(q, k, v, past, shape).flatten(0, 1).transpose(0, 1)
        return out_THD

    def finish(self) -> None:
        for span in self._spans:
            span.cache.length += span.stop - span.start


class Slab:
    """Rows of keys and values, one row a sequence, all of one capacity that grows when a sequence needs it.

    Rows in use are always ``0 … num_rows - 1``: removing one moves the last into its place. Rows times capacity stay
    within ``max_positions``, except that a single row always fits.
    """

    def __init__(self, max_positions: int) -> None:
        self.max_positions = max_positions
        self.lengths: list[int] = []
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        return self._layers[0][0].shape[2] if self._layers else 0

    def can_add(self, length: int) -> bool:
        capacity = max(self.capacity, _round_up(length + 1))
        return not self.lengths or (self.num_rows + 1) * capacity <= self.max_positions

    def can_step(self) -> bool:
        """Return whether every row has room for one more position."""
        longest = max(self.lengths) + 1
        fits = longest <= self.capacity or self.num_rows * _round_up(longest) <= self.max_positions
        return fits or self.num_rows == 1

    def add(self, prompt: PromptCache) -> int:
        """Add a row that begins as a copy of ``prompt``; return its number."""
        row, length = len(self.lengths), prompt.length
        if not self._layers:
            self._layers = [
                (k.new_zeros(0, len(k), 0, k.shape[2]), v.new_zeros(0, len(v), 0, v.shape[2])) for k, v in prompt.layers
            ]
        self._reserve(row + 1, length + 1)
        for caches, sources in zip(self._layers, prompt.layers, strict=True):
            for cache, source in zip(caches, sources, strict=True):
                cache[row, :, :length] = source[:, :length]
        self.lengths.append(length)
        return row

    def remove(self, row: int) -> int:
        """Free a row; return the number of the row that moved into its place (itself if it was the last)."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[last]
            for caches in self._layers:
                for cache in caches:
                    cache[row, :, :length] = cache[last, :, :length]
            self.lengths[row] = length
        self.lengths.pop()
        if not self.lengths:
            self._layers = []
        return last

    def make_room(self) -> None:
        """Add one position to every row; ``can_step`` says whether there is room."""
        self._reserve(self.num_rows, max(self.lengths) + 1)

    def _reserve(self, num_rows: int, length: int) -> None:
        allocated, old = self._layers[0][0].shape[0], self.capacity
        if num_rows <= allocated and length <= old:
            return
        capacity = old if length <= old else _round_up(length)
        # Twice the rows, so that copying stays rare; never more than fits.
        rows = allocated if num_rows <= allocated else max(4, 2 * allocated)
        rows = max(num_rows, min(rows, self.max_positions // capacity))
        used = self.num_rows
        for i, pair in enumerate(self._layers):
            # Hidden positions are multiplied by a probability of zero, so they must be finite.
            new = tuple(x.new_zeros(rows, x.shape[1], capacity, x.shape[3]) for x in pair)
            for target, source in zip(new, pair, strict=True):
                target[:used, :, :old] = source[:used]
            self._layers[i] = (new[0], new[1])

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._layers[index]


def _round_up(length: int) -> int:
    """Round ``length`` up to a capacity with slack: the next multiple of 64 above 5/4 of it."""
    return -(-(length + length // 4) // 64) * 64


class DecodeAttention:
    """The attention of a pass that adds one position to every row of the slab.

    The pass has its tokens in the order of adapters; ``rows_T`` says which row of the slab each belongs to.
    """

    def __init__(self, slab: Slab, rows_T: Tensor) -> None:
        self._slab, self._rows_T = slab, rows_T
        self._in_order = bool((rows_T == torch.arange(len(rows_T), device=rows_T.device)).all())
        self._back_T = torch.argsort(rows_T)
        lengths = torch.tensor(slab.lengths, device=rows_T.device)
        self._positions_T = lengths[rows_T]
        self._num_keys = max(slab.lengths) + 1
        keys = torch.arange(self._num_keys, device=rows_T.device)
        self._distance_NC = lengths[:, None] - keys
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._rotation: tuple[Tensor, Tensor]

    def _mask(self, window: int | None, num_kv: int, like: Tensor) -> Tensor:
        """Return zero at keys a row sees, minus infinity elsewhere: ``(N * K, 1, keys)``; equal layers share it."""
        key = (window, num_kv)
        if key not in self._masks:
            hidden = self._distance_NC < 0
            if window is not None:
                hidden |= self._distance_NC >= window
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.repeat_interleave(num_kv, 0).unsqueeze(1)
        return self._masks[key]

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, shape: Shape) -> Tensor:
        return self.attend_rows(layer, q_HTD.transpose(0, 1), k_KTD.transpose(0, 1), v_KTD.transpose(0, 1), shape)

    def attend_rows(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, shape: Shape) -> Tensor:
        """Attend as ``attend`` does, with rows first and in the order of the pass; return ``(N, H, D)``."""
        k_cache, v_cache = self._slab.layer(layer)
        k_cache[self._rows_T, :, self._positions_T] = k_NKD
        v_cache[self._rows_T, :, self._positions_T] = v_NKD
        num_rows, num_kv = k_NKD.shape[:2]
        if not self._in_order:
            q_NHD = q_NHD[self._back_T]
        q = q_NHD.reshape(num_rows * num_kv, -1, q_NHD.shape[2])
        k = k_cache[:num_rows].flatten(0, 1)[:, : self._num_keys]
        v = v_cache[:num_rows].flatten(0, 1)[:, : self._num_keys]
        mask = self._mask(shape.window, num_kv, q)
        if shape.softcap is None:
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=shape.scale)
        else:
            scores = torch.bmm(q, k.transpose(1, 2)).mul_(shape.scale / shape.softcap)
            scores = scores.tanh_().mul_(shape.softcap).add_(mask)
        p = softmax_with_sinks(scores.float().unsqueeze(2), shape.sinks).squeeze(2)
        out_NHD = torch.bmm(p.to(v.dtype), v).view(num_rows, -1, v.shape[2])
        return out_NHD if self._in_order else out_NHD[self._rows_T]

    def rotation(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return factors ``(N, 1, D)`` of a head and of its swapped halves, from a model's cosines and sines."""
        if self._rotary is not rotary:
            cos, sin = (x[0].unsqueeze(1) for x in rotary)
            half = sin.shape[-1] // 2
            self._rotary, self._rotation = rotary, (cos, torch.cat([-sin[..., :half], sin[..., half:]], -1))
        return self._rotation

    def finish(self) -> None:
        self._slab.lengths = [length + 1 for length in self._slab.lengths]


@dataclass(frozen=True)
class _Stored:
    """A stored prompt, the hashes of its prefixes of whole blocks, and the memory it is charged for."""

    cache: PromptCache
    digests: list[bytes]
    memory_bytes: int


class PrefixStore:
    """Computed prompts, for reuse by prompts with the same prefix.

    A prefix is found as long as any stored prompt begins with it, in whatever order prompts are evicted.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, _Stored] = OrderedDict()
        """By the hash of all whole blocks, the least recently used first."""
        self._holders: dict[bytes, dict[bytes, None]] = {}
        """Hash of every prefix of whole blocks -> keys of all prompts that begin with it, in the order they came."""
        self.memory_bytes = 0

    def find(self, salt: str, weights: str, tokens: np.ndarray, most: int) -> tuple[PromptCache, int] | None:
        """Return the stored prompt that shares the longest prefix of at most ``most`` tokens, and that length.

        Among several, return the one stored last.
        """
        found = None
        for digest, length in _block_hashes(salt, weights, tokens):
            if digest not in self._holders or length > most:
                break
            found = digest, length
        if found is None:
            return None
        key = next(reversed(self._holders[found[0]]))
        self._entries.move_to_end(key)
        return self._entries[key].cache, found[1]

    def put(self, salt: str, weights: str, tokens: np.ndarray, cache: PromptCache) -> None:
        digests = [digest for digest, _ in _block_hashes(salt, weights, tokens)]
        size = cache.memory_bytes
        if not digests or size > self._limit_bytes:
            return
        key = digests[-1]
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        self._entries[key] = _Stored(cache, digests, size)
        self.memory_bytes += size
        for digest in digests:
            self._holders.setdefault(digest, {})[key] = None
        self.shrink(self._limit_bytes)

    def shrink(self, limit_bytes: int) -> None:
        """Evict the least recently used prompts until the rest fit."""
        while self.memory_bytes > limit_bytes and self._entries:
            key, stored = self._entries.popitem(last=False)
            self.memory_bytes -= stored.memory_bytes
            for digest in stored.digests:
                holders = self._holders[digest]
                del holders[key]
                if not holders:
                    del self._holders[digest]


def _block_hashes(salt: str, weights: str, tokens: np.ndarray) -> Iterator[tuple[bytes, int]]:
    """Return a chain of hashes, one for each prefix of whole blocks."""
    digest = hashlib.sha256(f"{len(salt)}:{salt}{weights}".encode()).digest()
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = np.ascontiguousarray(tokens[start : start + BLOCK], dtype="<i8")
        digest = hashlib.sha256(digest + block.tobytes()).digest()
        yield digest, start + BLOCK
