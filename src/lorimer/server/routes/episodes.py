"""Routes for episodes of programs outside: an OpenAI-compatible address for each, their settings, turns and rewards.

A program needs only a base URL: `/v1/runs/RUN/episodes/EPISODE`, or `/v1/runs/RUN` and a header. The trainer chooses
what answers, reads the turns as they were sampled, and ends episodes. `docs/agents.md` tells it by examples.
"""

from dataclasses import asdict
from typing import Any, get_args

from starlette.requests import Request
from starlette.responses import Response

from lorimer.errors import InvalidInput
from lorimer.server.bodies import decode, off_loop
from lorimer.server.context import context_of
from lorimer.server.openai import chat, completions, recording
from lorimer.server.openai.disconnects import Reader
from lorimer.server.openai.parameters import read_parameters
from lorimer.server.openai.recording import check_episode_id, episode_limits, find_choice, resolve_sampler
from lorimer.server.openai.schemas import ChatRequest, CompletionRequest
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.field_checks import check_metadata, check_text
from lorimer.server.routes.openai import answer_chat, answer_completion, shown_model
from lorimer.server.routes.queries import query_number, query_word
from lorimer.server.routes.replies import done, reply
from lorimer.server.routes.runs import RUN, find_tracked
from lorimer.store import episodes
from lorimer.types.episodes import (
    EPISODE_HEADER,
    CreateEpisodeRequest,
    Episode,
    EpisodesResponse,
    EpisodeState,
    FinishEpisodeRequest,
    RunSampler,
    SetRunSamplerRequest,
    TurnsResponse,
)

EPISODE = RUN + "/episodes/{episode_id}"
BASE = "/v1/runs/{run_id}"
EPISODE_BASE = BASE + "/episodes/{episode_id}"
MAX_LISTED = 1000
MAX_TURNS = 1000
BYTES_OF_TOKEN = 16


# ── what programs call ────────────────────────────────────────────────────────────────────────────────


async def create_episode_chat_completion(request: Request) -> Response:
    """Generate the next message of a conversation by the run's sampler, and record it as a turn of the episode."""
    run = await find_tracked(request)
    body = await read_parameters(request, ChatRequest)
    with Reader(request) as reader:
        choice = await find_choice(request, run, episode_of(request))
        chosen = recording.chosen_chat(body, choice)
        source = await resolve_sampler(request, run, choice.sampler)
        job = await reader.wait(chat.prepare(request, chosen, source))
        return await answer_chat(request, reader, await recording.begin(request, choice, job))


async def create_episode_completion(request: Request) -> Response:
    """Complete prompts by the run's sampler, and record each completion as a turn of the episode."""
    run = await find_tracked(request)
    body = await read_parameters(request, CompletionRequest)
    with Reader(request) as reader:
        choice = await find_choice(request, run, episode_of(request))
        chosen = recording.chosen_completion(body, choice)
        source = await resolve_sampler(request, run, choice.sampler)
        job = await reader.wait(completions.prepare(request, chosen, source))
        return await answer_completion(request, reader, await recording.begin(request, choice, job))


async def create_run_chat_completion(request: Request) -> Response:
    """As above; the header `X-Lorimer-Episode` names the episode."""
    return await create_episode_chat_completion(request)


async def create_run_completion(request: Request) -> Response:
    """As above; the header `X-Lorimer-Episode` names the episode."""
    return await create_episode_completion(request)


def episode_of(request: Request) -> str:
    """Return the episode that the path or the header of a request names."""
    if (in_path := request.path_params.get("episode_id")) is not None:
        return str(in_path)
    found = request.headers.get(EPISODE_HEADER)
    if found is None:
        raise InvalidInput(
            f"the request names no episode; the header {EPISODE_HEADER} with an id, or a base URL that ends with"
            " /episodes/ID, is accepted"
        )
    return found


async def list_episode_models(request: Request) -> Response:
    """List the one model that an episode's address has: the sampler that answers now."""
    run = await find_tracked(request)
    choice = await find_choice(request, run, episode_of(request))
    return reply(
        {"object": "list", "data": [shown_model(choice.sampler, int(run.created_at.timestamp()), run.user_id)]}
    )


async def end_episode(request: Request) -> Response:
    """End an episode by its own address: the same as `finish` below `/api/v1`."""
    return await finish_episode(request)


# ── what the trainer calls ────────────────────────────────────────────────────────────────────────────


async def set_run_sampler(request: Request) -> Response:
    """Choose the weights that answer a run's episodes from the next request on, and how they are sampled."""
    run = await find_tracked(request)
    body = await decode(request, SetRunSamplerRequest)
    check_text(context_of(request).settings, sampler=body.sampler)
    await resolve_sampler(request, run, body.sampler)
    found = await context_of(request).store.write(episodes.set_sampler, run.run_id, body)
    return reply(shown_sampler(found))


async def get_run_sampler(request: Request) -> Response:
    """Return what answers a run's episodes."""
    run = await find_tracked(request)
    found = await context_of(request).store.read(episodes.get_sampler, run.run_id)
    if found is None or found.sampler is None:
        raise InvalidInput(f"run {run.name!r} has no sampler for episodes yet; a PUT chooses one")
    return reply(shown_sampler(found))


def shown_sampler(found: episodes.RunSampler) -> RunSampler:
    return RunSampler.model_validate(asdict(found))


async def create_episode(request: Request) -> Response:
    """Make an episode with a sampler, temperature, limit of tokens, seed or metadata of its own."""
    run = await find_tracked(request)
    context = context_of(request)
    body = await decode(request, CreateEpisodeRequest)
    check_text(context.settings, sampler=body.sampler)
    check_metadata(context.settings, body.user_metadata)
    if body.sampler is not None:
        await resolve_sampler(request, run, body.sampler)
    made = await context.store.write(episodes.create, run.run_id, body, episode_limits(context.settings))
    return reply(shown(made))


def shown(found: episodes.Episode) -> Episode:
    path = f"/v1/runs/{found.run_id}/episodes/{found.episode_id}"
    return Episode.model_validate({**asdict(found), "path": path})


async def find_episode(request: Request) -> episodes.Episode:
    run = await find_tracked(request)
    episode_id = check_episode_id(episode_of(request))
    found = await context_of(request).store.read(episodes.get, run.run_id, episode_id)
    if found is None:
        raise episodes.missing(run.run_id, episode_id)
    return found


async def list_episodes(request: Request) -> Response:
    """List the episodes of a run in the order of their numbers, those after `after`."""
    run = await find_tracked(request)
    state = query_word(request, "state", ("any", *get_args(EpisodeState)))
    limit = query_number(request, "limit", 100, MAX_LISTED, 1)
    found = await context_of(request).store.read(
        episodes.list_episodes,
        run.run_id,
        after=query_number(request, "after", 0),
        limit=limit + 1,
        state=None if state == "any" else state,
    )
    return reply(EpisodesResponse(episodes=[shown(one) for one in found[:limit]], has_more=len(found) > limit))


async def get_episode(request: Request) -> Response:
    """Return an episode: its state, settings, reward and counts."""
    return reply(shown(await find_episode(request)))


async def list_turns(request: Request) -> Response:
    """List the turns of an episode after the number `after`, with tokens and logprobs exactly as sampled."""
    episode = await find_episode(request)
    after, limit = query_number(request, "after", 0), query_number(request, "limit", MAX_TURNS, MAX_TURNS, 1)
    found, has_more = await context_of(request).store.read(
        episodes.read_turns, episode.run_id, episode.episode_id, after=after, limit=limit
    )
    num_tokens = sum(len(turn.prompt_tokens) + len(turn.tokens) for turn in found)
    # Written without pydantic, which would validate every number again.
    return await off_loop(
        num_tokens * BYTES_OF_TOKEN,
        lambda: reply({"turns": [vars(turn) for turn in found], "has_more": has_more}),
    )


async def finish_episode(request: Request) -> Response:
    """End an episode with a reward, or with an error. The same request again changes nothing."""
    episode = await find_episode(request)
    context = context_of(request)
    body = await decode(request, FinishEpisodeRequest)
    check_text(context.settings, error=body.error, **{f"reward_parts {name!r}": name for name in body.reward_parts})
    check_metadata(context.settings, body.user_metadata)
    return reply(shown(await context.store.write(episodes.finish, episode.run_id, episode.episode_id, body)))


async def delete_episode(request: Request) -> Response:
    """Delete an episode with its turns."""
    episode = await find_episode(request)
    await context_of(request).store.write(episodes.remove, episode.run_id, episode.episode_id)
    return done()


LISTED: dict[str, dict[str, Any]] = {
    "after": {"type": "integer", "minimum": 0},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
}
STATES = {"state": {"type": "string", "enum": ["any", *get_args(EpisodeState)]}}
ANSWER = {"type": "object"}
"""OpenAI's own documents describe their answers."""

ROUTES = [
    Endpoint(
        "POST", EPISODE_BASE + "/chat/completions", create_episode_chat_completion, body=ChatRequest, answer=ANSWER
    ),
    Endpoint("POST", EPISODE_BASE + "/completions", create_episode_completion, body=CompletionRequest, answer=ANSWER),
    Endpoint("GET", EPISODE_BASE + "/models", list_episode_models, answer=ANSWER),
    Endpoint("POST", EPISODE_BASE + "/finish", end_episode, body=FinishEpisodeRequest, answer=Episode),
    Endpoint("POST", BASE + "/chat/completions", create_run_chat_completion, body=ChatRequest, answer=ANSWER),
    Endpoint("POST", BASE + "/completions", create_run_completion, body=CompletionRequest, answer=ANSWER),
    Endpoint("PUT", RUN + "/sampler", set_run_sampler, body=SetRunSamplerRequest, answer=RunSampler),
    Endpoint("GET", RUN + "/sampler", get_run_sampler, answer=RunSampler),
    Endpoint("POST", RUN + "/episodes", create_episode, body=CreateEpisodeRequest, answer=Episode),
    Endpoint("GET", RUN + "/episodes", list_episodes, query=LISTED | STATES, answer=EpisodesResponse),
    Endpoint("GET", EPISODE, get_episode, answer=Episode),
    Endpoint("DELETE", EPISODE, delete_episode, status=204),
    Endpoint("GET", EPISODE + "/turns", list_turns, query=LISTED, answer=TurnsResponse),
    Endpoint("POST", EPISODE + "/finish", finish_episode, body=FinishEpisodeRequest, answer=Episode),
]
