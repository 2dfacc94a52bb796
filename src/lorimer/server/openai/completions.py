"""Completions: text or tokens in, text out, with the log probabilities of both where they are asked for."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from lorimer import types
from lorimer.errors import TooLarge
from lorimer.server.openai import generating
from lorimer.server.openai.detokenizing import Detokenizer
from lorimer.server.openai.generating import Choice, Record, Source, TokenScore, Wanted, check_room, find_source
from lorimer.server.openai.parameters import BadParameter
from lorimer.server.openai.schemas import CompletionRequest
from lorimer.server.openai.usage import Usage
from lorimer.types.stops import StopMatcher

MAX_PROMPTS = 256


@dataclass(frozen=True)
class CompletionJob:
    """A request that can be sampled: one sample for each prompt."""

    body: CompletionRequest
    source: Source
    wanted: list[Wanted]
    record: Record | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    answer_id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")

    def head(self) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.body.model,
        }

    def choices(self) -> list[Choice]:
        """In the order of the prompts, ``n`` for each."""
        stops = StopMatcher(self.body.stops)
        return [
            Choice.begin(number * self.body.n + i, self.source, wanted.tokens, stops)
            for number, wanted in enumerate(self.wanted)
            for i in range(self.body.n)
        ]


async def prepare(request: Request, body: CompletionRequest, source: Source | None = None) -> CompletionJob:
    if body.stream and body.echo and body.logprobs is not None:
        raise BadParameter(
            "echo", "echo with logprobs is not available in a stream; send stream false", "unsupported_parameter"
        )
    source = source or await find_source(request, body.model)
    return await asyncio.to_thread(_prepare, body, source)


def _prepare(body: CompletionRequest, source: Source) -> CompletionJob:
    given = body.prompt
    several: Sequence[str | list[int]]
    if isinstance(given, str):
        several = [given]
    elif given and isinstance(given[0], int):
        several = [[token for token in given if isinstance(token, int)]]
    else:
        several = [one for one in given if not isinstance(one, int)]
    if not several or not all(several):
        raise BadParameter("prompt", "prompt is empty, or holds an empty one; at least one token is accepted")
    if len(several) > MAX_PROMPTS:
        raise TooLarge(f"prompt holds {len(several)} prompts; at most {MAX_PROMPTS} are accepted")
    wanted = []
    for one in several:
        tokens = source.text.encode(one, add_special_tokens=True) if isinstance(one, str) else one
        # There is no sample of no tokens: one is drawn and left out.
        max_tokens = max(1, body.max_tokens)
        check_room(source.text, len(tokens), max_tokens)
        scored = body.logprobs if body.echo else None
        wanted.append(Wanted(tokens, max_tokens, body.logprobs or 0, prompt_topk=scored))
    return CompletionJob(body, source, wanted)


def prompt_text(job: CompletionJob, number: int) -> str:
    """The prompt as text, in the way its completion is."""
    detokenizer = Detokenizer(job.source.text.tokens, [], (), job.source.text.eos_token_ids)
    return "".join(map(detokenizer.add, job.wanted[number].tokens)) + detokenizer.finish()


async def answer(request: Request, job: CompletionJob) -> dict[str, Any]:
    """The whole answer, when it is there."""
    samples = generating.start(request, job.source, job.body, job.wanted)
    responses = await generating.whole(samples, job.record)
    choices, shown = job.choices(), []
    for number, response in enumerate(responses):
        prompt = prompt_text(job, number) if job.body.echo else ""
        for piece in generating.whole_pieces(response):
            choice = choices[number * job.body.n + piece.index]
            text = "".join(choice.add(piece))
            shown.append(
                {
                    "index": choice.index,
                    "text": prompt + (text if job.body.max_tokens else ""),
                    "finish_reason": choice.finish_reason if job.body.max_tokens else "length",
                    "logprobs": _logprobs(job, number, choice, response, len(prompt)),
                }
            )
    used = usage(job, choices, responses)
    return {**job.head(), "choices": shown, "usage": used.shown()}


def usage(job: CompletionJob, choices: list[Choice], responses: list[types.SampleResponse]) -> Usage:
    return Usage(
        num_prompt=sum(len(wanted.tokens) for wanted in job.wanted),
        num_cached=sum(response.prompt_cache_hit_tokens for response in responses),
        num_sampled=sum(choice.num_tokens for choice in choices) if job.body.max_tokens else 0,
    )


def _logprobs(
    job: CompletionJob, number: int, choice: Choice, response: types.SampleResponse, num_before: int
) -> dict[str, Any] | None:
    if job.body.logprobs is None:
        return None
    scores = prompt_scores(job, number, response) if job.body.echo else []
    if job.body.max_tokens:
        scores += shifted(choice.take_scores(), num_before)
    return shown_logprobs(scores, job.body.logprobs)


Score = tuple[str, float | None, dict[str, float] | None, int]
"""Token, log probability, alternatives, and where it stands in the text."""


def prompt_scores(job: CompletionJob, number: int, response: types.SampleResponse) -> list[Score]:
    """Every token of the prompt, special ones too; nothing comes before the first, so it has no probability."""
    text = job.source.text
    detokenizer = Detokenizer(text.tokens, [], (), text.eos_token_ids)
    logprobs, top = response.prompt_logprobs or [], response.topk_prompt_logprobs or []
    scores: list[Score] = []
    offset = 0
    for i, token in enumerate(job.wanted[number].tokens):
        logprob = logprobs[i] if i else None
        best = {label(text.tokens.of(other)): value for other, value in (top[i] if i < len(top) else None) or []}
        name = label(text.tokens.of(token))
        shown = None if logprob is None else {name: logprob} | best
        scores.append((name, logprob, shown, offset))
        offset += len(detokenizer.add(token))
    return scores


def shifted(scores: Sequence[TokenScore], num_chars: int) -> list[Score]:
    """Scores of sampled tokens as a completion shows them, behind a prompt of ``num_chars``."""
    return [
        (
            label(score.data),
            score.logprob,
            {label(score.data): score.logprob} | {label(data): logprob for _, data, logprob in score.top},
            num_chars + score.offset,
        )
        for score in scores
    ]


def shown_logprobs(scores: list[Score], num_top: int) -> dict[str, Any]:
    return {
        "tokens": [token for token, _, _, _ in scores],
        "token_logprobs": [logprob for _, logprob, _, _ in scores],
        "top_logprobs": [top for _, _, top, _ in scores] if num_top else None,
        "text_offset": [offset for _, _, _, offset in scores],
    }


def label(data: bytes) -> str:
    """A token as text; one that is no text by itself is named by its bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


async def chunks(request: Request, job: CompletionJob) -> AsyncGenerator[Mapping[str, Any]]:
    """The answer in chunks, the first of which comes with the first tokens."""
    choices, begun = job.choices(), set()
    samples = generating.start(request, job.source, job.body, job.wanted)
    head = job.head()
    options = job.body.stream_options
    with_usage = options is not None and options.include_usage
    if with_usage:
        head["usage"] = None
    async with aclosing(generating.streamed(samples, job.record)) as pieces:
        async for number, piece in pieces:
            choice = choices[number * job.body.n + piece.index]
            text = "".join(choice.add(piece)) if job.body.max_tokens else ""
            if job.body.echo and choice.index not in begun:
                text = prompt_text(job, number) + text
            begun.add(choice.index)
            scores = None
            if job.body.logprobs is not None:
                scores = shown_logprobs(shifted(choice.take_scores(), 0), job.body.logprobs)
            if text or scores or choice.finish_reason:
                shown = {"index": choice.index, "text": text, "finish_reason": choice.finish_reason, "logprobs": scores}
                yield {**head, "choices": [shown]}
    if with_usage:
        used = usage(job, choices, [sample.answer.result() for sample in samples])
        yield {**head, "choices": [], "usage": used.shown()}
