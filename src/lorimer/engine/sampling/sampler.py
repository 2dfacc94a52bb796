"""Continuous batching: sequences of any requests and adapters decode together, new ones join between steps.

A request's prompt is computed once (``Prefill``), in pieces that keep the others waiting only briefly, and shared by
all its samples and by equal prompts that wait beside it. Its samples then take rows of the slab as there is room.
When memory runs short the newest sequences are preempted and computed again later; nothing fails.
``step`` does one pass of either kind; ``prompts.py`` scores prompt tokens; ``drawing.py`` chooses tokens, of those
that ``constraints.py`` allows; ``results.py`` builds the replies.

An error in work that is done for one request fails that request. Prompts whose common pass fails are computed one by
one, so that the cause is found; a decoding pass that fails is the only thing that takes other requests with it.
"""

import secrets
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lorimer.engine.adapters.adapters import FrozenAdapter
from lorimer.engine.messages import Done, Failed, Reply, SampleRequest
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.device import download, upload
from lorimer.engine.model.head import Head
from lorimer.engine.model.linear import CompiledSlices
from lorimer.engine.model.vision import Placement, SequenceImages
from lorimer.engine.sampling.constraints import Constraint, Grammars, mask_
from lorimer.engine.sampling.drawing import Rule, choose, derive_seed, uniforms
from lorimer.engine.sampling.kv_cache import (
    DecodeAttention,
    PrefillAttention,
    PrefillSpan,
    PrefixStore,
    PromptCache,
    Slab,
    find_pasts,
)
from lorimer.engine.sampling.prompts import PromptScores
from lorimer.engine.sampling.results import progress, result
from lorimer.engine.sampling.stops import Stop, StopWatch
from lorimer.engine.training.batch import AdapterSlice, Pass

PREFILL_TOKENS = 2048
"""Maximum prompt tokens of one pass."""
_DRAWS = 64
"""Maximum first tokens drawn together: a request may want thousands of samples of one row of logits."""


@dataclass(eq=False)
class Request:
    """A sample request in progress."""

    message: SampleRequest
    adapter: FrozenAdapter | None
    max_tokens: int
    scores: PromptScores | None
    images: SequenceImages | None = None
    sequences: list["Sequence"] = field(default_factory=list)
    num_cached: int = 0
    error: str = ""
    """Why it fails once its sequences have ended."""
    failure: str = ""
    """An error of the engine's own, which fails it after this pass."""

    @property
    def weights(self) -> str:
        return self.message.sampler_id or ""

    @property
    def is_finished(self) -> bool:
        return all(s.stop_reason is not None for s in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One sample. It waits for its prompt, is ready with a first token, holds a row of the slab, and ends."""

    request: Request
    index: int
    seed: int
    stop: StopWatch
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None
    constraint: Constraint | None = None

    @property
    def position(self) -> int:
        """Position of the last token, as the model gets it."""
        images = self.request.images
        return len(self.request.message.prompt) + len(self.tokens) - 1 + (images.shift if images else 0)

    @property
    def rule(self) -> Rule:
        params = self.request.message.params
        return Rule(params.temperature, params.top_k, params.top_p)


@dataclass(eq=False)
class Prefill:
    """Tokens to compute before the sequences that wait for them can go on."""

    request: Request
    tokens: np.ndarray
    sequences: list[Sequence]
    cache: PromptCache
    scores: PromptScores | None
    """Scores to compute with the prompt; not again for a sequence that was preempted."""
    is_alone: bool = False
    """Whether it gets passes of its own, because a pass that it shared has failed."""

    @property
    def requests(self) -> list[Request]:
        return [sequence.request for sequence in self.sequences]

    @cached_property
    def keys(self) -> np.ndarray:
        """Key that distinguishes it from other prompts under the same weights."""
        return self.request.images.keys(self.tokens) if self.request.images else self.tokens

    def is_same(self, other: "Prefill") -> bool:
        ours, theirs = ((p.request.weights, p.request.message.cache_salt) for p in (self, other))
        return ours == theirs and np.array_equal(self.keys, other.keys)


class Sampler:
    def __init__(
        self,
        model: BaseModel,
        tokenizer: object,
        eos_token_ids: list[int],
        memory_bytes: int,
        max_rows: int,
        new_seed: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self.model, self._tokenizer, self._eos = model, tokenizer, eos_token_ids
        self._head = Head(model)
        self._grammars = Grammars(tokenizer, model.vocab_size, eos_token_ids)
        self._max_rows = max_rows
        self._slab = Slab(max(1, int(0.75 * memory_bytes) // model.position_bytes))
        self._prefixes = PrefixStore(memory_bytes // 4)
        self._prefills: deque[Prefill] = deque()
        self._ready: deque[tuple[Sequence, PromptCache]] = deque()
        self._rows: list[Sequence] = []
        """The sequence of each row of the slab."""
        self._last_slices: CompiledSlices | None = None
        self._requests: dict[str, Request] = {}
        self._failed: list[Request] = []
        self._prefill_next = True
        self._new_seed = new_seed
        self.num_sampled = self.num_prefilled = self.num_cached = 0

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their prompt or for room."""
        return sum(len(prefill.sequences) for prefill in self._prefills) + len(self._ready)

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def add(self, message: SampleRequest, adapter: FrozenAdapter | None, images: SequenceImages | None = None) -> None:
        """Enqueue a validated request and the images of its prompt; ``step`` computes and answers it."""
        prompt = np.asarray(message.prompt, np.int64)
        room = self.model.max_context - len(prompt)
        wanted = room if message.params.max_tokens is None else message.params.max_tokens
        request = Request(
            message=message,
            adapter=adapter,
            max_tokens=min(wanted, room),
            scores=PromptScores.wanted(message, images.is_image if images else None),
            images=images,
        )
        stop = Stop(message.params.stop, self._eos, self._tokenizer)
        seed = self._new_seed(64) if message.params.seed is None else message.params.seed
        constraint = self._grammars.compile(message.grammar) if message.grammar else None
        request.sequences = [
            Sequence(request, i, derive_seed(seed, i), stop.begin(), constraint=constraint and constraint.copy())
            for i in range(message.num_samples)
        ]
        self._enqueue(request, prompt, request.sequences, request.scores)
        self._requests[message.request_id] = request

    def _enqueue(
        self, request: Request, tokens: np.ndarray, sequences: list[Sequence], scores: PromptScores | None
    ) -> None:
        """Enqueue ``tokens`` for the sequences, joining a waiting prefill of the same tokens if there is one."""
        prefill = Prefill(request, tokens, list(sequences), PromptCache(len(tokens)), scores)
        if scores is None:
            for other in self._prefills:
                if other.scores is None and other.is_same(prefill):
                    other.sequences.extend(sequences)
                    return
        self._prefills.append(prefill)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; return false if it is not in progress."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        for prefill in self._prefills:
            prefill.sequences = [s for s in prefill.sequences if s.request is not request]
        self._prefills = deque(p for p in self._prefills if p.sequences)
        self._ready = deque(pair for pair in self._ready if pair[0].request is not request)
        for row in reversed(range(len(self._rows))):
            if self._rows[row].request is request:
                self._free(row)
        return True

    @torch.no_grad()
    def step(self) -> list[Reply]:
        """Compute one pass: of prompts or of decoding, alternating when both wait."""
        self._fill_slab()
        if self._failed:
            return self._drop_failed()
        can_prefill = bool(self._prefills) and len(self._ready) + len(self._rows) < self._max_rows
        replies: list[Reply] = []
        if can_prefill and (self._prefill_next or not self._rows):
            self._prefill_next = False
            replies = self._prefill()
        else:
            self._prefill_next = True
            if self._rows:
                replies = self._decode()
        return replies + self._drop_failed()

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────

    def _blame(self, requests: Iterable[Request], error: Exception) -> None:
        """Mark these requests as failed by an error; they take part in the pass until it ends."""
        traceback.print_exception(error)
        for request in requests:
            if not request.failure:
                request.failure = _describe(error)
                self._failed.append(request)

    def _drop_failed(self) -> list[Reply]:
        failed, self._failed = self._failed, []
        replies: list[Reply] = []
        for request in failed:
            request_id = request.message.request_id
            if self.cancel(request_id):
                replies.append(Failed(request_id=request_id, category="server", error=request.failure))
        return replies

    def fail_all(self, error: Exception) -> list[Reply]:
        """Fail everything after an error that belongs to no request and no pass."""
        self._blame(self._requests.values(), error)
        return self._drop_failed()

    # ── prompts ───────────────────────────────────────────────────────────────────────────────────────

    def _prefill(self) -> list[Reply]:
        chosen = self._choose_prefills()
        spans, start = [], 0
        for prefill, size in chosen:
            spans.append(PrefillSpan(start, start + size, prefill.cache))
            start += size
        parts = [np.arange(p.cache.length, p.cache.length + size) for p, size in chosen]
        prefills = [prefill for prefill, _ in chosen]
        try:
            hidden_TH = self._compute(prefills, spans, parts)
        except Exception as error:
            if len(prefills) == 1:
                self._blame(prefills[0].requests, error)
            for prefill in prefills:
                prefill.is_alone = True
            return []
        done = [i for i, prefill in enumerate(prefills) if prefill.cache.length == len(prefill.tokens)]
        with self.model.gathered_head():
            for prefill, span, part in zip(prefills, spans, parts, strict=True):
                self._score(prefill, hidden_TH[span.start : span.stop], part)
            if not done:
                return []
            (last,) = upload([np.array([spans[i].stop - 1 for i in done])], hidden_TH.device)
            return self._begin([prefills[i] for i in done], hidden_TH[last])

    def _compute(self, prefills: list[Prefill], spans: list[PrefillSpan], parts: list[np.ndarray]) -> Tensor:
        """Compute the next tokens of several prompts in one pass, which extends their caches."""
        tokens = np.concatenate([prefill.tokens[part] for prefill, part in zip(prefills, parts, strict=True)])
        attention = PrefillAttention(spans)
        slices = self._slices([(p.request, span.stop - span.start) for p, span in zip(prefills, spans, strict=True)])
        placements = [
            Placement(p.request.images, span.start, part[0], part[-1] + 1)
            for p, span, part in zip(prefills, spans, parts, strict=True)
            if p.request.images is not None
        ]
        hidden_TH = self._run(tokens, np.concatenate(parts), Pass(slices, cache=attention), placements)
        attention.finish()
        self.num_prefilled += len(tokens)
        return hidden_TH

    def _score(self, prefill: Prefill, x_NH: Tensor, positions: np.ndarray) -> None:
        if prefill.scores is not None:
            try:
                prefill.scores.add(x_NH, positions, self._head, _slices([(prefill.request, len(x_NH))]))
            except Exception as error:
                self._blame([prefill.request], error)

    def _choose_prefills(self) -> list[tuple[Prefill, int]]:
        """Choose the prefills of the next pass by arrival, and how many tokens of each; group equal adapters."""
        chosen: list[tuple[Prefill, int]] = []
        room, rows = PREFILL_TOKENS, self._max_rows - len(self._ready) - len(self._rows)
        for prefill in self._prefills:
            if room <= 0 or rows <= 0 or (chosen and (prefill.is_alone or chosen[0][0].is_alone)):
                break
            if not prefill.cache.layers:
                try:
                    self._use_prefix(prefill)
                except Exception as error:
                    self._blame(prefill.requests, error)
            size = min(room, len(prefill.tokens) - prefill.cache.length)
            chosen.append((prefill, size))
            room -= size
            rows -= len(prefill.sequences)
        return sorted(chosen, key=lambda pair: pair[0].request.weights)

    def _use_prefix(self, prefill: Prefill) -> None:
        request = prefill.request
        most = len(prefill.tokens) - 1
        if prefill.scores is not None:
            most = min(most, prefill.scores.first_position - 1)
        found = self._prefixes.find(request.message.cache_salt, request.weights, prefill.keys, most)
        if found is not None:
            cache, length = found
            prefill.cache = cache.copy_prefix(length, len(prefill.tokens))
            for sequence in prefill.sequences:
                if not sequence.tokens:
                    sequence.request.num_cached = length
            self.num_cached += length

    def _begin(self, prefills: list[Prefill], last_NH: Tensor) -> list[Reply]:
        """Draw the next token of every sequence whose prompt is complete."""
        for prefill in prefills:
            self._prefills.remove(prefill)
            request = prefill.request
            try:
                self._prefixes.put(request.message.cache_salt, request.weights, prefill.keys, prefill.cache)
            except Exception as error:
                self._blame(prefill.requests, error)
        waiting = [(i, s) for i, p in enumerate(prefills) for s in p.sequences]
        replies: list[Reply] = []
        try:
            logits_NV = self._head.logits(last_NH, self._slices([(p.request, 1) for p in prefills]))
            for start in range(0, len(waiting), _DRAWS):
                part = waiting[start : start + _DRAWS]
                (owners,) = upload([np.array([i for i, _ in part])], logits_NV.device)
                replies += self._draw([s for _, s in part], logits_NV[owners])
        except Exception as error:
            self._blame([s.request for _, s in waiting], error)
        self._ready.extend((s, prefills[i].cache) for i, s in waiting if s.stop_reason is None)
        return replies

    # ── decoding ──────────────────────────────────────────────────────────────────────────────────────

    def _fill_slab(self) -> None:
        num_free = self._max_rows - len(self._rows)
        if not self._ready or num_free <= 0:
            return
        pasts = find_pasts((cache for _, cache in islice(self._ready, num_free)), self._slab.pasts)
        while self._ready and len(self._rows) < self._max_rows:
            past = pasts.get(self._ready[0][1])
            if not self._slab.can_add(self._ready[0][1].length, past):
                return
            sequence, cache = self._ready.popleft()
            num_coming = min(len(self._ready), self._max_rows - len(self._rows) - 1)
            try:
                self._slab.add(cache, past, num_coming)
            except Exception as error:  # the slab may have been growing, and is then unusable
                self._blame([s.request for s in (*self._rows, sequence)], error)
                return
            self._rows.append(sequence)

    def _free(self, row: int) -> None:
        last = self._slab.remove(row)
        self._rows[row] = self._rows[last]
        self._rows.pop()
        if not self._rows:
            self._last_slices = None  # which would keep its adapters

    def _preempt(self) -> None:
        """Preempt the newest sequences until the others have room for one more token."""
        while not self._slab.can_step():
            newest = min(range(len(self._rows)), key=lambda row: len(self._rows[row].tokens))
            sequence = self._rows[newest]
            self._free(newest)
            tokens = np.concatenate([np.asarray(sequence.request.message.prompt, np.int64), sequence.tokens])
            try:
                self._enqueue(sequence.request, tokens, [sequence], None)
            except Exception as error:
                self._blame([sequence.request], error)

    def _decode(self) -> list[Reply]:
        self._preempt()
        try:
            replies = self._decode_rows()
        except Exception as error:
            self._blame([sequence.request for sequence in self._rows], error)
            return []
        for row in reversed(range(len(self._rows))):
            if self._rows[row].stop_reason is not None:
                self._free(row)
        return replies

    def _decode_rows(self) -> list[Reply]:
        """Compute one pass over all rows of the slab."""
        self._slab.make_room()
        # Rows in the order of adapters, so that each adapter owns one slice of the pass.
        order = sorted(range(len(self._rows)), key=lambda row: self._rows[row].request.weights)
        sequences = [self._rows[row] for row in order]
        attention = DecodeAttention(self._slab, order, self.model.device.handle)
        tokens, positions = np.array([(s.tokens[-1], s.position) for s in sequences]).T
        current = Pass(self._decode_slices(sequences), cache=attention)
        hidden_NH = self._run(tokens, positions, current)
        attention.finish()
        return self._draw(sequences, self._head.logits(hidden_NH, current.slices))

    def _decode_slices(self, sequences: list[Sequence]) -> list[AdapterSlice]:
        """Return the slices of a decoding pass, those of the step before, with their tables, if nothing has changed."""
        slices = _slices([(s.request, 1) for s in sequences])
        if self.model.native is None or not slices:
            self._last_slices = None  # which would keep its adapters
            return slices
        places = [(part.start, part.stop, id(part.weights)) for part in slices]
        if self._last_slices is None or places != [(p.start, p.stop, id(p.weights)) for p in self._last_slices]:
            self._last_slices = CompiledSlices(slices, self.model.native)
        return self._last_slices

    def _slices(self, parts: list[tuple[Request, int]]) -> list[AdapterSlice]:
        """Return slices whose products depend on nothing but their row: torch rounds one row otherwise than several."""
        slices = _slices(parts)
        return slices if self.model.native is None or not slices else CompiledSlices(slices, self.model.native)

    def _run(
        self, tokens: np.ndarray, positions: np.ndarray, current: Pass, placements: list[Placement] | None = None
    ) -> Tensor:
        tokens_T, positions_T = upload([tokens, positions], self.model.device.handle)
        return self.model.hidden(tokens_T, positions_T, current, placements or ())

    def _draw(self, sequences: list[Sequence], logits_NV: Tensor) -> list[Reply]:
        """Choose a token for each sequence, end those that stop, and return the replies of complete requests."""
        allowed: dict[int, np.ndarray] = {}
        for row, sequence in enumerate(sequences):
            if sequence.constraint is not None:
                try:
                    allowed[row] = sequence.constraint.allowed(logits_NV.shape[1])
                except Exception as error:
                    self._blame([sequence.request], error)
        mask_(logits_NV, allowed)
        numbers = uniforms([s.seed for s in sequences], [len(s.tokens) for s in sequences])
        most = max(s.request.message.topk_sample_logprobs for s in sequences)
        found = choose(logits_NV, [s.rule for s in sequences], numbers, most, self.model.native)
        # The only time that the host waits for the step.
        drawn, chosen, *top = download(found)
        self.num_sampled += len(sequences)
        replies: list[Reply] = []
        for i, (sequence, token, logprob) in enumerate(zip(sequences, drawn.tolist(), chosen.tolist(), strict=True)):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            k = sequence.request.message.topk_sample_logprobs
            if k:
                sequence.best.append((top[0][i, :k], top[1][i, :k]))
            if sequence.request.failure:
                continue
            try:
                replies += self._after_token(sequence)
            except Exception as error:
                self._blame([sequence.request], error)
        return replies

    def _after_token(self, sequence: Sequence) -> list[Reply]:
        request, constraint = sequence.request, sequence.constraint
        if constraint is not None:
            request.error = constraint.advance(sequence.tokens[-1]) or request.error
        if sequence.stop.ends(sequence.tokens) or (constraint is not None and constraint.is_complete):
            sequence.stop_reason = "stop"
        elif len(sequence.tokens) >= request.max_tokens:
            sequence.stop_reason = "length"
        request_id = request.message.request_id
        replies: list[Reply] = [progress(sequence)] if request.message.stream else []
        if sequence.stop_reason is not None and request.is_finished:
            if request.error:
                replies.append(Failed(request_id=request_id, category="user", error=request.error))
            else:
                replies.append(Done(request_id=request_id, result=result(request)))
            del self._requests[request_id]
        return replies


def _slices(parts: list[tuple[Request, int]]) -> list[AdapterSlice]:
    """Return the slices of consecutive requests on the token axis; the base has none."""
    slices, start = [], 0
    for _, members in groupby(parts, key=lambda part: part[0].weights):
        requests = list(members)
        stop = start + sum(size for _, size in requests)
        adapter = requests[0][0].adapter
        if adapter is not None:
            slices.append(AdapterSlice(start, stop, adapter.weights, adapter.scale, row_scales=adapter.row_scales))
        start = stop
    return slices


def _describe(error: Exception) -> str:
    return f"sampling failed: {type(error).__name__}: {error}"
