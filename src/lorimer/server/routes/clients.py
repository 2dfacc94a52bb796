"""Routes for clients themselves: feature flags, tokens and keys, served models, and telemetry."""

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
"""The first SDK release that reads the caller's identity from the token; earlier ones have no use for a token."""


async def get_client_config(request: Request) -> Response:
    """Return the flags that the caller's SDK release supports and this server implements."""
    body = await decode(request, types.ClientConfigRequest)
    version = SdkVersion.of_request(request.headers, body.sdk_version)
    return reply(client_config(version) | {"pjwt_auth_enabled": version >= FIRST_WITH_WHOAMI})


async def get_dynamic_config(request: Request) -> Response:
    """Return the flags that a client re-reads periodically."""
    body = await decode(request, types.ClientConfigRequest)
    return reply(dynamic_config(SdkVersion.of_request(request.headers, body.sdk_version)))


async def create_token(request: Request) -> Response:
    """Exchange the key for a token, which expires after a day or when the key is revoked."""
    context, key = context_of(request), key_of(request)
    key_id = key.key_id if key else None
    token = context.signer.issue_token(user_of(request), key_id, context.now())
    return reply(types.AuthTokenResponse(jwt=token))


async def get_key(request: Request) -> Response:
    """Return the key of the request, for `tinker auth login`."""
    user, key = user_of(request), key_of(request)
    details = ApiKeyDetails(
        org_details=ApiKeyOrganization(name=ORGANIZATION), user_details=ApiKeyUser(email=user.email or user.name)
    )
    if key is None:
        return reply(ApiKeyResponse(key_id=0, name=user.name, note="this server asks for no key", details=details))
    return reply(ApiKeyResponse(key_id=key.key_id, name=key.name, note=key.note, details=details))


async def revoke_key(request: Request) -> Response:
    """Revoke the key of the request."""
    context, key = context_of(request), key_of(request)
    if key is None:
        raise NotFound("this server runs without keys; there is none to revoke")
    await context.credentials.revoke(key.key_id)
    details = {"key_id": key.key_id, "prefix": key.prefix}
    await context.store.write(audit.record, user_id=key.user_id, event="key_revoked", details=details)
    return done()


async def get_capabilities(request: Request) -> Response:
    """List the base models of this server."""
    models = [supported_model(model) for model in context_of(request).scheduler.served_models()]
    return reply(types.GetServerCapabilitiesResponse(supported_models=models))


def supported_model(model: ServedModel) -> types.SupportedModel:
    """Describe a base model. Its context length is known only once its engine has started."""
    is_usable = model.state != "failed"
    context_length = model.info.max_context if model.info else None
    return types.SupportedModel(
        model_name=model.name, max_context_length=context_length, trainable=is_usable, sampleable=is_usable
    )


async def send_telemetry(request: Request) -> Response:
    """Persist telemetry events of a client.

    Always respond `accepted`: otherwise the client retries every second and delays its user's errors for half a minute.
    Events that cannot be stored are dropped silently.
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
