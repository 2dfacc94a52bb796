"""Routes for sampling sessions and samples."""

from starlette.requests import Request
from starlette.responses import Response

from lorimer import types
from lorimer.errors import InvalidInput
from lorimer.server.bodies import decode, decode_data
from lorimer.server.body_limits import sample_limits
from lorimer.server.context import context_of, user_of
from lorimer.server.decoding import DecodeSample, SampleHead, sample_request
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.field_checks import check_text
from lorimer.server.routes.images import admit_images
from lorimer.server.routes.models import check_served
from lorimer.server.routes.ownership import find_sampler, find_session, find_weights, quote_id
from lorimer.server.routes.replies import promise, reply
from lorimer.store import samplers


async def create_sampling_session(request: Request) -> Response:
    """Create a sampling session for a base model or a checkpoint. Its weights are loaded on first use."""
    context, user = context_of(request), user_of(request)
    body = await decode(request, types.CreateSamplingSessionRequest)
    check_text(context.settings, base_model=body.base_model, model_path=body.model_path)
    session = await find_session(request, body.session_id)
    weights_id, base_model = None, body.base_model
    if body.model_path is not None:
        weights = await find_weights(request, body.model_path)
        weights_id, base_model = weights.weights_id, weights.base_model
        if body.base_model not in (None, base_model):
            raise InvalidInput(f"base_model {quote_id(body.base_model)} is not that of the weights, {base_model!r}")
    if base_model is None:
        raise InvalidInput("base_model and model_path are missing; at least one is accepted")
    check_served(context, base_model)
    sampler = await context.store.write(
        samplers.create_sampler,
        session_id=session.session_id,
        user_id=user.user_id,
        seq=body.sampling_session_seq_id,
        base_model=base_model,
        model_path=body.model_path,
        weights_id=weights_id,
    )
    return reply(types.CreateSamplingSessionResponse(sampling_session_id=sampler.sampling_session_id))


async def join_sampling_session(request: Request) -> Response:
    """Allocate a unique number for another client of a sampling session."""
    body = await decode(request, types.JoinSamplingSessionRequest)
    sampler = await find_sampler(request, body.sampling_session_id)
    counter = await context_of(request).store.write(samplers.join, sampler.sampling_session_id)
    return reply(types.JoinSamplingSessionResponse(client_counter=counter))


async def sample(request: Request) -> Response:
    """Sample sequences, or score a prompt."""
    context = context_of(request)
    head, payload = await decode_data(request, DecodeSample(), SampleHead, sample_limits(context.settings))
    body = sample_request(head)
    if body.base_model is not None or body.model_path is not None:
        raise InvalidInput("base_model and model_path belong to create_sampling_session, whose id is accepted here")
    if body.sampling_session_id is None:
        raise InvalidInput("sampling_session_id is missing; create_sampling_session gives one")
    sampler = await find_sampler(request, body.sampling_session_id)
    if head.problem is not None:
        raise head.problem.error()
    await admit_images(context, sampler.base_model, head.first_image)
    accepted = await context.scheduler.sample(user_of(request), sampler, body, payload, has_seed=head.has_seed)
    return promise(accepted)


async def get_sampler(request: Request) -> Response:
    """Return what a sampling session samples from."""
    sampler = await find_sampler(request, request.path_params["sampler_id"])
    return reply(
        types.GetSamplerResponse(
            sampler_id=sampler.sampling_session_id,
            base_model=sampler.base_model,
            model_path=sampler.model_path,
            model_id=sampler.model_id,
        )
    )


ROUTES = [
    Endpoint(
        "POST",
        "/api/v1/create_sampling_session",
        create_sampling_session,
        body=types.CreateSamplingSessionRequest,
        answer=types.CreateSamplingSessionResponse,
    ),
    Endpoint(
        "POST",
        "/api/v1/join_sampling_session",
        join_sampling_session,
        body=types.JoinSamplingSessionRequest,
        answer=types.JoinSamplingSessionResponse,
    ),
    Endpoint("POST", "/api/v1/asample", sample, body=types.SampleRequest, answer=types.UntypedAPIFuture),
    Endpoint("GET", "/api/v1/samplers/{sampler_id}", get_sampler, answer=types.GetSamplerResponse),
]
