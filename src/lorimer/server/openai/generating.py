"""Runs the samples of one request of a compatible API and turns their tokens into text.

A ``Prompt`` becomes a sample, each of its sequences a ``Choice``. Whether tokens come while they are drawn or all at
the end makes no difference to a choice, so that streamed and whole answers are the same text.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from lorimer import types
from lorimer.errors import InvalidInput
from lorimer.scheduler.streaming import DirectSample, Piece
from lorimer.server.context import context_of, user_of
from lorimer.server.data_checks import check_sample
from lorimer.server.openai.detokenizing import Detokenizer, StopText
from lorimer.server.openai.parameters import BadParameter
from lorimer.server.openai.schemas import Sampling
from lorimer.server.openai.text import TextModel, text_model
from lorimer.server.routes.ownership import find_weights, quote_id
from lorimer.store.weights import WeightsShape
from lorimer.types.paths import SCHEME
from lorimer.types.stops import StopMatcher

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have: a token that a grammar excludes."""
_CHUNK = re.compile(r"\bprompt\.chunks\[(\d+)\]")


@dataclass(frozen=True)
class Source:
    """What ``model`` names: a base model, or weights on one."""

    name: str
    text: TextModel
    weights_id: str | None
    shape: WeightsShape | None
    """Of the weights."""


async def find_source(request: Request, name: str) -> Source:
    """A served base model, a checkpoint of the caller's, or a published one; 404 for anything else."""
    weights_id, shape, base_model = None, None, name
    if name.startswith(SCHEME):
        weights = await find_weights(request, name)
        weights_id, shape, base_model = weights.weights_id, weights.shape, weights.base_model
    served = context_of(request).scheduler.models
    if base_model not in served:
        accepted = ", ".join(map(repr, served))
        detail = f"model {quote_id(name)} is not served here; accepted are {accepted} and {SCHEME} paths on them"
        raise BadParameter("model", detail, "model_not_found", 404)
    return Source(name, await text_model(request, base_model), weights_id, shape)


@dataclass(frozen=True)
class Wanted:
    """How to sample one prompt."""

    tokens: list[int]
    """The text of the prompt; an image is one token of it."""
    max_tokens: int | None
    topk: int = 0
    prompt_topk: int | None = None
    """Score the prompt, with so many alternatives."""
    grammar: str = ""
    prompt: types.ModelInput | None = None
    """With its images; ``None`` if the tokens are all."""

    def request(self, body: Sampling) -> types.SampleRequest:
        params = types.SamplingParams(
            max_tokens=self.max_tokens,
            seed=body.seed,
            stop=body.stops or None,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
        )
        return types.SampleRequest(
            num_samples=body.n,
            prompt=self.prompt or types.ModelInput.from_ints(self.tokens),
            sampling_params=params,
            topk_sample_logprobs=self.topk,
            prompt_logprobs=True if self.prompt_topk is not None else None,
            topk_prompt_logprobs=self.prompt_topk or 0,
        )


def check_room(text: TextModel, num_tokens: int, max_tokens: int | None) -> None:
    """Refuse what the context cannot hold, with the numbers."""
    if num_tokens + (max_tokens or 1) > text.max_context:
        asked = "and at least 1 new token" if max_tokens is None else f"and max_tokens {max_tokens}"
        raise BadParameter(
            "max_tokens" if num_tokens < text.max_context else "prompt",
            f"the prompt of {num_tokens} tokens {asked} exceed the context length {text.max_context}",
            "context_length_exceeded",
        )


@dataclass(frozen=True)
class TokenScore:
    """A sampled token and the likeliest ones in its place."""

    token: int
    data: bytes
    logprob: float
    top: list[tuple[int, bytes, float]]
    offset: int
    """In characters, where the text stood when it came."""


@dataclass
class Choice:
    """One sequence as it becomes text. ``shown`` are special tokens that are text here."""

    index: int
    source: Source
    detokenizer: Detokenizer
    stop: StopText
    num_tokens: int = 0
    num_chars: int = 0
    stop_reason: types.StopReason | None = None
    scores: list[TokenScore] = field(default_factory=list)
    """Since ``take_scores`` was last called."""

    @classmethod
    def begin(
        cls, index: int, source: Source, prompt: Sequence[int], stops: StopMatcher, shown: Iterable[int] = ()
    ) -> "Choice":
        silent = source.text.eos_token_ids
        return cls(index, source, Detokenizer(source.text.tokens, prompt, shown, silent), StopText(stops))

    def add(self, piece: Piece) -> list[str]:
        """The text that each of these tokens completes; with the last one, all that is left."""
        top = piece.topk_logprobs.to_lists() if piece.topk_logprobs is not None else []
        texts: list[str] = []
        for i, (token, logprob) in enumerate(zip(piece.tokens, piece.logprobs, strict=True)):
            if not self.stop.is_stopped:
                self.scores.append(self._score(token, logprob, top[i] or [] if i < len(top) else []))
            added = self.detokenizer.add(token)
            self.num_chars += len(added)
            texts.append(self.stop.add(added))
        self.num_tokens += len(piece.tokens)
        if piece.stop_reason is not None:
            self.stop_reason = piece.stop_reason
            texts[-1] += self.stop.add(self.detokenizer.finish()) + self.stop.finish()
        return texts

    @property
    def finish_reason(self) -> str | None:
        if self.stop_reason is None:
            return None
        return "stop" if self.stop.is_stopped else self.stop_reason

    def take_scores(self) -> list[TokenScore]:
        scores, self.scores = self.scores, []
        return scores

    def _score(self, token: int, logprob: float, top: list[tuple[int, float]]) -> TokenScore:
        data = self.source.text.tokens.of
        best = [(other, data(other), finite(value)) for other, value in top]
        return TokenScore(token, data(token), finite(logprob), best, self.num_chars)


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


# ── running ───────────────────────────────────────────────────────────────────────────────────────────


Samples = list[DirectSample]
Record = Callable[[int, types.ModelInput, Piece], Awaitable[None]]
"""Stores a whole sequence, with its number among all of the request and its prompt, before it is answered."""


def start(request: Request, source: Source, body: Sampling, wanted: Sequence[Wanted]) -> Samples:
    """Put the samples into the queue of their model; they must be closed."""
    context = context_of(request)
    requests = [one.request(body) for one in wanted]
    for made in requests:
        check_sample(context.settings, made)
    samples: Samples = []
    try:
        user_id, weights_id = user_of(request).user_id, source.weights_id
        for made, one in zip(requests, wanted, strict=True):
            sample = context.scheduler.start_sample(
                user_id, source.text.name, weights_id, made, shape=source.shape, grammar=one.grammar, stream=body.stream
            )
            samples.append(sample)
    except BaseException:
        close(samples)
        raise
    return samples


def close(samples: Samples) -> None:
    for sample in samples:
        sample.close()


async def whole(samples: Samples, record: Record | None = None) -> list[types.SampleResponse]:
    """All results, recorded; the first error ends the others."""
    try:
        # Not gathered: whoever stops waiting for it would cancel the answers, and not the samples.
        await asyncio.wait([sample.answer for sample in samples], return_when=asyncio.FIRST_EXCEPTION)
        failed = [sample for sample in samples if sample.answer.done() and sample.answer.exception() is not None]
        if failed:
            raise named_images(failed[0], failed[0].answer.exception())
        responses = [sample.answer.result() for sample in samples]
        if record is not None:
            for number, (sample, response) in enumerate(zip(samples, responses, strict=True)):
                for piece in whole_pieces(response):
                    await record(_place(sample, number, piece), sample.request.prompt, piece)
        return responses
    finally:
        close(samples)


def _place(sample: DirectSample, number: int, piece: Piece) -> int:
    return number * sample.request.num_samples + piece.index


def named_images(sample: DirectSample, error: BaseException | None) -> Exception:
    """The error of a sample; where the engine names a chunk of the prompt, callers know an image of their messages."""
    assert isinstance(error, Exception)
    if not isinstance(error, InvalidInput):
        return error

    def name(chunk: re.Match[str]) -> str:
        before = sample.request.prompt.chunks[: int(chunk[1])]
        return f"image {sum(isinstance(one, types.ImageChunk) for one in before)} of messages"

    return type(error)(_CHUNK.sub(name, str(error)))


def whole_pieces(response: types.SampleResponse) -> list[Piece]:
    """The sequences of a result, each in one piece."""
    return [
        Piece(index, one.tokens, one.logprobs or [], one.topk_logprobs_np, one.stop_reason)
        for index, one in enumerate(response.sequences)
    ]


def joined_piece(pieces: Sequence[Piece]) -> Piece:
    """The pieces of one sequence as one, without alternatives."""
    return Piece(
        pieces[0].index,
        [token for piece in pieces for token in piece.tokens],
        [logprob for piece in pieces for logprob in piece.logprobs],
        stop_reason=pieces[-1].stop_reason,
    )


async def streamed(samples: Samples, record: Record | None = None) -> AsyncGenerator[tuple[int, Piece]]:
    """Pieces of all samples as they come, with the number of the sample; the first error ends them all.

    The last piece of a sequence comes after the whole sequence is recorded.
    """
    before: dict[int, list[Piece]] = {}
    queue: asyncio.Queue[tuple[int, list[Piece]] | Exception | None] = asyncio.Queue()

    async def follow(number: int, sample: DirectSample) -> None:
        try:
            async for pieces in sample.pieces():
                queue.put_nowait((number, pieces))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(named_images(sample, error))

    tasks = [asyncio.ensure_future(follow(number, sample)) for number, sample in enumerate(samples)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                number, sample = item[0], samples[item[0]]
                for piece in item[1]:
                    if record is not None:
                        place = _place(sample, number, piece)
                        before.setdefault(place, []).append(piece)
                        if piece.stop_reason is not None:
                            await record(place, sample.request.prompt, joined_piece(before.pop(place)))
                    yield number, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        close(samples)
