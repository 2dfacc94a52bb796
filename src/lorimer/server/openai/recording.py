"""Requests of programs outside that belong to an episode of a run: who answers, how, and the record of the answer.

The trainer chooses sampler, temperature, the limit of tokens and seed, and its choice wins over what a program asks
for. An answer is committed before it is complete for its reader, so that nothing a program has seen is missing later.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from starlette.requests import Request

from lorimer import types
from lorimer.errors import Gone, InvalidInput
from lorimer.scheduler.streaming import Piece
from lorimer.server.context import Context, context_of
from lorimer.server.openai.chat import ChatJob
from lorimer.server.openai.completions import CompletionJob
from lorimer.server.openai.generating import Source
from lorimer.server.openai.parameters import BadParameter
from lorimer.server.openai.schemas import ChatRequest, CompletionRequest, ImagePart
from lorimer.server.openai.text import text_model
from lorimer.server.routes.models import check_served
from lorimer.server.routes.ownership import find_sampler, find_weights, quote_id
from lorimer.server.settings import Settings
from lorimer.store import episodes, weights
from lorimer.store.episodes import EpisodeLimits, Turn
from lorimer.store.tracking import TrackedRun
from lorimer.types.paths import SCHEME

EPISODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
T = TypeVar("T")
Job = TypeVar("Job", ChatJob, CompletionJob)
Body = TypeVar("Body", ChatRequest, CompletionRequest)


@dataclass(frozen=True)
class Choice:
    """What the trainer chose for a request."""

    run: TrackedRun
    episode_id: str
    sampler: str
    temperature: float | None
    max_tokens: int | None


def episode_limits(settings: Settings) -> EpisodeLimits:
    return EpisodeLimits(
        settings.max_episodes_per_run, settings.max_episode_bytes_per_run, settings.max_turns_per_episode
    )


def check_episode_id(episode_id: str) -> str:
    if not EPISODE_ID.fullmatch(episode_id):
        raise InvalidInput(
            f"the episode is {quote_id(episode_id)}; 1 to 100 letters, digits and . _ - are accepted, a letter or digit"
            " first"
        )
    return episode_id


async def find_choice(request: Request, run: TrackedRun, episode_id: str) -> Choice:
    """Return what answers the next request of an episode: its own choices, else those of its run."""
    check_episode_id(episode_id)
    episode, of_run = await context_of(request).store.read(episodes.find, run.run_id, episode_id)
    choices = [one for one in (episode, of_run) if one is not None]
    sampler = _first(one.sampler for one in choices)
    if sampler is None:
        raise InvalidInput(
            f"run {run.name!r} has no sampler yet; PUT /api/v1/runs/{run.run_id}/sampler chooses what answers"
        )
    temperature, max_tokens = _first(one.temperature for one in choices), _first(one.max_tokens for one in choices)
    return Choice(run, episode_id, sampler, temperature, max_tokens)


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


async def resolve_sampler(request: Request, run: TrackedRun, sampler: str) -> Source:
    """Return the weights that ``sampler`` names; they must be of the run's base model."""
    weights_id, shape, base_model = None, None, sampler
    if sampler.startswith(SCHEME):
        named = await find_weights(request, sampler)
        weights_id, shape, base_model = named.weights_id, named.shape, named.base_model
    elif sampler != run.base_model:
        found = await find_sampler(request, sampler)
        weights_id, base_model = found.weights_id, found.base_model
        if weights_id is not None:
            kept = await context_of(request).store.read(weights.get_weights, weights_id)
            if kept is None:
                raise Gone(f"the weights of the sampler {quote_id(sampler)} have expired; save them again")
            shape = kept.shape
    if base_model != run.base_model:
        raise InvalidInput(
            f"the sampler {quote_id(sampler)} is of base model {base_model!r}; one of {run.base_model!r}, the run's, is"
            " accepted"
        )
    check_served(context_of(request), base_model)
    return Source(sampler, await text_model(request, base_model), weights_id, shape)


def chosen_chat(body: ChatRequest, choice: Choice) -> ChatRequest:
    """Return a request as it is answered, by the trainer's choices."""
    for index, message in enumerate(body.messages):
        if any(isinstance(part, ImagePart) for part in message.parts):
            raise BadParameter(
                f"messages[{index}].content", "images are not recorded in episodes; text is accepted", "unsupported"
            )
    asked = body.max_completion_tokens or body.max_tokens
    return _chosen(body, choice, {"max_completion_tokens": _least(asked, choice.max_tokens)})


def chosen_completion(body: CompletionRequest, choice: Choice) -> CompletionRequest:
    if body.max_tokens == 0:
        raise BadParameter("max_tokens", "max_tokens is 0; in an episode at least 1 is accepted")
    return _chosen(body, choice, {"max_tokens": _least(body.max_tokens, choice.max_tokens)})


def _chosen(body: Body, choice: Choice, values: dict[str, object]) -> Body:
    if choice.temperature is not None:
        # The logprobs are those of this temperature before top_p and top_k, which would change what is sampled.
        values |= {"temperature": choice.temperature, "top_p": 1.0, "top_k": -1}
    return body.model_copy(update=values | {"model": choice.sampler})


def _least(asked: int | None, most: int | None) -> int | None:
    given = [number for number in (asked, most) if number is not None]
    return min(given) if given else None


async def begin(request: Request, choice: Choice, job: Job) -> Job:
    """Count the request, which can no longer be refused by its form. Return the job with its seed and its record."""
    context = context_of(request)
    started_at = context.now()
    episode = await context.store.write(
        episodes.begin_turn, choice.run.run_id, choice.episode_id, choice.sampler, episode_limits(context.settings)
    )
    seed = job.body.seed if episode.seed is None else turn_seed(episode.seed, episode.num_begun)
    job = replace(job, body=job.body.model_copy(update={"seed": seed}))
    is_chat = isinstance(job, ChatJob)
    is_constrained = isinstance(job, ChatJob) and bool(job.wanted.grammar)
    form = Turn(
        number=episode.num_begun,
        choice=0,
        kind="chat" if is_chat else "completion",
        prompt_tokens=[],
        tokens=[],
        logprobs=[],
        stop_reason="stop",
        sampler=choice.sampler,
        temperature=job.body.temperature,
        top_p=job.body.top_p,
        top_k=job.body.top_k,
        seed=seed,
        is_constrained=is_constrained,
        started_at=started_at,
        finished_at=started_at,
    )
    return replace(job, record=Recorder(context, choice.run.run_id, choice.episode_id, form))


def turn_seed(seed: int, number: int) -> int:
    """Return the seed of a turn, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr((seed, number)).encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Recorder:
    """Commits the sequences of one request; ``form`` has what they share."""

    context: Context
    run_id: str
    episode_id: str
    form: Turn

    async def __call__(self, place: int, prompt: types.ModelInput, piece: Piece) -> None:
        assert piece.stop_reason is not None
        now: datetime = self.context.now()
        turn = replace(
            self.form,
            choice=place,
            prompt_tokens=prompt.to_ints(),
            tokens=piece.tokens,
            logprobs=piece.logprobs,
            stop_reason=piece.stop_reason,
            finished_at=now,
        )
        await self.context.store.write(episodes.record_turn, self.run_id, self.episode_id, turn)
