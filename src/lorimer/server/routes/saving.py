"""Routes that save the weights of a run: named checkpoints, unnamed samplers, exports."""

from starlette.requests import Request
from starlette.responses import Response

from lorimer import types
from lorimer.errors import InvalidInput
from lorimer.server.routes.encryption import recipients_metadata
from lorimer.server.routes.field_checks import check_metadata, check_ttl
from lorimer.server.routes.operations import operation, submit_endpoint
from lorimer.server.routes.replies import promise
from lorimer.types.paths import check_name


async def save_weights(request: Request) -> Response:
    """Save weights and optimizer state under a name; the default name is the operation's number."""
    async with operation(request, types.SaveWeightsRequest) as submitted:
        body = submitted.body
        check_metadata(submitted.context.settings, body.user_metadata)
        accepted = await submitted.context.scheduler.save_weights(
            submitted.user,
            submitted.run,
            submitted.seq_id,
            kind="training",
            name=check_name(body.path or f"{submitted.seq_id:06d}"),
            ttl_seconds=check_ttl(body.ttl_seconds),
            overwrite=body.overwrite,
            user_metadata=body.user_metadata,
        )
        return promise(accepted)


async def save_weights_for_sampler(request: Request) -> Response:
    """Save weights to sample from, either under a name or as a new sampling session."""
    async with operation(request, types.SaveWeightsForSamplerRequest) as submitted:
        body, scheduler = submitted.body, submitted.context.scheduler
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise InvalidInput("exactly one of path (a name) and sampling_session_seq_id is accepted")
        if body.sampling_session_seq_id is not None:
            accepted = await scheduler.save_ephemeral(
                submitted.user, submitted.run, submitted.seq_id, body.sampling_session_seq_id
            )
            return promise(accepted)
        check_metadata(submitted.context.settings, body.user_metadata)
        accepted = await scheduler.save_weights(
            submitted.user,
            submitted.run,
            submitted.seq_id,
            kind="sampler",
            name=check_name(body.path or ""),
            ttl_seconds=check_ttl(body.ttl_seconds),
            overwrite=False,
            user_metadata=body.user_metadata,
        )
        return promise(accepted)


async def save_weights_external(request: Request) -> Response:
    """Export weights as downloadable files, optionally encrypted to age recipients."""
    async with operation(request, types.SaveWeightsExternalRequest) as submitted:
        body = submitted.body
        accepted = await submitted.context.scheduler.save_weights(
            submitted.user,
            submitted.run,
            submitted.seq_id,
            kind="external",
            name=check_name(body.path),
            ttl_seconds=check_ttl(body.ttl_seconds),
            overwrite=False,
            user_metadata=recipients_metadata(body.age_encryption_recipients),
        )
        return promise(accepted)


ROUTES = [
    submit_endpoint("/api/v1/save_weights", save_weights, types.SaveWeightsRequest),
    submit_endpoint("/api/v1/save_weights_for_sampler", save_weights_for_sampler, types.SaveWeightsForSamplerRequest),
    submit_endpoint("/api/v1/save_weights_external", save_weights_external, types.SaveWeightsExternalRequest),
]
