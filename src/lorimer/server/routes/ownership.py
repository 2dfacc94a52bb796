"""Finding what a request names, for those who may see it.

Sessions, runs, samplers, futures and checkpoints belong to a user. To anybody else they do not exist: the sentence for
another user's object is the one for an unknown id. Published checkpoints, and what is said of their runs, are open to
every user.
"""

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from starlette.requests import Request

from lorimer.errors import Gone, InvalidInput, NotFound, UnknownFuture
from lorimer.server.context import context_of, user_of
from lorimer.store import checkpoints, runs, samplers, sessions
from lorimer.store.checkpoints import Checkpoint
from lorimer.store.runs import Run
from lorimer.store.samplers import SamplingSession
from lorimer.store.sessions import Session
from lorimer.store.weights import Weights
from lorimer.types.paths import parse_path

Found = TypeVar("Found")

SHOWN_CHARS = 200


def quote_id(name: str) -> str:
    return repr(name if len(name) <= SHOWN_CHARS else name[:SHOWN_CHARS] + "...")


def is_id(name: str) -> bool:
    """Whether a database can look for it; PostgreSQL has no text with NUL."""
    return "\0" not in name


async def look_up(request: Request, find: Callable[[Connection, str], Found | None], name: str) -> Found | None:
    return await context_of(request).store.read(find, name) if is_id(name) else None


async def find_session(request: Request, session_id: str) -> Session:
    """The caller's session of this id."""
    session = await look_up(request, sessions.get_session, session_id)
    if session is None or session.user_id != user_of(request).user_id:
        raise NotFound(f"there is no session {quote_id(session_id)}")
    return session


async def find_run(request: Request, model_id: str) -> Run:
    """The caller's run of this id."""
    run = await look_up(request, runs.get_run, model_id)
    if run is None or run.user_id != user_of(request).user_id:
        raise missing_run(model_id)
    return run


async def find_trainable(request: Request, model_id: str) -> Run:
    """The caller's run of this id, unless it only holds the copy of a checkpoint.

    Without asking the database for one that is at work: whose it is does not change.
    """
    run = context_of(request).scheduler.known_run(model_id)
    if run is None or run.user_id != user_of(request).user_id:
        run = await find_run(request, model_id)
    if run.is_unloaded:
        raise InvalidInput(f"run {quote_id(model_id)} holds copied weights; make a run from their path to train them")
    return run


def missing_run(model_id: str) -> NotFound:
    return NotFound(f"there is no training run {quote_id(model_id)}")


async def find_sampler(request: Request, sampling_session_id: str) -> SamplingSession:
    """The caller's sampling session of this id."""
    sampler = await look_up(request, samplers.get_sampler, sampling_session_id)
    if sampler is None or sampler.user_id != user_of(request).user_id:
        raise NotFound(f"there is no sampling session {quote_id(sampling_session_id)}")
    return sampler


async def check_future(request: Request, request_id: str) -> None:
    """Check that the caller has a future of this id; `Gone` otherwise, so that clients submit again."""
    owner = await context_of(request).scheduler.owner_of(request_id) if is_id(request_id) else None
    if owner != user_of(request).user_id:
        raise UnknownFuture(str(lost_future(request_id)))


def lost_future(request_id: str) -> Gone:
    return Gone(f"nothing is known of the future {quote_id(request_id)}, or its result has expired; submit again")


def missing_checkpoint(path: str) -> NotFound:
    return NotFound(f"there is no checkpoint {quote_id(path)}")


async def find_checkpoint(
    request: Request, path: str, *, to_read: bool = False, access_token: str | None = None
) -> Checkpoint:
    """The checkpoint at a `tinker://` path: the caller's or the token holder's or, `to_read`, a published one."""
    context = context_of(request)
    parsed = parse_path(path)
    place = (parsed.training_run_id, parsed.checkpoint_type, parsed.name)
    found = await context.store.read(checkpoints.find, *place) if is_id(path) else None
    readers = {user_of(request).user_id}
    if access_token:
        readers.add((await context.credentials.identify(access_token)).user.user_id)
    if found is None or (found.user_id not in readers and not (to_read and found.public)):
        raise missing_checkpoint(path)
    return found


async def find_weights(request: Request, path: str, access_token: str | None = None) -> Weights:
    """The weights of a checkpoint that can be loaded or sampled."""
    checkpoint = await find_checkpoint(request, path, to_read=True, access_token=access_token)
    if checkpoint.kind == "external":
        raise InvalidInput(f"{quote_id(path)} is an export; paths with /weights/ or /sampler_weights/ can be loaded")
    return checkpoint.weights


def visible_checkpoints(connection: Connection, run: Run, user_id: str) -> list[Checkpoint]:
    """All checkpoints of a run for its owner, the published ones for others."""
    found = checkpoints.list_for_run(connection, run.model_id)
    return found if run.user_id == user_id else [checkpoint for checkpoint in found if checkpoint.public]


def accessible_run(connection: Connection, model_id: str, user_id: str) -> tuple[Run, list[Checkpoint]] | None:
    """A run with its checkpoints, if it is the user's or has published ones."""
    run = runs.get_run(connection, model_id)
    if run is None:
        return None
    found = visible_checkpoints(connection, run, user_id)
    return (run, found) if found or run.user_id == user_id else None
