"""Routes for trainings in processes of the server: start, list, follow, stop, resume, delete; and a look at data.

A training belongs to the user who started it. ``server/trainings.py`` runs it.
"""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorimer.errors import Busy, InvalidInput, NotFound, TooLarge
from lorimer.server.bodies import decode
from lorimer.server.body_limits import training_data_limits
from lorimer.server.child_commands import own_address, run_briefly
from lorimer.server.context import Context, context_of, key_of, user_of
from lorimer.server.errors import Refusal
from lorimer.server.openapi import Endpoint
from lorimer.server.recipes import PREFIX, ROWS, offered_recipe
from lorimer.server.routes.field_checks import check_metadata, check_text
from lorimer.server.routes.models import check_served
from lorimer.server.routes.ownership import look_up, quote_id
from lorimer.server.routes.queries import PAGE, query_page
from lorimer.server.routes.replies import done, reply
from lorimer.server.trainings import DATA_FILE, HELD_OUT_FILE, OWN_SETTINGS, SAVE_EVERY
from lorimer.store import trainings
from lorimer.store.trainings import StoredTraining
from lorimer.types import trainings as wire

TRAINING = "/api/v1/trainings/{training_id}"
MAX_FINDINGS = 500
MAX_CHECKS = 2
"""Checks of data that run concurrently; one of each user."""
INPUT_REFUSED = 2
"""The exit code of a command that was given wrong input."""


async def start_training(request: Request) -> Response:
    """Start a training of a kind with settings, on rows that are sent with it."""
    context = context_of(request)
    body = await decode(request, wire.StartTrainingRequest, training_data_limits(context.settings))
    check_metadata(context.settings, body.settings, "settings")
    if isinstance(model := body.settings.get("base_model"), str):
        check_served(context, model.removesuffix(":full"))
    kinds = await read_kinds(context) if body.kind.startswith(PREFIX) and context.url else {}
    made = await context.trainings.create(user_of(request), body, context.url, kinds)
    return reply(wire.Training.model_validate(shown(made)))


async def list_trainings(request: Request) -> Response:
    """List the caller's trainings, newest first."""
    context = context_of(request)
    limit, offset = query_page(request, 50)
    found, total = await context.store.read(trainings.list_trainings, user_of(request).user_id, limit, offset)
    entries = [shown(one) | {"run_id": await context.trainings.find_run(one)} for one in found]
    return reply(wire.TrainingsResponse.model_validate({"trainings": entries, "total_count": total}))


async def get_training(request: Request) -> Response:
    """Return a training with the end of its output."""
    context = context_of(request)
    found = await find_training(request)
    more = {"run_id": await context.trainings.find_run(found), "output": await context.trainings.output(found)}
    return reply(wire.TrainingDetails.model_validate(shown(found) | more))


async def stop_training(request: Request) -> Response:
    """Stop a training so that it can be resumed; return when its process has ended."""
    await context_of(request).trainings.stop(await find_training(request))
    return reply(wire.Training.model_validate(shown(await find_training(request))))


async def resume_training(request: Request) -> Response:
    """Start a training again that was stopped, interrupted or has failed, at its last checkpoint."""
    context = context_of(request)
    found = await context.trainings.resume(user_of(request), await find_training(request), context.url)
    return reply(wire.Training.model_validate(shown(found)))


async def delete_training(request: Request) -> Response:
    """Delete a training that does not run, with its data and output; its run and checkpoints stay."""
    await context_of(request).trainings.delete(await find_training(request))
    return done()


async def find_training(request: Request) -> StoredTraining:
    """Return the caller's training. Raise `NotFound` otherwise."""
    training_id = request.path_params["training_id"]
    found = await look_up(request, trainings.get, training_id)
    if found is None or found.user_id != user_of(request).user_id:
        raise NotFound(f"there is no training {quote_id(training_id)}")
    return found


def shown(one: StoredTraining) -> dict[str, Any]:
    facts = {name: value for name, value in vars(one).items() if name in wire.Training.model_fields}
    return facts | {"dry_run": one.is_dry_run}


async def list_training_kinds(request: Request) -> Response:
    """Return the kinds of training with the schemas of their settings, and whether one can be started here."""
    context = context_of(request)
    reason = context.trainings.reason_against()
    kinds = await read_kinds(context) if context.url else {}
    return reply(wire.TrainingKindsResponse(is_offered=not reason, reason=reason, kinds=kinds))


async def read_kinds(context: Context) -> dict[str, Any]:
    """Return the schemas, which a child process is asked for once."""
    async with context.kinds_lock:
        if not context.training_kinds:
            kinds, recipes = await asyncio.gather(read_schemas(context, "train"), read_schemas(context, "recipe"))
            context.training_kinds = {name: offered(schema) | rows_of(schema) for name, schema in kinds.items()}
            context.training_kinds |= {
                PREFIX + name: offered_recipe(schema) | rows_of(schema) for name, schema in recipes.items()
            }
        return context.training_kinds


async def read_schemas(context: Context, command: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lorimer-kinds-") as folder:
        seconds = context.settings.data_check_seconds
        code, printed, error = await run_briefly([command, "schema"], Path(folder), context.url, "", seconds)
    if code:
        raise Refusal(503, "no_cookbook", f"the kinds of training cannot be listed: {error}")
    found: dict[str, Any] = orjson.loads(printed)
    return found


def offered(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a kind without the settings that the server decides."""
    properties = {name: one for name, one in schema["properties"].items() if name not in OWN_SETTINGS}
    properties["save_every"] = properties["save_every"] | {"default": SAVE_EVERY}
    return schema | {"properties": properties, "required": [one for one in schema["required"] if one in properties]}


def rows_of(schema: dict[str, Any]) -> dict[str, str]:
    """Return whether a training takes rows."""
    if ROWS not in schema["properties"]:
        return {"x-rows": "none"}
    return {"x-rows": "needed" if ROWS in schema["required"] else "optional"}


async def check_data(request: Request) -> Response:
    """Check rows before a training: form, lengths, truncation, duplicates, leaks, and which tokens are trained on."""
    context, user_id = context_of(request), user_of(request).user_id
    address = own_address(context.url)
    if user_id in context.checking or len(context.checking) >= MAX_CHECKS:
        raise Busy("a check of data is running, of which each user has one and the server two; ask again")
    context.checking.add(user_id)
    try:
        body = await decode(request, wire.CheckDataRequest, training_data_limits(context.settings))
        check_text(context.settings, model=body.model, train_on=body.train_on, renderer=body.renderer)
        check_served(context, body.model)
        with tempfile.TemporaryDirectory(prefix="lorimer-check-") as folder:
            arguments = await asyncio.to_thread(check_arguments, body, Path(folder), context)
            credential = child_token(request)
            seconds = context.settings.data_check_seconds
            code, printed, error = await run_briefly(arguments, Path(folder), address, credential, seconds)
    finally:
        context.checking.discard(user_id)
    if not printed:
        raise InvalidInput(error) if code == INPUT_REFUSED else Refusal(503, "check_failed", error)
    return reply(await asyncio.to_thread(report_of, printed))


def check_arguments(body: wire.CheckDataRequest, folder: Path, context: Context) -> list[str]:
    """Write the rows to files, and return the command that checks them."""
    most = context.settings.max_training_data_bytes
    found = ["data", "check", DATA_FILE, "--model", body.model, "--json", f"--show={body.num_shown}"]
    for file, text in ((DATA_FILE, body.data), (HELD_OUT_FILE, body.held_out_data)):
        if text is not None:
            encoded = text.encode("utf-8", "replace")
            if len(encoded) > most:
                raise TooLarge(f"the rows have {len(encoded)} bytes; at most {most} are accepted")
            (folder / file).write_bytes(encoded)
    found += [f"--max-length={body.max_length}", f"--train-on={body.train_on}", f"--renderer={body.renderer}"]
    found += [f"--seed={body.seed}"]
    found += [f"--for={body.form}"] if body.form is not None else []
    found += [f"--held-out={HELD_OUT_FILE}"] if body.held_out_data is not None else []
    return found + ([f"--num-held-out={body.num_held_out}"] if body.num_held_out is not None else [])


def child_token(request: Request) -> str:
    """Return a token of the caller's key, which expires by itself; none in open mode."""
    key = key_of(request)
    context = context_of(request)
    return "" if key is None else context.signer.issue_token(user_of(request), key.key_id, context.now())


def report_of(printed: bytes) -> wire.DataCheckResponse:
    found = orjson.loads(printed)
    problems = Counter(one["problem"] for one in found["findings"])
    return wire.DataCheckResponse.model_validate(
        found | {"problems": dict(problems), "findings": found["findings"][:MAX_FINDINGS]}
    )


ROUTES = [
    Endpoint("GET", "/api/v1/trainings", list_trainings, query=PAGE, answer=wire.TrainingsResponse),
    Endpoint("POST", "/api/v1/trainings", start_training, body=wire.StartTrainingRequest, answer=wire.Training),
    Endpoint("GET", TRAINING, get_training, answer=wire.TrainingDetails),
    Endpoint("DELETE", TRAINING, delete_training, status=204),
    Endpoint("POST", TRAINING + "/stop", stop_training, answer=wire.Training),
    Endpoint("POST", TRAINING + "/resume", resume_training, answer=wire.Training),
    Endpoint("GET", "/api/v1/training_kinds", list_training_kinds, answer=wire.TrainingKindsResponse),
    Endpoint("POST", "/api/v1/data/check", check_data, body=wire.CheckDataRequest, answer=wire.DataCheckResponse),
]
