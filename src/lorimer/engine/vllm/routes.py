"""The HTTP routes of a vLLM server that are used here, and how it is found to hang."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2

from lorimer.engine.vllm.server import is_healthy
from lorimer.errors import EngineError

BASE = "lorimer-zeros"
"""The name of the adapter of zeros, as which the base model is asked."""
PROBE_SECONDS, HUNG_SECONDS = 30.0, 120.0
"""How often one token is sampled, and how long vLLM may neither answer that nor compute any other token."""


class VllmError(EngineError):
    """vLLM answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"vLLM answered {status}: {text[:500]}")
        self.status = status


class Vllm:
    """The HTTP routes of a vLLM server that are used here."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        response = await self._client.post(path, json=body)
        if response.status_code != 200:
            raise VllmError(response.status_code, response.text)
        return response.content

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.post("/v1/completions", body))
        return found

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the pieces of a completion. vLLM stops computing it when the iterator is closed."""
        body = body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise VllmError(response.status_code, (await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if line and data != "[DONE]":
                    piece = json.loads(data)
                    if "error" in piece:
                        raise VllmError(int(piece["error"].get("code") or 500), str(piece["error"]))
                    yield piece

    async def load_adapter(self, name: str, directory: str | Path) -> None:
        try:
            await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})
        except VllmError as error:
            if "already been loaded" not in str(error):
                raise

    async def unload_adapter(self, name: str) -> None:
        try:
            await self.post("/v1/unload_lora_adapter", {"lora_name": name})
        except VllmError as error:
            if error.status not in (400, 404):  # it is not loaded
                raise

    async def is_healthy(self) -> bool:
        return await is_healthy(self._client)

    async def num_tokens(self) -> float:
        """Return a number that grows while vLLM computes tokens."""
        lines = (await self._client.get("/metrics")).text.splitlines()
        counters = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(counters))


async def watch(vllm: Vllm) -> None:
    """Sample one token now and then. Return when vLLM has neither answered nor computed anything for too long."""
    body = {"model": BASE, "prompt": [0], "max_tokens": 1, "temperature": 0.0}
    while True:
        await asyncio.sleep(PROBE_SECONDS)
        probe = asyncio.create_task(vllm.complete(body))
        try:
            if not await makes_progress(vllm, probe):
                return
        finally:
            probe.cancel()


async def makes_progress(vllm: Vllm, probe: "asyncio.Task[dict[str, Any]]") -> bool:
    """Wait for a probe, which waits its turn behind other requests while these are computed."""
    num_tokens, since = -1.0, time.monotonic()
    while time.monotonic() - since < HUNG_SECONDS:
        done, _ = await asyncio.wait([probe], timeout=HUNG_SECONDS / 8)
        if done:
            return probe.exception() is None
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            async with asyncio.timeout(HUNG_SECONDS / 8):
                found = await vllm.num_tokens()
            if found != num_tokens:
                num_tokens, since = found, time.monotonic()
    return False
