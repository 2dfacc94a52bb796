"""The outermost middleware: assign a request id, log and count each request, add security headers, refuse bad requests.

Refuses unknown hosts and foreign origins, ambiguous framing, too many concurrent requests (in total or from one
address), and new work while the server shuts down. Answers an unexpected exception with 500 in the server's error
format; the traceback goes only to the log.
"""

import logging
import secrets
import time
from itertools import filterfalse

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorimer.errors import LorimerError
from lorimer.scheduler import spans
from lorimer.server.address_limiter import AddressLimiter
from lorimer.server.auth import WITHOUT_WORK
from lorimer.server.console import is_console
from lorimer.server.context import Context
from lorimer.server.errors import answer_error, error_response
from lorimer.server.hosts import HostRule, is_same_origin
from lorimer.server.http_server import AUTHORITY
from lorimer.server.settings import Settings

logger = logging.getLogger("lorimer.access")

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "form-action 'self'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Security headers set on every response unless the route has set them itself."""
RAW_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
QUIET = {
    f"/api/v1/{name}" for name in ("retrieve_future", "retrieve_futures", "session_heartbeat", "telemetry", "healthz")
} | {"/readyz", "/metrics", "/api/v1/overview", "/api/v1/training_runs/{run_id}/metrics", "/api/v1/sessions/search"}
"""Routes logged at debug level when they succeed, because clients poll them."""
QUIET_READS = {
    f"/api/v1/{name}"
    for name in "whoami keys checkpoints training_runs training_runs/{run_id} training_runs/{run_id}/checkpoints "
    "sessions/{session_id} billing/usage/events billing/usage/checkpoints/current replicas".split()
} | {"/v1/models"}
"""Routes logged at debug level when a GET succeeds, because open console pages poll them."""
QUIET_STATUSES = (200, 304, 408, 499)
CLIENT_GONE = 499
CLOSE = {"connection": "close"}


class Guard:
    """ASGI middleware that refuses bad requests before routing, and logs, counts and secures every response."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = HostRule(settings)
        self._addresses = AddressLimiter(settings)
        self._max_requests = settings.max_concurrent_requests
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._guard(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: Context = scope["app"].state.context
        request_id = secrets.token_hex(8)
        address = self._addresses.address_of(scope)
        scope["state"] = {"request_id": request_id, "user": None, "key": None, "address": address}
        start, status = time.perf_counter(), 0
        if spans.is_on():
            spans.arrived.set({"at": time.monotonic(), "scope": scope})

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                add_headers(scope, message)
            await send(message)

        self._num_held += 1
        context.metrics.held.inc()
        try:
            with self._addresses.held(address) as has_room:
                answer = self._refusal(scope, context, has_room) or self._app
                await answer(scope, receive, send_guarded)
        except ClientDisconnect:
            if not status:  # the client is still connected: its chunked body was malformed
                await error_response(scope, 400, "bad_body", "the body broke off", CLOSE)(scope, receive, send_guarded)
                status = CLIENT_GONE
        except LorimerError as error:  # raised in other middleware; Starlette already handles errors raised by routes
            if status:
                raise
            refusal = await answer_error(Request(scope), error)
            await refusal(scope, receive, send_guarded)
        except Exception:
            logger.exception("unexpected error", extra={"request_id": request_id, "path": scope["path"][:200]})
            if status:
                raise  # the response has started: the HTTP server closes the connection
            await internal_error(scope)(scope, receive, send_guarded)
        finally:
            self._num_held -= 1
            context.metrics.held.dec()
            self._report(scope, context, status, time.perf_counter() - start)

    def _refusal(self, scope: Scope, context: Context, has_room: bool) -> Response | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        named = [*hosts, *([scope[AUTHORITY]] if AUTHORITY in scope else [])]
        refused = next(filterfalse(self._hosts.allows, named), None)
        if len(hosts) != 1 or refused is not None:
            shown = (refused or (hosts[0] if hosts else ""))[:200]
            detail = f"this server does not answer to host {shown!r}; add it to allowed_hosts if it should"
            return error_response(scope, 421, "bad_host", detail)
        if not scope["path"].startswith("/"):
            detail = f"the target of the request is {scope['path'][:200]!r}; a path that begins with '/' is accepted"
            return error_response(scope, 400, "bad_target", detail)
        if scope["method"] not in SAFE_METHODS:
            origin = headers.get("origin")
            if origin is not None and not is_same_origin(origin, hosts[0]):
                return error_response(scope, 403, "bad_origin", f"requests from pages of {origin[:200]!r} are refused")
            if context.is_draining and scope["path"] not in WITHOUT_WORK:
                return error_response(scope, 503, "shutting_down", "the server is shutting down; send this again soon")
        lengths = headers.getlist("content-length") + headers.getlist("transfer-encoding")
        if len(lengths) > 1:
            detail = "the length of the body is given twice; once is accepted"
            return error_response(scope, 400, "bad_framing", detail, CLOSE)
        if self._num_held > self._max_requests:
            return error_response(
                scope, 429, "too_many_requests", f"{self._max_requests} requests are being held; come back"
            )
        if not has_room:
            detail = f"{self._addresses.max_requests} requests from your address are being held; come back"
            return error_response(scope, 429, "too_many_requests", detail)
        return None

    def _report(self, scope: Scope, context: Context, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "")
        context.metrics.observe(known_method(scope["method"]), route or "unmatched", status, seconds)
        is_quiet = route in QUIET or (scope["method"] == "GET" and (route in QUIET_READS or is_console(route)))
        level = logging.DEBUG if is_quiet and status in QUIET_STATUSES else logging.INFO
        if not logger.isEnabledFor(level):
            return
        state = scope["state"]
        fields = {
            "request_id": state["request_id"],
            "user_id": state["user"].user_id if state["user"] else "",
            "method": scope["method"],
            "route": route or scope["path"][:200],
            "status": status,
            "milliseconds": round(seconds * 1000, 2),
        }
        logger.log(level, "request", extra=fields)


def add_headers(scope: Scope, message: Message) -> None:
    """Add the request id and the security headers to a response."""
    headers = MutableHeaders(scope=message)
    headers["x-request-id"] = scope["state"]["request_id"]
    present = dict(headers.raw)
    for name, value in RAW_HEADERS:
        if name not in present:
            headers.raw.append((name, value))


def internal_error(scope: Scope) -> Response:
    detail = "something went wrong in the server; its log has the reason under this request_id"
    return error_response(scope, 500, "internal_error", detail)


def known_method(method: str) -> str:
    """Return ``method`` if it is a standard HTTP method, else ``other``.

    Clients must not be able to create time series.
    """
    return method if method in {"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"} else "other"
