"""Real servers for tests that need no model: in this process, their engine never started, or in one of their own."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lorimer.models.debug import make_debug_model
from lorimer.server.app import create_app
from lorimer.server.bodies import decode, read_body
from lorimer.server.context import Context
from lorimer.server.decoders import Decoders
from lorimer.server.settings import Settings
from lorimer.store import users
from lorimer.types import TelemetrySendRequest
from tests.server.processes import Process
from tests.server.routes.conftest import MODEL, Client


@dataclass
class Running:
    """An application within its lifespan, and a client of it that shows no key."""

    app: Starlette
    context: Context
    http: httpx2.AsyncClient

    async def new_key(self, user: str = "alice") -> tuple[users.ApiKey, str]:
        return await self.context.credentials.create(user, "test")


async def size_of_body(request: Request) -> Response:
    return JSONResponse(len(await read_body(request)))


async def decoded_body(request: Request) -> Response:
    body = await decode(request, TelemetrySendRequest)
    return JSONResponse(body.sdk_version)


async def zeros(request: Request) -> Response:
    return JSONResponse([0] * int(request.query_params["count"]))


async def fail(request: Request) -> Response:
    raise RuntimeError("the secret number is 4711")


TEST_ROUTES = [
    Route("/size", size_of_body, methods=["POST"]),
    Route("/decoded", decoded_body, methods=["POST"]),
    Route("/zeros", zeros, methods=["GET"]),
    Route("/fail", fail, methods=["GET"]),
]
"""Beside the routes of the application, so that its layers can be seen to work."""

Launch = Callable[..., Process]
Serve = Callable[..., AbstractAsyncContextManager[tuple[Process, Client]]]
Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Begins a server with the given settings."""

    @asynccontextmanager
    async def begin(**values: Any) -> AsyncIterator[Running]:
        app = create_app(Settings(**{"data": tmp_path / "data", "start_engines": "lazy", **values}))
        app.router.routes.extend(TEST_ROUTES)
        async with app.router.lifespan_context(app):
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
                yield Running(app, app.state.context, http)

    return begin


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts ``lorimer serve`` with flags; all end with the test."""
    started: list[Process] = []

    def begin(*flags: str, **options: Any) -> Process:
        started.append(Process(tmp_path, *flags, **options))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_debug_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def serve(tmp_path: Path, model: Path) -> Serve:
    """A server on one data directory, killed with its engine at the end of the block."""

    @asynccontextmanager
    async def begin(name: str = "place", models: str = "", **settings: object) -> AsyncIterator[tuple[Process, Client]]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        flags = [f"--set={key}={value}" for key, value in {"poll_seconds": 20, **settings}.items()]
        served = models or f"{MODEL}={model}"
        server = Process(folder, "--model", served, "--dtype", "float32", *flags).wait_until_ready()
        try:
            async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
                yield server, Client(http, "local")
        finally:
            engines = server.engines()
            server.close()  # SIGKILL
            for engine in engines:
                engine.wait(30)

    return begin


@pytest.fixture
async def pool() -> AsyncIterator[Callable[..., Decoders]]:
    """Makes decoders with the given settings; all end with the test."""
    made: list[Decoders] = []

    def make(**settings: Any) -> Decoders:
        made.append(Decoders(Settings(**settings)))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.pids == []
