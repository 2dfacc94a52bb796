"""Authentication middleware: deny by default, with a short list of public paths.

Runs before routing, so an unknown path needs a key too and a new route is closed until it is listed here.
``credentials.py`` looks up whom a credential belongs to.
"""

import ipaddress
import math

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lorimer.errors import Unauthorized
from lorimer.server.console import is_console
from lorimer.server.context import Context
from lorimer.server.errors import error_response
from lorimer.server.settings import Settings
from lorimer.server.signing import DOWNLOADS
from lorimer.store.users import User
from lorimer.types.compatibility import SdkVersion

PUBLIC = {"/api/v1/healthz", "/readyz"}
"""Paths that GET and HEAD may read without a key."""
METRICS = "/metrics"
WITHOUT_WORK = {
    f"/api/v1/{name}"
    for name in ("retrieve_future", "retrieve_futures", "cancel_future", "session_heartbeat", "telemetry")
}
"""Routes that bring no new work: they are served until the server exits and are exempt from the request rate limit."""
BURST_SECONDS = 10.0
"""How many seconds' worth of an unused ``requests_per_second`` quota a user may spend in one burst."""
SAFE_METHODS = {"GET", "HEAD"}


class Authentication:
    """Authenticate each request: set ``state.user``, ``state.key`` and ``state.sdk``, or respond 401."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope["state"]
        state["sdk"] = SdkVersion.of_request(headers)
        context: Context = scope["app"].state.context
        if not is_public(scope, headers, context.settings):
            try:
                identity = await context.credentials.identify(credential_of(headers))
            except Unauthorized as error:
                response = context.refuse_guess(scope) or error_response(scope, 401, "unauthorized", str(error))
                await response(scope, receive, send)
                return
            state["user"], state["key"] = identity.user, identity.key
            context.metrics.set_user_name(identity.user)
            await self._admit(context, identity.user, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _admit(self, context: Context, user: User, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request against its user's concurrency share and rate, and run it.

        Respond 429 if either is exhausted.
        """
        held, user_id = context.requests, user.user_id
        if not held.has_room(user_id):
            detail = (
                f"{held.held_by(user_id)} requests of yours are being held, {held.held} of all users; {held.total} are"
                " shared by them (max_concurrent_requests): come back"
            )
            await error_response(scope, 429, "too_many_requests", detail)(scope, receive, send)
            return
        if scope["path"] not in WITHOUT_WORK and (refusal := over_rate(context, user, scope)) is not None:
            await refusal(scope, receive, send)
            return
        held.take(user_id)
        try:
            await self._app(scope, receive, send)
        finally:
            held.give_back(user_id)


def over_rate(context: Context, user: User, scope: Scope) -> Response | None:
    """Return a 429 response if the user has exceeded ``requests_per_second``, else none."""
    own = user.requests_per_second
    rate = context.settings.requests_per_second if own is None else own
    wait = context.rates.take(user.user_id, rate) if rate else 0.0
    if not wait:
        return None
    detail = (
        f"the quota requests_per_second allows you {rate:g} requests per second and {context.rates.capacity(rate):g} in"
        f" a burst, all of which are used; the next is accepted in {wait:.3g} s"
    )
    return error_response(scope, 429, "quota_exceeded", detail, {"retry-after": str(math.ceil(wait))})


def credential_of(headers: Headers) -> str:
    """Return the credential of a request: ``X-API-Key``, or the bearer token that OpenAI clients send."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")


def is_public(scope: Scope, headers: Headers, settings: Settings) -> bool:
    path, method = scope["path"], scope["method"]
    if method not in SAFE_METHODS:
        return False
    if path == METRICS:
        return settings.metrics_access == "open" or (settings.metrics_access == "loopback" and is_local(scope, headers))
    return path in PUBLIC or path.startswith(DOWNLOADS) or is_console(path)


def is_local(scope: Scope, headers: Headers) -> bool:
    """Return whether the request comes from this machine and was not forwarded by a proxy."""
    if "x-forwarded-for" in headers or "forwarded" in headers:
        return False
    try:
        return ipaddress.ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False
