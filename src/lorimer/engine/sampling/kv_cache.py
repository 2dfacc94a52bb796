"""Keys and values of sequences being sampled, and of prompts that may be reused.

A prompt is computed into a ``PromptCache``. Sequences that decode together have rows of the ``Slab``, one rectangle of
memory. Those that begin alike, as samples of one prompt do, read that beginning from one prompt (``Past``), and their
rows have only what follows; other rows begin with a copy of their prompt. ``PrefixStore`` keeps prompts for reuse,
keyed by (salt, weights, tokens), within a memory limit, and evicts the least recently used.

Legend: N rows, H query heads, K key/value heads, G = H / K, B = N * K, C capacity of a row, P positions of a past, D
head size, M = rows of a past * G.
"""

import hashlib
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.model.attention import Joined, Shape, attend_rows, softmax_with_sinks
from lorimer.engine.model.device import upload
from lorimer.engine.native.decode import Decoding, LayerAttention, PassAttention, Pasts

BLOCK = 16
"""Prompts share prefixes in whole blocks of this many tokens."""
MIN_SAVED = 512
"""Rows read a common past from one place if that saves at least so many positions; fewer are copied faster."""


@dataclass(eq=False)
class PromptCache:
    """Keys and values of one prompt, a pair of ``(K, capacity, D)`` for each layer; ``length`` positions are filled."""

    capacity: int
    length: int = 0
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    origin: "tuple[weakref.ref[PromptCache], int] | None" = None
    """The prompt that its first positions were copied from, and how many; the first that had them."""

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
        first = self.origin[0]() if self.origin is not None and self.origin[1] >= length else None
        copy = PromptCache(capacity, length, origin=(weakref.ref(first or self), length))
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
class Past:
    """The first ``length`` positions of a prompt, which rows of the slab continue."""

    prompt: PromptCache
    length: int


def find_pasts(prompts: Iterable[PromptCache], in_use: Iterable[Past | None]) -> dict[PromptCache, Past]:
    """Return the pasts that sequences about to begin should read from one place; ``prompts`` has one for each.

    ``in_use`` are the pasts of rows that decode already.
    """
    candidates: dict[PromptCache, list[Past]] = {}
    users = Counter(past for past in in_use if past is not None)
    for prompt in prompts:
        if prompt not in candidates:
            candidates[prompt] = [Past(prompt, prompt.length)]
            first = None if prompt.origin is None else prompt.origin[0]()
            if first is not None and prompt.origin is not None:
                candidates[prompt].append(Past(first, prompt.origin[1]))
        users.update(candidates[prompt])
    found = {}
    for prompt, pasts in candidates.items():
        for past in pasts:
            if (users[past] - 1) * past.length >= MIN_SAVED:
                found[prompt] = past
                break
    return found


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
            out_THD[tokens] = attend_rows(q, Joined(k), Joined(v), past, shape).flatten(0, 1).transpose(0, 1)
        return out_THD

    def finish(self) -> None:
        for span in self._spans:
            span.cache.length += span.stop - span.start


class Slab:
    """Rows of keys and values, one row a sequence, all of one capacity that grows when a sequence needs it.

    A row has the positions after its past. Rows in use are always ``0 … num_rows - 1``: removing one moves the last
    into its place. Rows times capacity, and the pasts, stay within ``max_positions``; but a single row always fits.
    """

    def __init__(self, max_positions: int) -> None:
        self.max_positions = max_positions
        self.lengths: list[int] = []
        """Positions in each row, without its past."""
        self.pasts: list[Past | None] = []
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        return self._layers[0][0].shape[2] if self._layers else 0

    @property
    def memory_bytes(self) -> int:
        """Size of the rows that are allocated, without their pasts."""
        return sum(x.nbytes for pair in self._layers for x in pair)

    def _has_room(self, num_rows: int, capacity: int, past: Past | None = None) -> bool:
        pasts = {past, *self.pasts} - {None}
        return num_rows * capacity + sum(p.length for p in pasts if p is not None) <= self.max_positions

    def can_add(self, length: int, past: Past | None = None) -> bool:
        """Return whether there is room for a row that begins with ``length`` positions, those of its past included."""
        own = length - (0 if past is None else past.length)
        return not self.lengths or self._has_room(self.num_rows + 1, max(self.capacity, _round_up(own + 1)), past)

    def can_step(self) -> bool:
        """Return whether every row has room for one more position."""
        longest = max(self.lengths) + 1
        return longest <= self.capacity or self.num_rows == 1 or self._has_room(self.num_rows, _round_up(longest))

    def add(self, prompt: PromptCache, past: Past | None = None, num_coming: int = 0) -> int:
        """Add a row that begins as a copy of what ``prompt`` has after ``past``; return its number.

        ``num_coming`` more rows will be added soon.
        """
        row, first = len(self.lengths), 0 if past is None else past.length
        length = prompt.length - first
        if not self._layers:
            self._layers = [
                (k.new_zeros(0, len(k), 0, k.shape[2]), v.new_zeros(0, len(v), 0, v.shape[2])) for k, v in prompt.layers
            ]
        self._reserve(row + 1, length + 1, num_coming)
        if length:
            for caches, sources in zip(self._layers, prompt.layers, strict=True):
                for cache, source in zip(caches, sources, strict=True):
                    cache[row, :, :length] = source[:, first : prompt.length]
        self.lengths.append(length)
        self.pasts.append(past)
        return row

    def remove(self, row: int) -> int:
        """Free a row; return the number of the row that moved into its place (itself if it was the last)."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[last]
            for caches in self._layers:
                for cache in caches:
                    cache[row, :, :length] = cache[last, :, :length]
            self.lengths[row], self.pasts[row] = length, self.pasts[last]
        self.lengths.pop()
        self.pasts.pop()
        if not self.lengths:
            self._layers = []
        return last

    def make_room(self) -> None:
        """Add one position to every row; ``can_step`` says whether there is room."""
        self._reserve(self.num_rows, max(self.lengths) + 1)

    def _reserve(self, num_rows: int, length: int, num_coming: int = 0) -> None:
        allocated, old = self._layers[0][0].shape[0], self.capacity
        if num_rows <= allocated and length <= old:
            return
        capacity = old if length <= old else _round_up(length)
        # More rows than are needed, so that copying stays rare; never more than fits.
        rows = allocated if num_rows <= allocated else max(4, num_rows + num_coming, allocated + allocated // 2)
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
    """Round ``length`` up to a capacity with slack: the next multiple of 16 above 9/8 of it."""
    return -(-(length + length // 8) // 16) * 16


@dataclass(frozen=True)
class _Readers:
    """Rows that have the same past, or none."""

    past: Past | None
    rows: Tensor | None
    """``None`` for all rows."""
    lengths_R: Tensor
    """Positions of each of the rows after the past."""
    longest: int
    shortest: int


class _Places:
    """Where the rows of a pass are in the slab, as tensors."""

    def __init__(self, slab: Slab, order: Sequence[int], device: torch.device) -> None:
        rows, lengths = np.array(order), np.array(slab.lengths)
        self.in_order = bool((rows == np.arange(len(rows))).all())
        self.rows_T, self.back_T, self.positions_T, lengths_N = upload(
            [rows, np.argsort(rows), lengths[rows], lengths], device
        )
        self.num_keys = max(slab.lengths) + 1
        self.distance_NC = lengths_N[:, None] - torch.arange(self.num_keys, device=device)
        self.readers = _find_readers(slab, device)


class DecodeAttention:
    """The attention of a pass that adds one position to every row of the slab.

    The pass has its tokens in the order of adapters; ``order`` says which row of the slab each belongs to.
    """

    def __init__(self, slab: Slab, order: Sequence[int], device: torch.device) -> None:
        self._slab, self._order, self._device = slab, order, device
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self._past_masks: dict[tuple[int, int, int], Tensor] = {}
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._rotation: tuple[Tensor, Tensor]

    @cached_property
    def _places(self) -> _Places:
        return _Places(self._slab, self._order, self._device)

    @cached_property
    def _native(self) -> tuple[PassAttention, list[Past]]:
        """Return the rows as compiled functions read them, and the pasts that they number."""
        slab, numbers = self._slab, dict[Past | None, int]({None: -1})
        rows = [(row, slab.lengths[row], slab.pasts[row]) for row in self._order]
        table = [
            (row, own, numbers.setdefault(past, len(numbers) - 1), past.length if past else 0)
            for row, own, past in rows
        ]
        return PassAttention(*zip(*table, strict=True)), [past for past in numbers if past is not None]

    def attend_native(
        self, native: Decoding, layer: int, attention: LayerAttention, qkv: Tensor, cos_ND: Tensor, sin_ND: Tensor
    ) -> Tensor:
        """Attend by compiled functions: return ``(N, H * D)`` of all heads of a pass, which are used up."""
        current, known = self._native
        pasts = Pasts([past.prompt.layers[layer] for past in known]) if known else None
        return native.attend(current, attention, self._slab.layer(layer), pasts, qkv, cos_ND, sin_ND)

    def _mask(self, window: int | None, num_kv: int, like: Tensor) -> Tensor:
        """Return zero at keys a row sees, minus infinity elsewhere: ``(N * K, 1, keys)``; equal layers share it."""
        key = (window, num_kv)
        if key not in self._masks:
            hidden = self._places.distance_NC < 0
            if window is not None:
                hidden |= self._places.distance_NC >= window
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.repeat_interleave(num_kv, 0).unsqueeze(1)
        return self._masks[key]

    def attend(self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, shape: Shape) -> Tensor:
        return self.attend_rows(layer, q_HTD.transpose(0, 1), k_KTD.transpose(0, 1), v_KTD.transpose(0, 1), shape)

    def attend_rows(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, shape: Shape) -> Tensor:
        """Attend as ``attend`` does, with rows first and in the order of the pass; return ``(N, H, D)``."""
        k_cache, v_cache = self._slab.layer(layer)
        places = self._places
        k_cache[places.rows_T, :, places.positions_T] = k_NKD
        v_cache[places.rows_T, :, places.positions_T] = v_NKD
        num_rows, num_kv = k_NKD.shape[:2]
        if not places.in_order:
            q_NHD = q_NHD[places.back_T]
        q = q_NHD.reshape(num_rows * num_kv, -1, q_NHD.shape[2])
        k = k_cache[:num_rows].flatten(0, 1)[:, : places.num_keys]
        v = v_cache[:num_rows].flatten(0, 1)[:, : places.num_keys]
        mask = self._mask(shape.window, num_kv, q)
        scores = _scores(q, k, mask, shape)
        sinks = None if shape.sinks is None else shape.sinks.view(num_kv, -1).repeat(num_rows, 1)
        if places.readers:
            out_NHD = self._attend_pasts(layer, q, scores, v, sinks, shape)
        else:
            p = softmax_with_sinks(scores.unsqueeze(2), sinks).squeeze(2)
            out_NHD = torch.bmm(p.to(v.dtype), v).view(num_rows, -1, v.shape[2])
        return out_NHD if places.in_order else out_NHD[places.rows_T]

    def _attend_pasts(
        self, layer: int, q_BGD: Tensor, scores_BGC: Tensor, v_BCD: Tensor, sinks_BG: Tensor | None, shape: Shape
    ) -> Tensor:
        """Attend to the rows' own positions, whose scores are given, and to their pasts, each once for all its rows."""
        num_kv, group = self._slab.layer(layer)[0].shape[1], q_BGD.shape[1]
        q_NKGD, scores_NKGC = (x.view(-1, num_kv, group, x.shape[2]) for x in (q_BGD, scores_BGC))
        sinks_NKG = None if sinks_BG is None else sinks_BG.view(-1, num_kv, group)
        p_NKGC = scores_NKGC if self._places.readers[0].rows is None else torch.empty_like(scores_NKGC)
        parts = []
        for readers in self._places.readers:
            joined = _select(scores_NKGC, readers.rows)
            past = self._past_scores(layer, _select(q_NKGD, readers.rows), readers, shape)
            if past is not None:
                joined = torch.cat([past, joined], -1)
            sinks = None if sinks_NKG is None else _select(sinks_NKG, readers.rows).flatten(0, 1)
            p = softmax_with_sinks(joined.flatten(0, 1).unsqueeze(2), sinks).view(joined.shape)
            num_past = 0 if past is None else past.shape[-1]
            if readers.rows is None:
                p_NKGC = p[..., num_past:]
            else:
                p_NKGC.index_copy_(0, readers.rows, p[..., num_past:])
            if num_past:
                parts.append((readers, p[..., :num_past]))
        out_NKGD = torch.bmm(p_NKGC.flatten(0, 1).to(v_BCD.dtype), v_BCD).view(-1, num_kv, group, v_BCD.shape[2])
        for readers, p in parts:
            assert readers.past is not None
            v_KPD = readers.past.prompt.layers[layer][1][:, readers.past.length - p.shape[-1] : readers.past.length]
            p_KMP = p.transpose(0, 1).reshape(num_kv, -1, p.shape[-1]).to(v_KPD.dtype)
            more = torch.bmm(p_KMP, v_KPD).view(num_kv, -1, group, v_KPD.shape[2]).transpose(0, 1)
            if readers.rows is None:
                out_NKGD += more
            else:
                out_NKGD.index_add_(0, readers.rows, more)
        return out_NKGD.flatten(1, 2)

    def _past_scores(self, layer: int, q_RKGD: Tensor, readers: _Readers, shape: Shape) -> Tensor | None:
        """Return the scores ``(R, K, G, P)`` of the past's last P positions, those that at least one row sees."""
        past = readers.past
        if past is None:
            return None
        first = 0 if shape.window is None else max(0, past.length + readers.shortest - shape.window + 1)
        if first >= past.length:
            return None
        num_kv, group = q_RKGD.shape[1:3]
        q_KMD = (q_RKGD * shape.scale).transpose(0, 1).reshape(num_kv, -1, q_RKGD.shape[3])
        k_KPD = past.prompt.layers[layer][0][:, first : past.length]
        scores_KMP = torch.bmm(q_KMD, k_KPD.transpose(1, 2)).float()
        if shape.softcap is not None:
            scores_KMP = scores_KMP.div_(shape.softcap).tanh_().mul_(shape.softcap)
        if shape.window is not None and past.length + readers.longest - first >= shape.window:
            scores_KMP += self._past_mask(readers, past, first, shape.window, group)
        return scores_KMP.view(num_kv, -1, group, scores_KMP.shape[2]).transpose(0, 1)

    def _past_mask(self, readers: _Readers, past: Past, first: int, window: int, group: int) -> Tensor:
        """Return zero at positions of the past that a row sees, minus infinity elsewhere: ``(M, P)``."""
        key = (id(readers), window, group)
        if key not in self._past_masks:
            positions = torch.arange(first, past.length, device=readers.lengths_R.device)
            is_hidden = (past.length + readers.lengths_R)[:, None] - positions >= window
            mask = torch.zeros(is_hidden.shape, device=positions.device).masked_fill_(is_hidden, float("-inf"))
            self._past_masks[key] = mask.repeat_interleave(group, 0)
        return self._past_masks[key]

    def rotation(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return factors ``(N, 1, D)`` of a head and of its swapped halves, from a model's cosines and sines."""
        if self._rotary is not rotary:
            cos, sin = (x[0].unsqueeze(1) for x in rotary)
            half = sin.shape[-1] // 2
            self._rotary, self._rotation = rotary, (cos, torch.cat([-sin[..., :half], sin[..., half:]], -1))
        return self._rotation

    def finish(self) -> None:
        self._slab.lengths = [length + 1 for length in self._slab.lengths]


def _scores(q: Tensor, k: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    """Return float32 scores ``(B, G, keys)`` of queries ``(B, G, D)`` and keys ``(B, keys, D)``."""
    if q.dtype != torch.float32:
        # Rounded where a training pass rounds, so that both give a token the same log probability.
        scores = torch.bmm(q * shape.scale, k.transpose(1, 2)).float()
        return (scores if shape.softcap is None else scores.div_(shape.softcap).tanh_().mul_(shape.softcap)).add_(mask)
    if shape.softcap is None:
        return torch.baddbmm(mask, q, k.transpose(1, 2), alpha=shape.scale)
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(shape.scale / shape.softcap)
    return scores.tanh_().mul_(shape.softcap).add_(mask)


def _find_readers(slab: Slab, device: torch.device) -> list[_Readers]:
    """Group the rows by their past; return nothing if no row has one."""
    by_past: dict[Past | None, list[int]] = {}
    for row, past in enumerate(slab.pasts):
        by_past.setdefault(past, []).append(row)
    if by_past.keys() <= {None}:
        return []
    found = []
    for past, rows in by_past.items():
        lengths = [slab.lengths[row] for row in rows]
        which, after = upload([np.array(rows), np.array(lengths)], device)
        found.append(_Readers(past, None if len(by_past) == 1 else which, after, max(lengths), min(lengths)))
    return found


def _select(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


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
