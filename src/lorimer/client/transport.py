"""Requests and answers: connections of HTTP/1.1, or the service in this process, behind the same calls.

``send`` does one request and turns whatever goes wrong into an exception of ``errors``; ``call`` repeats it while
that may help. Every request that changes something carries a key by which a server knows a repetition.
"""

import asyncio
import logging
import time
import urllib.request
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import lru_cache
from typing import Any, TypedDict, TypeVar

import httpx2
import msgspec
from pydantic import BaseModel, ValidationError

from lorimer import __version__
from lorimer.client.auth import Credentials
from lorimer.client.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    BillingError,
    no_server,
    status_error,
)
from lorimer.client.futures import LoopThread
from lorimer.client.http11 import HttpTransport
from lorimer.client.retries import PATIENCE_SECONDS, Backoff, is_transient, retry_after
from lorimer.types.compatibility import NEWEST

log = logging.getLogger("lorimer")

M = TypeVar("M", bound=BaseModel)
Timeout = httpx2.Timeout


class RequestOptions(TypedDict, total=False):
    """How one request differs from others, as programs of the official SDK write it down."""

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str


OpenTransport = Callable[[], Awaitable[httpx2.AsyncBaseTransport]]

JSON = "application/json"
TIMEOUT_SECONDS = 60.0
CONNECT_SECONDS = 5.0
BILLING_PAUSE_SECONDS = 5.0
LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=5.0)
"""Of connections through a proxy. How many are open is limited by those who use them, here and without a proxy: a limit
of all together would let polls keep submits waiting."""
REPORT_SECONDS = 60.0
"""A server that does not answer is spoken of this often."""
FIRST_ANSWER_SECONDS = 10.0
"""How long an address that never answered this process is tried; one that did may be restarting, and is waited for."""
MIN_ATTEMPT_SECONDS = 0.1
HEALTH_PATH = "/api/v1/healthz"


class Transport:
    def __init__(
        self,
        base_url: str,
        credentials: Credentials,
        loop: LoopThread,
        headers: Mapping[str, str] | None = None,
        open_transport: OpenTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.credentials = credentials
        self.billing_seconds = 3600.0
        self._loop = loop
        self._open_transport = open_transport
        self._client: httpx2.AsyncClient | None = None
        self._wire: httpx2.AsyncBaseTransport | None = None
        self._common_headers: dict[str, str] = {}
        self._opening = asyncio.Lock()
        self._reported_at = 0.0
        self._headers = {
            "User-Agent": f"Lorimer/Python {__version__}",
            # The release of the official SDK whose protocol this one speaks.
            "X-Stainless-Package-Version": str(NEWEST),
            **(headers or {}),
        }

    async def send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT_SECONDS,
        within: float | None = None,
        follow_redirects: bool = True,
    ) -> httpx2.Response:
        """The answer, whatever its status; raises only if there is none.

        ``timeout`` limits how long nothing moves, ``within`` the time until the server answers this, or whether it is
        there.
        """
        client = self._client or await self._open()
        # The credential of a call, if it has one, goes before the client's own.
        given = {**await self.credentials.header(), **(headers or {})}
        request = httpx2.Request(
            method,
            _url(self.base_url + path),
            content=content,
            headers=self._common_headers | {name.lower(): value for name, value in given.items()},
            extensions={"timeout": httpx2.Timeout(timeout, connect=CONNECT_SECONDS).as_dict()},
        )
        try:
            exchange = self._exchange(client, request, follow_redirects)
            response = await (exchange if within is None else self._first_exchange(client, exchange, within))
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise APITimeoutError(request) from error
        except (httpx2.HTTPError, OSError) as error:
            message = f"{self.base_url} cannot be reached: {error or type(error).__name__}"
            raise APIConnectionError(request, message) from error
        self._loop.note_answer(self.base_url)
        if response.status_code == 400 and not response.content:
            # A proxy's: servers of this protocol always say why.
            raise APIConnectionError(request, "an empty answer of status 400, as broken proxies give")
        if note := response.headers.get("x-deprecation-note"):
            level = logging.ERROR if response.headers.get("x-deprecation-level") == "error" else logging.WARNING
            log.log(level, "%s", note)
        return response

    async def _first_exchange(
        self, client: httpx2.AsyncClient, exchange: Coroutine[Any, Any, httpx2.Response], within: float
    ) -> httpx2.Response:
        """Ask an address that never answered whether it is there, if it has not answered after half of the time.

        A server may take long for what it was asked, and then it must not be asked again.
        """
        sending = asyncio.create_task(exchange)
        try:
            await asyncio.wait({sending}, timeout=within / 2)
            if not sending.done():
                health = httpx2.Request("GET", _url(self.base_url + HEALTH_PATH), headers=self._common_headers)
                async with asyncio.timeout(within / 2):
                    await self._exchange(client, health, follow_redirects=False)
                self._loop.note_answer(self.base_url)
            return await sending
        finally:
            sending.cancel()

    async def _exchange(
        self, client: httpx2.AsyncClient, request: httpx2.Request, follow_redirects: bool
    ) -> httpx2.Response:
        """One request without what the client adds, which takes longer than the rest; redirects and proxies need it."""
        if self._wire is not None:
            response = await self._wire.handle_async_request(request)
            response.request = request
            await response.aread()
            if not (follow_redirects and response.has_redirect_location):
                return response
        return await client.send(request, follow_redirects=follow_redirects)

    async def call(
        self,
        method: str,
        path: str,
        body: BaseModel | Mapping[str, Any] | bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT_SECONDS,
        patience: float = PATIENCE_SECONDS,
        final: tuple[int, ...] = (),
        follow_redirects: bool = True,
    ) -> httpx2.Response:
        """The answer of a successful request. Errors that may pass are waited out for ``patience`` seconds.

        Those with a status in ``final`` are raised immediately. An address that never answered is given up sooner.
        """
        sent = {"Content-Type": JSON} if body is not None else {}
        if method != "GET":
            sent["X-Idempotency-Key"] = uuid.uuid4().hex
        sent.update(headers or {})
        content = encode(body)
        backoff, since = Backoff(), time.monotonic()
        while True:
            try:
                return succeeded(
                    await self.send(
                        method,
                        path,
                        content=content,
                        headers=sent,
                        timeout=timeout,
                        within=self._first_answer_within(since),
                        follow_redirects=follow_redirects,
                    )
                )
            except BillingError as error:
                if patience == 0 or 402 in final or time.monotonic() - since > self.billing_seconds:
                    raise
                self.report(error)
                delay = BILLING_PAUSE_SECONDS
            except APIStatusError as error:
                delay = retry_after(error.response.headers) or backoff.next()
                if error.status_code in final or not is_transient(error) or time.monotonic() + delay - since > patience:
                    raise
                self.report(error)
            except APIConnectionError as error:
                delay, passed = backoff.next(), time.monotonic() - since
                if not self.has_answered and passed + delay > min(patience, FIRST_ANSWER_SECONDS):
                    raise APIConnectionError(error.request, no_server(self.base_url, error)) from error
                if passed + delay > patience:
                    raise
                self.report(error)
            await asyncio.sleep(delay)

    def _first_answer_within(self, since: float) -> float | None:
        """How long an attempt may take at an address that never answered, so that giving up includes the last one."""
        if self.has_answered or self._open_transport is not None:  # a service in this process may be starting
            return None
        return max(MIN_ATTEMPT_SECONDS, since + FIRST_ANSWER_SECONDS - time.monotonic())

    @property
    def has_answered(self) -> bool:
        """Whether the server has ever answered a client of this process."""
        return self._loop.has_answered(self.base_url)

    async def ask(self, model: type[M], method: str, path: str, body: Any = None, **options: Any) -> M:
        """The answer as an object."""
        return parse(model, await self.call(method, path, body, **options))

    def report(self, error: Exception) -> None:
        """Say that the server is being waited for; not every time."""
        if time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._reported_at = time.monotonic()
            log.warning("%s; trying again (Ctrl-C gives up)", error)

    async def _open(self) -> httpx2.AsyncClient:
        async with self._opening:
            if self._client is None:
                if self._open_transport is not None:
                    self._wire = await self._open_transport()
                elif not is_proxied(self.base_url):
                    self._wire = HttpTransport()
                # Without a transport of its own, the client goes through the proxies that the environment names.
                client = httpx2.AsyncClient(
                    transport=self._wire, limits=LIMITS, headers=self._headers, follow_redirects=True
                )
                self._common_headers = dict(client.headers)
                self._client = client
                weakref.finalize(self, _close, self._loop, self._client).atexit = False
            return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def _close(loop: LoopThread, client: httpx2.AsyncClient) -> None:
    if not loop.loop.is_closed():
        loop.loop.call_soon_threadsafe(lambda: loop.loop.create_task(client.aclose()))


@lru_cache(maxsize=256)
def _url(address: str) -> httpx2.URL:
    return httpx2.URL(address)


def is_proxied(address: str) -> bool:
    """Whether the environment, or the system, names a proxy for this address."""
    url, proxies = _url(address), urllib.request.getproxies()
    return bool(proxies.get(url.scheme) or proxies.get("all")) and not urllib.request.proxy_bypass(url.host)


def encode(body: BaseModel | Mapping[str, Any] | bytes | None) -> bytes | None:
    """Bytes of a body: fields that are None are left out of models, and kept in mappings."""
    if body is None or isinstance(body, bytes):
        return body
    if isinstance(body, BaseModel):
        return body.model_dump_json(exclude_none=True).encode()
    return msgspec.json.encode(body)


def decoded(response: httpx2.Response) -> Any:
    """The JSON of an answer, or its text."""
    try:
        return msgspec.json.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return response.text


def succeeded(response: httpx2.Response) -> httpx2.Response:
    if response.status_code >= 400:
        raise status_error(response, decoded(response))
    return response


def parse(model: type[M], response: httpx2.Response) -> M:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        message = f"the answer is no {model.__name__}: {error.errors(include_url=False)[0]['msg']}"
        raise APIResponseValidationError(response, decoded(response), message) from None
