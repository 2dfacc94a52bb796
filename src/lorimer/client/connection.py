"""A server and how to reach it: its address, the transport, and the flags it sends. Needs no session.

``base_url`` is the argument, else ``LORIMER_BASE_URL`` or ``TINKER_BASE_URL``; ``local``, or none of them, is the
service in this process.
"""

import asyncio
import os
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from lorimer.client import embedded
from lorimer.client.budgets import ByteBudget
from lorimer.client.credentials import Credentials
from lorimer.client.errors import NotFoundError
from lorimer.client.futures import AwaitableConcurrentFuture
from lorimer.client.loop import LoopThread, loop_thread
from lorimer.client.transport import Transport
from lorimer.types import ClientConfigRequest, ClientConfigResponse, ClientDynamicConfigResponse, console_url
from lorimer.types.compatibility import NEWEST

T = TypeVar("T")

LOCAL = "local"


def resolve_base_url(base_url: str | None) -> str:
    found = base_url or os.environ.get("LORIMER_BASE_URL") or os.environ.get("TINKER_BASE_URL") or LOCAL
    if found != LOCAL and not found.startswith(("http://", "https://")):
        raise ValueError(f"base_url is {found!r}; accepted are http:// and https:// addresses, and 'local'")
    return found.rstrip("/")


class Connection:
    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        model: str | None = None,
    ) -> None:
        self.base_url = resolve_base_url(base_url)
        self.is_local = self.base_url == LOCAL
        if model is not None and not self.is_local:
            raise ValueError(f"model is {model!r}, which base_url='local' takes; {self.base_url} has its own models")
        self.loop = loop_thread()
        self.headers = dict(headers or {})
        self.transport = Transport(
            embedded.ADDRESS if self.is_local else self.base_url,
            Credentials(api_key),
            self.loop,
            self.headers,
            (lambda: embedded.open_transport(model)) if self.is_local else None,
        )
        self.config = ClientConfigResponse()
        self.dynamic = ClientDynamicConfigResponse()
        self._is_ready = False
        self._preparing = asyncio.Lock()
        self.set_config(self.config)

    def set_config(self, config: ClientConfigResponse) -> None:
        self.config = config
        self.transport.billing_seconds = config.billing_exception_max_pause_duration_sec
        self.training_budget = ByteBudget(config.fwdbwd_dispatch_bytes_semaphore_size)
        self.sampling_budget = ByteBudget(config.sample_dispatch_bytes_semaphore_size)
        self.result_budget = ByteBudget(config.inflight_response_bytes_semaphore_size)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> AwaitableConcurrentFuture[T]:
        """Start a coroutine on the SDK's loop."""
        return AwaitableConcurrentFuture(self.loop.run(coroutine))

    run_coroutine_threadsafe = run
    """As programs of the official SDK call it, on the ``holder`` of a client."""

    async def ready(self) -> None:
        """Fetch the flags, once."""
        if self._is_ready:
            return
        async with self._preparing:
            if self._is_ready:
                return
            body = ClientConfigRequest(sdk_version=str(NEWEST))
            config, self.dynamic = await asyncio.gather(
                self.transport.ask(ClientConfigResponse, "POST", "/api/v1/client/config", body), self._fetch_dynamic()
            )
            self.set_config(config)
            self._is_ready = True

    async def _fetch_dynamic(self) -> ClientDynamicConfigResponse:
        body = ClientConfigRequest(sdk_version=str(NEWEST))
        try:
            return await self.transport.ask(
                ClientDynamicConfigResponse, "POST", "/api/v1/client/dynamic_config", body, timeout=10.0
            )
        except NotFoundError:
            return ClientDynamicConfigResponse()

    async def refresh(self) -> None:
        """Fetch again what may change; a failure keeps what there is."""
        self.dynamic = await self._fetch_dynamic()

    def adopt(self, config: Mapping[str, Any], dynamic: Mapping[str, Any]) -> None:
        """Take the flags of another client of the same server, which has answered that one."""
        self.loop.note_answer(self.transport.base_url)
        self.set_config(ClientConfigResponse.model_validate(config))
        self.dynamic = ClientDynamicConfigResponse.model_validate(dynamic)
        self._is_ready = True

    def current_loop(self) -> LoopThread:
        """The loop of this process; it is another one after a fork."""
        return loop_thread()

    def console_url(self, *segments: str) -> str:
        """A page of the server's console."""
        if self.is_local:
            return console_url(*segments)
        return "/".join([self.base_url, "console", *(quote(segment, safe=":") for segment in segments)])

    def close(self) -> None:
        self.run(self.transport.close())
