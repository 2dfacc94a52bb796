"""Looks up the objects that a request names and checks that the caller may see them.

Sessions, runs, samplers, futures and checkpoints belong to a user. To anybody else they do not exist: another user's
object and an unknown id give the same error. Published checkpoints, and the descriptions of their runs, are visible to
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
    """Return whether the database can look up this name; PostgreSQL text cannot contain NUL."""
    return "\0" not in name


async def look_up(request: Request, find: Callable[[Connection, str], Found | None], name: str) -> Found | None:
    return await context_of(request).store.read(find, name) if is_id(name) else None


async def find_session(request: Request, session_id: str) -> Session:
    """Return the caller's session. Raise `NotFound` otherwise."""
    session = await look_up(request, sessions.get_session, session_id)
    if session is None or session.user_id != user_of(request).user_id:
        raise NotFound(f"there is no session {quote_id(session_id)}")
    return session


async def find_run(request: Request, model_id: str) -> Run:
    """Return the caller's run. Raise `NotFound` otherwise."""
    run = await look_up(request, runs.get_run, model_id)
    if run is None or run.user_id != user_of(request).user_id or run.deleted_at is not None:
        raise missing_run(model_id)
    return run


async def find_trainable(request: Request, model_id: str) -> Run:
    """Return the caller's run. Raise `InvalidInput` if it only holds a copied checkpoint.

    Skips the database if the run is active in the scheduler, because the owner of a run never changes.
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
    """Return the caller's sampling session. Raise `NotFound` otherwise."""
    sampler = await look_up(request, samplers.get_sampler, sampling_session_id)
    if sampler is None or sampler.user_id != user_of(request).user_id:
        raise NotFound(f"there is no sampling session {quote_id(sampling_session_id)}")
    return sampler


async def check_future(request: Request, request_id: str) -> None:
    """Raise `UnknownFuture` unless the caller owns this future; its 410 makes clients submit the request again."""
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
    """Return the checkpoint at a `tinker://` path if the caller or the holder of `access_token` owns it.

    With `to_read`, published checkpoints of other users are returned too.
    """
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
    """Return the weights of a checkpoint that can be loaded or sampled. Refuse exports."""
    checkpoint = await find_checkpoint(request, path, to_read=True, access_token=access_token)
    if checkpoint.kind == "external":
        raise InvalidInput(f"{quote_id(path)} is an export; paths with /weights/ or /sampler_weights/ can be loaded")
    return checkpoint.weights


def visible_checkpoints(connection: Connection, run: Run, user_id: str) -> list[Checkpoint]:
    """Return all checkpoints of a run to its owner, and the published ones to others."""
    found = checkpoints.with_client_steps(connection, checkpoints.list_for_run(connection, run.model_id))
    return found if run.user_id == user_id else [checkpoint for checkpoint in found if checkpoint.public]


def accessible_run(connection: Connection, model_id: str, user_id: str) -> tuple[Run, list[Checkpoint]] | None:
    """Return a run and the checkpoints visible to the user, or none if the user may not see the run."""
    run = runs.get_run(connection, model_id)
    if run is None or run.deleted_at is not None:
        return None
    found = visible_checkpoints(connection, run, user_id)
    return (run, found) if found or run.user_id == user_id else None
