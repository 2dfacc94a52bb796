"""Routes for runs and checkpoints: list, describe, publish, copy, set an expiry, delete."""

import asyncio
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from lorimer import types
from lorimer.errors import CheckpointError, InvalidInput
from lorimer.server.bodies import decode
from lorimer.server.context import context_of, sdk_of, user_of
from lorimer.server.errors import Refusal
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.field_checks import check_text, check_ttl
from lorimer.server.routes.ownership import (
    accessible_run,
    find_checkpoint,
    find_session,
    is_id,
    missing_checkpoint,
    missing_run,
    visible_checkpoints,
)
from lorimer.server.routes.queries import PAGE, SCOPE, SCOPES, query_page, query_text, query_word
from lorimer.server.routes.replies import done, reply
from lorimer.server.signing import user_urn
from lorimer.store import audit, checkpoints, idempotency, quotas, runs, sessions, tracking
from lorimer.store.checkpoints import Checkpoint
from lorimer.store.directory import DataDirectory
from lorimer.store.manifests import read_files
from lorimer.store.runs import Run
from lorimer.types.checkpoints import SetTtlRequest
from lorimer.types.compatibility import knows_external
from lorimer.types.paths import KINDS, SEGMENTS, checkpoint_path

RUN = "/api/v1/training_runs/{run_id}"
CHECKPOINT = RUN + "/checkpoints/{segment}/{name}"


# ── how they are shown ────────────────────────────────────────────────────────────────────────────────


def path_of(checkpoint: Checkpoint) -> str:
    return checkpoint_path(checkpoint.model_id, checkpoint.kind, checkpoint.name)


def shown_checkpoint(checkpoint: Checkpoint) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=f"{SEGMENTS[checkpoint.kind]}/{checkpoint.name}",
        checkpoint_type=checkpoint.kind,
        time=checkpoint.created_at,
        tinker_path=path_of(checkpoint),
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        user_metadata=checkpoint.user_metadata or None,
        expires_at=checkpoint.expires_at,
        step=checkpoint.client_step,
    )


def shown_run(run: Run, found: list[Checkpoint]) -> types.TrainingRun:
    """Describe a run. `found` are its checkpoints visible to the caller, newest first."""
    newest: dict[str, types.Checkpoint] = {}
    for checkpoint in found:
        if checkpoint.kind not in newest:
            newest[checkpoint.kind] = shown_checkpoint(checkpoint)
    return types.TrainingRun(
        training_run_id=run.model_id,
        base_model=run.base_model,
        model_owner=user_urn(run.user_id),
        is_lora=run.method == "lora",
        method=run.method,
        corrupted=run.corrupted is not None,
        lora_rank=run.rank or None,
        last_request_time=run.last_request_at,
        last_checkpoint=newest.get("training"),
        last_sampler_checkpoint=newest.get("sampler"),
        user_metadata=run.user_metadata or None,
        created_at=run.created_at,
        project_id=run.project_id,
        seed=run.seed,
        train_attn=run.train_attn,
        train_mlp=run.train_mlp,
        train_unembed=run.train_unembed,
        use_rslora=run.use_rslora,
        use_dora=run.use_dora,
        train_embed=run.train_embed,
        train_norms=run.train_norms,
        optimizer_type=run.optimizer_type,
        replica=run.replica,
        run_id=run.run_id,
    )


def readable(request: Request, found: list[Checkpoint]) -> list[Checkpoint]:
    """Drop exports for SDK releases that would reject the whole list because of one."""
    if knows_external(sdk_of(request)):
        return found
    return [checkpoint for checkpoint in found if checkpoint.kind != "external"]


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────


async def list_training_runs(request: Request) -> Response:
    """List the caller's runs, newest first; `accessible` adds other users' runs with a published checkpoint."""
    limit, offset = query_page(request, 20)
    found, total = await context_of(request).store.read(
        page_of_runs,
        user_of(request).user_id,
        include_published=query_word(request, "access_scope", SCOPES) == "accessible",
        project_id=query_text(request, "project_id"),
        limit=limit,
        offset=offset,
    )
    cursor = types.Cursor(offset=offset, limit=limit, total_count=total)
    return reply(types.TrainingRunsResponse(training_runs=found, cursor=cursor))


def page_of_runs(c: Connection, /, user_id: str, **query: Any) -> tuple[list[types.TrainingRun], int]:
    found, total = runs.list_runs(c, user_id=user_id, **query)
    return [shown_run(run, visible_checkpoints(c, run, user_id)) for run in found], total


async def get_training_run(request: Request) -> Response:
    """Return one run: the caller's own or, with `accessible`, one with a published checkpoint."""
    run_id, user_id = request.path_params["run_id"], user_of(request).user_id
    scope = query_word(request, "access_scope", SCOPES)
    found = await context_of(request).store.read(accessible_run, run_id, user_id) if is_id(run_id) else None
    if found is None or (scope == "owned" and found[0].user_id != user_id):
        raise missing_run(run_id)
    shown = shown_run(*found)
    if found[0].user_id == user_id:
        size = await asyncio.to_thread(snapshot_bytes, context_of(request).directory, found[0])
        tracked = await context_of(request).store.read(tracking.get, found[0].run_id or run_id)
        name = tracked.name if tracked else None
        shown = shown.model_copy(update={"snapshot_bytes": size, "run_name": name})
    return reply(shown)


def snapshot_bytes(directory: DataDirectory, run: Run) -> int | None:
    """Return the size of a run's snapshots in the data directory; None if they are elsewhere or being replaced."""
    try:
        found = [read_files(directory.snapshots / name) for name in (run.snapshot_name, run.newest_name) if name]
    except CheckpointError:
        return None
    return sum(file["size"] for files in found for file in files.values())


async def list_checkpoints(request: Request) -> Response:
    """List all checkpoints of a run, newest first; of another user's run only the published ones."""
    run_id = request.path_params["run_id"]
    user_id = user_of(request).user_id
    found = await context_of(request).store.read(accessible_run, run_id, user_id) if is_id(run_id) else None
    if found is None:
        raise missing_run(run_id)
    return reply(
        types.CheckpointsListResponse(checkpoints=[shown_checkpoint(one) for one in readable(request, found[1])])
    )


async def list_user_checkpoints(request: Request) -> Response:
    """List the caller's checkpoints of all runs, newest first."""
    limit, offset = query_page(request, 100)
    user_id, store = user_of(request).user_id, context_of(request).store
    if knows_external(sdk_of(request)):
        found, total = await store.read(checkpoints.list_for_user, user_id, limit, offset)
    else:
        # Filter exports before cutting pages: clients take a short page for the last one.
        everything, _ = await store.read(checkpoints.list_for_user, user_id, 2**31, 0)
        readable_ones = readable(request, everything)
        found, total = readable_ones[offset : offset + limit], len(readable_ones)
    found = await store.read(checkpoints.with_client_steps, found)
    names = await store.read(checkpoints.names_of_runs, user_id)
    cursor = types.Cursor(offset=offset, limit=limit, total_count=total)
    return reply(types.CheckpointsListResponse(checkpoints=[named(one, names) for one in found], cursor=cursor))


def named(checkpoint: Checkpoint, names: dict[str, tuple[str, str]]) -> types.Checkpoint:
    """Describe a checkpoint with the id and the name of its run; a copy has none."""
    run_id, run_name = names.get(checkpoint.model_id, (None, None))
    return shown_checkpoint(checkpoint).model_copy(update={"run_id": run_id, "run_name": run_name})


# ── one checkpoint ────────────────────────────────────────────────────────────────────────────────────


def named_path(request: Request) -> str:
    """Return the `tinker://` path that the request's URL names."""
    parts = request.path_params
    return f"tinker://{parts['run_id']}/{parts['segment']}/{parts['name']}"


async def named_checkpoint(request: Request, *, to_read: bool = False) -> Checkpoint:
    """Return the checkpoint that the request's URL names."""
    if request.path_params["segment"] not in KINDS:
        raise missing_checkpoint(named_path(request))
    return await find_checkpoint(request, named_path(request), to_read=to_read)


def change_and_audit(
    c: Connection, checkpoint: Checkpoint, event: str, details: dict[str, Any] | None, action: Any, *values: Any
) -> bool:
    """Apply ``action`` to a checkpoint and, if that changed it, add an audit entry in the same transaction."""
    is_there: bool = action(c, checkpoint.checkpoint_key, *values)
    if is_there:
        audit.record(
            c,
            user_id=checkpoint.user_id,
            event=event,
            model_id=checkpoint.model_id,
            tinker_path=path_of(checkpoint),
            details=details or {},
        )
    return is_there


async def apply(
    request: Request, event: str, action: Any, *values: Any, details: dict[str, Any] | None = None
) -> Response:
    checkpoint = await named_checkpoint(request)
    if not await context_of(request).store.write(change_and_audit, checkpoint, event, details, action, *values):
        raise missing_checkpoint(named_path(request))
    return done()


async def delete_checkpoint(request: Request) -> Response:
    """Delete a checkpoint. Samplers that use its weights keep working."""
    return await apply(request, "checkpoint_deleted", checkpoints.delete)


async def publish_checkpoint(request: Request) -> Response:
    """Let every user load, sample and download a checkpoint; 409 if it is already public."""
    return await set_public(request, True)


async def unpublish_checkpoint(request: Request) -> Response:
    """Make a checkpoint private again; 409 if it is already private."""
    return await set_public(request, False)


async def set_public(request: Request, public: bool) -> Response:
    checkpoint = await named_checkpoint(request)
    key = request.headers.get("x-idempotency-key", "")
    check_text(context_of(request).settings, x_idempotency_key=key)
    await context_of(request).store.write(change_visibility, checkpoint, public, key)
    return done()


def change_visibility(c: Connection, checkpoint: Checkpoint, public: bool, key: str) -> None:
    """Publish or unpublish a checkpoint. A retry with the same idempotency key succeeds without a second change."""
    event = "checkpoint_published" if public else "checkpoint_unpublished"
    path = path_of(checkpoint)
    if key and idempotency.recall(c, checkpoint.user_id, f"{event} {key}") == path:
        return
    if not change_and_audit(c, checkpoint, event, None, checkpoints.set_public, public):
        if checkpoints.find(c, checkpoint.model_id, checkpoint.kind, checkpoint.name) is None:
            raise missing_checkpoint(path)
        detail = f"checkpoint {path!r} is {'public' if public else 'private'} already; nothing was changed"
        raise Refusal(409, "already_public" if public else "already_private", detail)
    if key:
        idempotency.remember(c, checkpoint.user_id, f"{event} {key}", path)


async def set_ttl(request: Request) -> Response:
    """Set when a checkpoint expires, counted from now; null removes the expiry."""
    ttl = check_ttl((await decode(request, SetTtlRequest)).ttl_seconds)
    expires_at = None if ttl is None else context_of(request).now() + timedelta(seconds=ttl)
    details = {"ttl_seconds": ttl}
    return await apply(request, "checkpoint_ttl_set", checkpoints.set_ttl, expires_at, details=details)


# ── copies ────────────────────────────────────────────────────────────────────────────────────────────


async def copy_weights(request: Request) -> Response:
    """Create a checkpoint of the caller that shares another checkpoint's weights, without copying files.

    The copy belongs to a run that cannot be trained: number `model_seq_id` of a session or, with a project, number 0 of
    a new session.
    """
    context, user = context_of(request), user_of(request)
    body = await decode(request, types.CopyWeightsRequest)
    check_text(context.settings, destination_project_id=body.destination_project_id)
    ttl = check_ttl(body.ttl_seconds)
    token = request.headers.get("x-tinker-weights-access-token") or body.weights_access_token
    if body.session_id is not None:
        await find_session(request, body.session_id)
        if body.model_seq_id is None:
            raise InvalidInput("model_seq_id is missing; with session_id it names the run of the copy")
    source = await find_checkpoint(request, body.source_path, to_read=True, access_token=token)
    expires_at = None if ttl is None else context.now() + timedelta(seconds=ttl)
    key = request.headers.get("x-idempotency-key", "")
    check_text(context.settings, x_idempotency_key=key)
    max_runs = context.settings.max_runs_per_session
    quota = context.settings.max_stored_bytes
    path = await context.store.write(copy_checkpoint, user.user_id, source, body, expires_at, key, max_runs, quota)
    return reply(types.CopyWeightsResponse(tinker_path=path))


def copy_checkpoint(
    c: Connection,
    user_id: str,
    source: Checkpoint,
    body: types.CopyWeightsRequest,
    expires_at: Any,
    key: str,
    max_runs: int,
    max_stored_bytes: int,
) -> str:
    """Create the copy and return its path. A retry with the same idempotency key returns the first path."""
    if key and (path := idempotency.recall(c, user_id, f"copy_weights {key}")) is not None:
        return str(path)
    found = checkpoints.find(c, source.model_id, source.kind, source.name)
    if found is None or found.checkpoint_key != source.checkpoint_key:
        raise missing_checkpoint(body.source_path)
    quotas.check_room(c, user_id, source.size_bytes, max_stored_bytes)
    run = run_of_copy(c, user_id, source, body, max_runs)
    copy = checkpoints.add_checkpoint(
        c,
        user_id=user_id,
        model_id=run.model_id,
        project_id=run.project_id,
        kind=source.kind,
        name=source.name,
        weights_id=source.weights_id,
        step=source.step,
        user_metadata=source.user_metadata,
        expires_at=expires_at,
    )
    path = path_of(copy)
    details = {"source_path": path_of(source)}
    audit.record(
        c, user_id=user_id, event="checkpoint_copied", model_id=run.model_id, tinker_path=path, details=details
    )
    if key:
        idempotency.remember(c, user_id, f"copy_weights {key}", path)
    return path


def run_of_copy(c: Connection, user_id: str, source: Checkpoint, body: types.CopyWeightsRequest, max_runs: int) -> Run:
    weights = source.weights
    session_id, number, project_id = body.session_id, body.model_seq_id or 0, body.destination_project_id
    if session_id is None:
        name = f"copy of {path_of(source)}"
        session = sessions.create_session(c, user_id=user_id, tags=["copy"], project_id=project_id, display_name=name)
        session = sessions.finish_session(c, session.session_id, "success")
    else:
        found = sessions.get_session(c, session_id)
        assert found is not None, "the session was found before, and sessions stay"
        session = found
    taken = runs.get_run(c, f"{session.session_id}:train:{number}")
    if taken is not None and not taken.is_unloaded:
        raise InvalidInput(
            f"model_seq_id {number} of the session is a run of its own; a number not used yet is accepted"
        )
    runs.check_room(c, session.session_id, number, max_runs)
    origin = runs.get_run(c, source.model_id)
    run = runs.create_run(
        c,
        session_id=session.session_id,
        user_id=user_id,
        project_id=session.project_id,
        model_seq_id=number,
        base_model=weights.base_model,
        rank=weights.rank,
        seed=None,
        train_attn=weights.train_attn,
        train_mlp=weights.train_mlp,
        train_unembed=weights.train_unembed,
        use_rslora=weights.use_rslora,
        use_dora=weights.use_dora,
        optimizer_type=weights.optimizer_type,
        user_metadata=origin.user_metadata if origin else {},
        method=weights.method,
        train_embed=weights.train_embed,
        train_norms=weights.train_norms,
    )
    runs.mark_unloaded(c, run.model_id)
    return run


ROUTES = [
    Endpoint(
        "GET",
        "/api/v1/training_runs",
        list_training_runs,
        query=PAGE | SCOPE | {"project_id": {"type": "string"}},
        answer=types.TrainingRunsResponse,
    ),
    Endpoint("GET", RUN, get_training_run, query=SCOPE, answer=types.TrainingRun),
    Endpoint("GET", RUN + "/checkpoints", list_checkpoints, answer=types.CheckpointsListResponse),
    Endpoint("GET", "/api/v1/checkpoints", list_user_checkpoints, query=PAGE, answer=types.CheckpointsListResponse),
    Endpoint("DELETE", CHECKPOINT, delete_checkpoint, status=204),
    Endpoint("POST", CHECKPOINT + "/publish", publish_checkpoint, status=204),
    Endpoint("DELETE", CHECKPOINT + "/publish", unpublish_checkpoint, status=204),
    Endpoint("PUT", CHECKPOINT + "/ttl", set_ttl, body=SetTtlRequest, status=204),
    Endpoint(
        "POST", "/api/v1/copy_weights", copy_weights, body=types.CopyWeightsRequest, answer=types.CopyWeightsResponse
    ),
]
