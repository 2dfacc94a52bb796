"""Issues signed download URLs and serves the files behind them.

A URL needs no key; its signature and expiry are checked first. The URL of a checkpoint contains the checkpoint's random
key, so it stops working when the checkpoint is deleted, even if another takes its name. Files of an object store that
signs URLs are downloaded from there, and so are archives, which are built and stored on the first request; encrypted
files are made here, of a local copy.
"""

import asyncio
import secrets
import tempfile
from datetime import datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import orjson
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from lorimer import types
from lorimer.errors import CheckpointError, Gone, InvalidInput, NotFound
from lorimer.server.context import context_of, user_of
from lorimer.server.openapi import JSON, Endpoint
from lorimer.server.routes.addresses import signed_address
from lorimer.server.routes.archives import Part, archive_parts, parts_bytes
from lorimer.server.routes.checkpoints import CHECKPOINT, named_checkpoint, named_path, path_of
from lorimer.server.routes.encryption import SUFFIX, encrypted, recipients_of
from lorimer.server.routes.ownership import is_id, quote_id
from lorimer.server.routes.replies import reply
from lorimer.server.signing import DOWNLOADS
from lorimer.server.tracing import trace
from lorimer.store import audit, checkpoints, futures, sessions
from lorimer.store.checkpoints import Checkpoint
from lorimer.store.manifests import verify
from lorimer.store.retention import ORPHAN_AGE
from lorimer.types.paths import KINDS, SEGMENTS

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter that users may download; the training state of a run is not among them."""
TRAINING_STATE = "training_state-"
"""What the names of other files of a full run begin with."""
MAX_TRACED = 100_000
BYTES = "application/octet-stream"


# ── addresses ─────────────────────────────────────────────────────────────────────────────────────────


async def external_weights_urls(request: Request) -> Response:
    """Return a signed URL for each file of an export."""
    checkpoint = await named_checkpoint(request, to_read=True)
    if checkpoint.kind != "external":
        raise InvalidInput(f"{quote_id(named_path(request))} is no export; paths with /external_weights/ are")
    suffix = SUFFIX if recipients_of(checkpoint) else ""
    names = [name + suffix for name in weight_files(checkpoint)]
    signed = await stored_addresses(request, checkpoint, names)
    if signed is None:
        await check_files(request, checkpoint)
        signed = {name: address_of(request, "files", checkpoint, f"/{name}") for name in names}
    await record_download(request, checkpoint)
    return reply(
        types.ExternalWeightsUrlsResponse(
            urls={name: url for name, (url, _) in signed.items()},
            expires=min(expires for _, expires in signed.values()),
        )
    )


async def archive(request: Request) -> Response:
    """Redirect to an archive of the adapter, which SDK releases up to 0.35 download."""
    checkpoint = await named_checkpoint(request, to_read=True)
    if checkpoint.kind == "external":
        raise InvalidInput(f"{quote_id(named_path(request))} is an export; external_weights_urls has its files")
    await check_files(request, checkpoint)
    url, expires = await stored_archive(request, checkpoint) or address_of(request, "archives", checkpoint, ".tar")
    await record_download(request, checkpoint)
    return RedirectResponse(url, 302, {"expires": format_datetime(expires, usegmt=True)})


async def stored_addresses(
    request: Request, checkpoint: Checkpoint, names: list[str]
) -> dict[str, tuple[str, datetime]] | None:
    """Return URLs of the object store, if it signs URLs and has the files as they are sent.

    The store's files are not read for that, so only their sizes are checked.
    """
    context = context_of(request)
    if context.settings.downloads != "signed" or recipients_of(checkpoint):
        return None
    objects, place, seconds = (
        context.scratch.objects,
        f"weights/{checkpoint.weights.name}",
        context.settings.download_seconds,
    )
    expires = context.now() + timedelta(seconds=seconds)
    urls = {name: await objects.sign(f"{place}/{name}", seconds) for name in names}
    if None in urls.values():
        return None
    if not await objects.has_all(place):
        raise CheckpointError(f"files of the checkpoint {checkpoint.name!r} are missing or torn in the object store")
    return {name: (url, expires) for name, url in urls.items() if url is not None}


async def stored_archive(request: Request, checkpoint: Checkpoint) -> tuple[str, datetime] | None:
    """Return the URL of an archive in the object store, if it signs URLs. Store the archive if there is none."""
    context = context_of(request)
    objects, place = context.scratch.objects, f"archives/{checkpoint.weights.name}/"
    lifetime = min(timedelta(seconds=context.settings.download_seconds), ORPHAN_AGE / 2)
    seconds, expires = lifetime.total_seconds(), context.now() + lifetime
    if context.settings.downloads != "signed" or await objects.sign(place, seconds) is None:
        return None
    names = {name async for name in objects.names(place, timedelta(0))}
    # The sweep deletes archives that are a day old; the URL must work until it expires.
    names -= {name async for name in objects.names(place, ORPHAN_AGE - lifetime)}
    if not names:
        names = {f"{place}{secrets.token_hex(8)}-{checkpoint.name}.tar"}
        directory = await local_directory(request, checkpoint)
        with tempfile.NamedTemporaryFile(dir=context.directory.path) as file:
            async for data in parts_bytes(archive_parts(directory, weight_files(checkpoint))):
                await asyncio.to_thread(file.write, data)
            file.flush()
            await objects.put_file(min(names), Path(file.name))
    url = await objects.sign(min(names), seconds)
    return None if url is None else (url, expires)


def address_of(request: Request, what: str, checkpoint: Checkpoint, rest: str) -> tuple[str, datetime]:
    place = (checkpoint.model_id, SEGMENTS[checkpoint.kind], checkpoint.name, checkpoint.checkpoint_key)
    return signed_address(request, f"{what}/{'/'.join(place)}{rest}")


def weight_files(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the checkpoint's files that make up the adapter or, of a full run, the model."""
    weights = checkpoint.weights
    if weights.method == "full":
        return sorted(name for name in weights.files if not name.startswith(TRAINING_STATE))
    return [name for name in ADAPTER_FILES if name in weights.files]


async def check_files(request: Request, checkpoint: Checkpoint) -> None:
    """Verify the checksums of the files to download. Raise if one was damaged since it was saved."""
    directory = await local_directory(request, checkpoint)
    await asyncio.to_thread(
        verify, directory, {name: checkpoint.weights.files[name] for name in weight_files(checkpoint)}
    )


async def local_directory(request: Request, checkpoint: Checkpoint) -> Path:
    """Return the directory of a checkpoint's files, fetched from the object store if it is not here."""
    scratch, name = context_of(request).scratch, checkpoint.weights.name
    await scratch.bring("weights", name)
    return scratch.path("weights", name)


async def record_download(request: Request, checkpoint: Checkpoint) -> None:
    await context_of(request).store.write(
        audit.record,
        user_id=user_of(request).user_id,
        event="checkpoint_downloaded",
        model_id=checkpoint.model_id,
        tinker_path=path_of(checkpoint),
    )


# ── what they lead to ─────────────────────────────────────────────────────────────────────────────────


async def download_file(request: Request) -> Response:
    """Send one file of a checkpoint. `Range` requests are supported unless the file is encrypted."""
    checkpoint = await signed_checkpoint(request)
    name, recipients = request.path_params["file"], recipients_of(checkpoint)
    plain_name = name.removesuffix(SUFFIX) if recipients else name
    if plain_name not in weight_files(checkpoint):
        raise NotFound(f"the checkpoint has no file {quote_id(name)}")
    path = await local_directory(request, checkpoint) / plain_name
    check_presence(path, checkpoint)
    if not recipients:
        return FileResponse(path, media_type=BYTES, filename=name)
    file, size = await asyncio.to_thread(encrypted, path, recipients, context_of(request).directory.path)
    return StreamingResponse(parts_bytes([Part(file, size)]), headers=file_headers(name, size), media_type=BYTES)


async def download_archive(request: Request) -> Response:
    """Send the files of an adapter, or the model of a full run, as a tar archive."""
    checkpoint = await signed_checkpoint(request)
    directory = await local_directory(request, checkpoint)
    for name in weight_files(checkpoint):
        check_presence(directory / name, checkpoint)
    parts = await asyncio.to_thread(archive_parts, directory, weight_files(checkpoint))
    headers = file_headers(f"{checkpoint.name}.tar", sum(part.size for part in parts))
    return StreamingResponse(parts_bytes(parts), headers=headers, media_type="application/x-tar")


def check_presence(path: Path, checkpoint: Checkpoint) -> None:
    """Raise if a file was deleted after its URL was signed, when its content was verified."""
    if not path.exists():
        raise CheckpointError(f"{path.name!r} of the checkpoint {checkpoint.name!r} is missing on the server")


def file_headers(name: str, size: int) -> dict[str, str]:
    return {"content-length": str(size), "content-disposition": f'attachment; filename="{name}"'}


async def signed_checkpoint(request: Request) -> Checkpoint:
    """Verify the signature of the request and return its checkpoint. Raise `Gone` if it was deleted or has expired."""
    check_signature(request)
    parts = request.path_params
    place = (parts["run_id"], KINDS[parts["segment"]], parts["name"])
    found = await context_of(request).store.read(checkpoints.find, *place)
    if found is None or found.checkpoint_key != parts["key"]:
        raise Gone("the checkpoint was deleted or has expired")
    return found


async def download_trace(request: Request) -> Response:
    """Send the trace of a session, for https://ui.perfetto.dev or chrome://tracing."""
    check_signature(request)
    context, session_id = context_of(request), request.path_params["session_id"]
    content = await context.store.read(trace_of, session_id, context.now())
    return Response(content, headers=file_headers(f"{session_id}.json", len(content)), media_type=JSON)


def trace_of(c: Connection, session_id: str, now: datetime) -> bytes:
    session = sessions.get_session(c, session_id) if is_id(session_id) else None
    if session is None:
        raise Gone("the session is not there any more")
    rows = futures.history(c, session_id, MAX_TRACED)
    return orjson.dumps(trace(session_id, session.created_at, rows, now))


def check_signature(request: Request) -> None:
    context, query = context_of(request), request.query_params
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    context.signer.check_download(path, query.get("expires", ""), query.get("signature", ""), context.now())


PLACE = "{run_id}/{segment}/{name}/{key}"
SIGNED = {"expires": {"type": "integer", "required": True}, "signature": {"type": "string", "required": True}}

ROUTES = [
    Endpoint(
        "GET",
        CHECKPOINT + "/external_weights_urls",
        external_weights_urls,
        answer=types.ExternalWeightsUrlsResponse,
    ),
    Endpoint("GET", CHECKPOINT + "/archive", archive, status=302),
    Endpoint("GET", f"{DOWNLOADS}files/{PLACE}/{{file}}", download_file, query=SIGNED),
    Endpoint("GET", f"{DOWNLOADS}archives/{PLACE}.tar", download_archive, query=SIGNED),
    Endpoint("GET", f"{DOWNLOADS}traces/{{session_id}}.json", download_trace, query=SIGNED),
]
