"""What a client asks before and beside its work: flags, credentials, models; and the telemetry it reports."""

import contextlib

from starlette.requests import Request
from starlette.responses import Response

from lorimer import types
from lorimer.errors import LorimerError, NotFound
from lorimer.scheduler.stats import ServedModel
from lorimer.server.bodies import decode, decode_data
from lorimer.server.body_limits import small_limits
from lorimer.server.context import context_of, key_of, user_of
from lorimer.server.decoding import DecodeTelemetry, TelemetryHead
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.ownership import look_up
from lorimer.server.routes.replies import done, reply
from lorimer.server.signing import ORGANIZATION
from lorimer.store import audit, sessions, telemetry
from lorimer.types.admin import ApiKeyDetails, ApiKeyOrganization, ApiKeyResponse, ApiKeyUser
from lorimer.types.compatibility import SdkVersion, client_config, dynamic_config

FIRST_WITH_WHOAMI = SdkVersion(0, 24, 0)
"""Releases from here on read who is calling from the token; the others gain nothing by one."""


async def get_client_config(request: Request) -> Response:
    """The flags that a release of the SDK supports and this server serves."""
    body = await decode(request, types.ClientConfigRequest)
    version = SdkVersion.of_request(request.headers, body.sdk_version)
    return reply(client_config(version) | {"pjwt_auth_enabled": version >= FIRST_WITH_WHOAMI})


async def get_dynamic_config(request: Request) -> Response:
    """The flags that a client reads again from time to time."""
    body = await decode(request, types.ClientConfigRequest)
    return reply(dynamic_config(SdkVersion.of_request(request.headers, body.sdk_version)))


async def create_token(request: Request) -> Response:
    """A token in exchange for the key; it ends with the key, and by itself after a day."""
    context, key = context_of(request), key_of(request)
    key_id = key.key_id if key else None
    token = context.signer.issue_token(user_of(request), key_id, context.now())
    return reply(types.AuthTokenResponse(jwt=token))


async def get_key(request: Request) -> Response:
    """The key that was shown, for `tinker auth login`."""
    user, key = user_of(request), key_of(request)
    details = ApiKeyDetails(
        org_details=ApiKeyOrganization(name=ORGANIZATION), user_details=ApiKeyUser(email=user.email or user.name)
    )
    if key is None:
        return reply(ApiKeyResponse(key_id=0, name=user.name, note="this server asks for no key", details=details))
    return reply(ApiKeyResponse(key_id=key.key_id, name=key.name, note=key.note, details=details))


async def revoke_key(request: Request) -> Response:
    """End the key that was shown."""
    context, key = context_of(request), key_of(request)
    if key is None:
        raise NotFound("this server runs without keys; there is none to revoke")
    await context.credentials.revoke(key.key_id)
    details = {"key_id": key.key_id, "prefix": key.prefix}
    await context.store.write(audit.record, user_id=key.user_id, event="key_revoked", details=details)
    return done()


async def get_capabilities(request: Request) -> Response:
    """The base models of this server."""
    models = [supported_model(model) for model in context_of(request).scheduler.served_models()]
    return reply(types.GetServerCapabilitiesResponse(supported_models=models))


def supported_model(model: ServedModel) -> types.SupportedModel:
    """A model's context length is known once its engine has run."""
    is_usable = model.state != "failed"
    context_length = model.info.max_context if model.info else None
    return types.SupportedModel(
        model_name=model.name, max_context_length=context_length, trainable=is_usable, sampleable=is_usable
    )


async def send_telemetry(request: Request) -> Response:
    """Keep what a client reports.

    A client that gets no acceptance asks again every second and holds its user's errors back for half a minute, so that
    a report which cannot be kept is dropped without a word.
    """
    with contextlib.suppress(LorimerError):
        await keep_telemetry(request)
    return reply(types.TelemetryResponse(status="accepted"))


async def keep_telemetry(request: Request) -> None:
    context, user = context_of(request), user_of(request)
    report, _ = await decode_data(request, DecodeTelemetry(), TelemetryHead, small_limits(context.settings))
    session = await look_up(request, sessions.get_session, report.session_id)
    if session is not None and session.user_id == user.user_id:
        await context.store.write(telemetry.add_events, report.session_id, user.user_id, report.events)


ROUTES = [
    Endpoint(
        "POST",
        "/api/v1/client/config",
        get_client_config,
        body=types.ClientConfigRequest,
        answer=types.ClientConfigResponse,
    ),
    Endpoint(
        "POST",
        "/api/v1/client/dynamic_config",
        get_dynamic_config,
        body=types.ClientConfigRequest,
        answer=types.ClientDynamicConfigResponse,
    ),
    Endpoint("POST", "/api/v1/auth/token", create_token, answer=types.AuthTokenResponse),
    Endpoint("GET", "/api/v1/auth/apikey/me", get_key, answer=ApiKeyResponse),
    Endpoint("DELETE", "/api/v1/auth/apikey/me", revoke_key, status=204),
    Endpoint("GET", "/api/v1/get_server_capabilities", get_capabilities, answer=types.GetServerCapabilitiesResponse),
    Endpoint(
        "POST", "/api/v1/telemetry", send_telemetry, body=types.TelemetrySendRequest, answer=types.TelemetryResponse
    ),
]
