"""Routes for training runs: create, train, step, load and unload; information about a run's model."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lorimer import types
from lorimer.errors import InvalidInput, NotFound
from lorimer.server.bodies import decode, decode_data
from lorimer.server.body_limits import loss_limits, training_body_limits
from lorimer.server.context import context_of, user_of
from lorimer.server.decoding import DecodeTraining, TrainingHead, validate
from lorimer.server.openapi import JSON, PROTOBUF, Endpoint
from lorimer.server.routes.field_checks import (
    check_lora,
    check_metadata,
    check_optimizer,
    check_run,
    check_seq_id,
    check_text,
)
from lorimer.server.routes.images import admit_images
from lorimer.server.routes.models import tokenizer_id
from lorimer.server.routes.operations import consumes_seq_id, operation, parsed_operation, read_json, submit_endpoint
from lorimer.server.routes.ownership import (
    find_checkpoint,
    find_run,
    find_session,
    find_trainable,
    find_weights,
    quote_id,
)
from lorimer.server.routes.replies import promise, reply
from lorimer.store.runs import Run
from lorimer.types.checkpoints import WeightsInfoRequest
from lorimer.types.encoding import EncodedTraining
from lorimer.types.optim import optimizer_config

MAX_MEDIA_CHARS = 200


async def create_model(request: Request) -> Response:
    """Create a run with a new adapter, or a full run."""
    context, user = context_of(request), user_of(request)
    body = await decode(request, types.CreateModelRequest)
    check_text(context.settings, base_model=body.base_model)
    check_metadata(context.settings, body.user_metadata)
    check_optimizer(body.optimizer_config)
    check_run(context.settings, body.run)
    directory = check_lora(context.settings, body.lora_config)
    session = await find_session(request, body.session_id)
    return promise(await context.scheduler.create_model(user, session, body, directory))


async def get_info(request: Request) -> Response:
    """Return a run's base model, its tokenizer and the shape of its adapter."""
    context = context_of(request)
    body = await decode(request, types.GetInfoRequest)
    run = await find_run(request, body.model_id)
    info = await context.scheduler.model_info(run.base_model)
    tokenizer = tokenizer_id(context, run.base_model, info.directory)
    data = types.ModelData(
        arch=info.architecture,
        model_name=run.base_model,
        tokenizer_id=tokenizer,
        model_id=run.model_id,
        lora_rank=run.rank or None,
    )
    return reply(
        types.GetInfoResponse(
            type="get_info",
            model_data=data,
            model_id=run.model_id,
            optimizer_config=optimizer_config(run.optimizer_type),
            is_lora=run.method == "lora",
            lora_rank=run.rank or None,
            model_name=run.base_model,
            method=run.method,
        )
    )


async def forward(request: Request) -> Response:
    """Compute log-probabilities without gradients, for SDK releases up to 0.24."""
    return await train(request, forward_only=True)


async def forward_backward(request: Request) -> Response:
    """Accumulate the gradient of a run, or compute log-probabilities with `forward_only`; protobuf or JSON."""
    return await train(request, forward_only=False)


async def train(request: Request, *, forward_only: bool) -> Response:
    context = context_of(request)
    task = DecodeTraining(request.headers.get("content-type", JSON)[:MAX_MEDIA_CHARS], forward_only)
    try:
        body, payload = await decode_data(request, task, TrainingHead, training_body_limits(context.settings))
    except InvalidInput as error:
        async with consumes_seq_id(request, getattr(error, "model_id", None), getattr(error, "seq_id", None)):
            raise
    async with consumes_seq_id(request, body.model_id, body.seq_id):
        run = await find_trainable(request, body.model_id)
        check_seq_id(body.seq_id)
        if body.problem is not None:
            raise body.problem.error()
        await admit_images(context, run.base_model, body.first_image)
        check_loss_id(run, body)
        encoded = EncodedTraining(
            model_id=body.model_id,
            seq_id=body.seq_id,
            payload=payload,
            loss_fn=body.loss_fn,
            loss_fn_config=body.loss_fn_config,
            forward_only=body.forward_only,
            tokens=body.tokens,
            payload_sha256=body.payload_sha256,
        )
        return promise(await context.scheduler.train(user_of(request), run, encoded))


def check_loss_id(run: Run, body: TrainingHead) -> None:
    """Raise `NotFound` unless the custom loss was uploaded by the run's own session."""
    loss_id = body.loss_fn_config.get("loss_id")
    if body.loss_fn == "custom" and not str(loss_id).startswith(f"{run.session_id}:"):
        raise NotFound(f"there is no custom loss {quote_id(str(loss_id))}; create_custom_loss gives a loss_id")


async def optim_step(request: Request) -> Response:
    """Apply the accumulated gradient of a run and reset it."""
    async with operation(request, types.OptimStepRequest) as submitted:
        run, params = submitted.run, submitted.body.optim_params
        kind = "adamw" if isinstance(params, types.AdamParams) else params.type
        check_optimizer(types.OptimizerConfigBase(type=kind))
        values = params.model_dump(exclude={"type"})
        scheduler = submitted.context.scheduler
        return promise(await scheduler.optim_step(submitted.user, run, submitted.seq_id, values, kind))


async def load_weights(request: Request) -> Response:
    """Load a checkpoint into a run or, if a session is given, into a new run of the checkpoint's shape."""
    raw = await read_json(request)
    if isinstance(raw, dict) and raw.get("session_id") is not None:
        return await create_from_weights(request, validate(raw, types.LoadWeightsRequest))
    async with parsed_operation(request, types.LoadWeightsRequest, raw) as submitted:
        context, run, body = submitted.context, submitted.run, submitted.body
        for name in ("model_seq_id", "base_model", "optimizer_config", "user_metadata", "run"):
            if getattr(body, name) is not None:
                raise InvalidInput(f"{name} is accepted only with session_id, which makes a new run")
        weights = await find_weights(request, body.path, body.weights_access_token)
        accepted = await context.scheduler.load_weights(
            submitted.user, run, submitted.seq_id, path=body.path, weights=weights, optimizer=body.optimizer
        )
        return promise(accepted)


async def create_from_weights(request: Request, body: types.LoadWeightsRequest) -> Response:
    context = context_of(request)
    if body.model_id is not None or body.seq_id is not None:
        raise InvalidInput("model_id and seq_id are accepted without session_id, or the other way round")
    if body.model_seq_id is None:
        raise InvalidInput("model_seq_id is missing; with session_id it names the run to make")
    check_optimizer(body.optimizer_config)
    check_metadata(context.settings, body.user_metadata)
    check_run(context.settings, body.run)
    session = await find_session(request, body.session_id or "")
    weights = await find_weights(request, body.path, body.weights_access_token)
    return promise(await context.scheduler.create_from_weights(user_of(request), session, body, weights))


async def create_custom_loss(request: Request) -> Response:
    """Upload the graph of a custom loss, for use by the session's runs."""
    context = context_of(request)
    body = await decode(request, types.CreateCustomLossRequest, loss_limits(context.settings))
    check_text(context.settings, name=body.name)
    session = await find_session(request, body.session_id)
    return promise(await context.scheduler.create_loss(user_of(request), session, body))


async def unload_model(request: Request) -> Response:
    """Evict a run from the engine. Its next operation loads it again."""
    body = await decode(request, types.UnloadModelRequest)
    run = await find_run(request, body.model_id)
    return promise(await context_of(request).scheduler.unload(user_of(request), run))


async def weights_info(request: Request) -> Response:
    """Return the base model and adapter shape of a checkpoint, the caller's own or a published one."""
    body = await decode(request, WeightsInfoRequest)
    weights = (await find_checkpoint(request, body.tinker_path, to_read=True)).weights
    return reply(
        types.WeightsInfoResponse(
            base_model=weights.base_model,
            optimizer_config=optimizer_config(weights.optimizer_type),
            is_lora=weights.method == "lora",
            lora_rank=weights.rank or None,
            train_unembed=weights.train_unembed,
            train_mlp=weights.train_mlp,
            train_attn=weights.train_attn,
            use_rslora=weights.use_rslora,
            use_dora=weights.use_dora,
            method=weights.method,
            train_embed=weights.train_embed,
            train_norms=weights.train_norms,
        )
    )


TENSOR = {
    "type": "object",
    "required": ["data", "dtype"],
    "properties": {
        "data": {"type": "array", "items": {"type": "number"}},
        "dtype": {"type": "string", "enum": ["int64", "float32"]},
        "shape": {"type": ["array", "null"], "items": {"type": "integer"}},
        "sparse_crow_indices": {"type": ["array", "null"], "items": {"type": "integer"}},
        "sparse_col_indices": {"type": ["array", "null"], "items": {"type": "integer"}},
    },
}
CHUNK = {
    "type": "object",
    "required": ["tokens"],
    "properties": {"type": {"const": "encoded_text"}, "tokens": {"type": "array", "items": {"type": "integer"}}},
}
DATUM = {
    "type": "object",
    "required": ["model_input", "loss_fn_inputs"],
    "properties": {
        "model_input": {
            "type": "object",
            "required": ["chunks"],
            "properties": {"chunks": {"type": "array", "items": CHUNK}},
        },
        "loss_fn_inputs": {"type": "object", "additionalProperties": TENSOR},
    },
}


def training_schema(field: str) -> dict[str, Any]:
    """Return the JSON schema of forward or forward_backward, which name their data field differently."""
    loss = {
        "type": "object",
        "required": ["data", "loss_fn"],
        "properties": {
            "data": {"type": "array", "items": DATUM},
            "loss_fn": {"type": "string"},
            "loss_fn_config": {"type": ["object", "null"], "additionalProperties": {"type": ["number", "string"]}},
        },
    }
    return {
        "type": "object",
        "required": [field, "model_id", "seq_id"],
        "properties": {field: loss, "model_id": {"type": "string"}, "seq_id": {"type": "integer"}},
    }


TRAINING_MEDIA = (JSON, PROTOBUF)

ROUTES = [
    submit_endpoint("/api/v1/create_model", create_model, types.CreateModelRequest),
    Endpoint("POST", "/api/v1/get_info", get_info, body=types.GetInfoRequest, answer=types.GetInfoResponse),
    submit_endpoint("/api/v1/forward", forward, training_schema("forward_input"), TRAINING_MEDIA),
    submit_endpoint(
        "/api/v1/forward_backward", forward_backward, training_schema("forward_backward_input"), TRAINING_MEDIA
    ),
    submit_endpoint("/api/v1/optim_step", optim_step, types.OptimStepRequest),
    submit_endpoint("/api/v1/load_weights", load_weights, types.LoadWeightsRequest),
    submit_endpoint("/api/v1/create_custom_loss", create_custom_loss, types.CreateCustomLossRequest),
    submit_endpoint("/api/v1/unload_model", unload_model, types.UnloadModelRequest),
    Endpoint("POST", "/api/v1/weights_info", weights_info, body=WeightsInfoRequest, answer=types.WeightsInfoResponse),
]
