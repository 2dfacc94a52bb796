"""Server-sent events of an answer, as they come: what a streaming request of the compatible API gives."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx2
import msgspec

from lorimer import __version__
from lorimer.client import embedded
from lorimer.client.connection import Connection
from lorimer.client.errors import APIConnectionError, TinkerError, status_error
from lorimer.client.in_process import EVENTS
from lorimer.client.transport import CONNECT_SECONDS, decoded, encode

SILENT_SECONDS = 60.0
"""The server says that it is still there more often than this."""


class StreamFailed(TinkerError):
    """The answer broke off; the message says why."""


async def stream_events(connection: Connection, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """The data of each event until the end of the answer; an error of the server is raised."""
    transport = await embedded.open_transport(None) if connection.is_local else None
    timeout = httpx2.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
    headers = {
        "User-Agent": f"Lorimer/Python {__version__}",
        "Content-Type": "application/json",
        "Accept": EVENTS,
        **connection.headers,
        **await connection.transport.credentials.header(),
    }
    url = connection.transport.base_url + path
    request = httpx2.Request("POST", url)
    try:
        async with (
            httpx2.AsyncClient(transport=transport, timeout=timeout, headers=headers) as client,
            client.stream("POST", url, content=encode(body)) as response,
        ):
            async for event in _events(response):
                yield event
    except httpx2.ConnectError as error:
        raise APIConnectionError(request, f"{connection.base_url} cannot be reached: {error}") from error
    except (httpx2.HTTPError, OSError) as error:
        raise APIConnectionError(request, f"the answer broke off: {error or type(error).__name__}") from error


async def _events(response: httpx2.Response) -> AsyncGenerator[dict[str, Any]]:
    if response.status_code >= 400:
        await response.aread()
        raise status_error(response, decoded(response))
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event: dict[str, Any] = msgspec.json.decode(data)
        if error := event.get("error"):
            raise StreamFailed(str(error.get("message", error)))
        yield event
