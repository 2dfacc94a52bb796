"""A real server for the tests of routes: the whole application in this process, an engine in its own, three users.

One server serves all tests here; each test works in sessions of its own.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
import pytest
import pytest_asyncio
from starlette.applications import Starlette

from lorimer import types
from lorimer.models.debug import make_debug_model
from lorimer.server.app import create_app
from lorimer.server.context import Context
from lorimer.server.settings import Settings
from lorimer.types.compatibility import PROTOBUF
from lorimer.types.encoding import (
    decode_forward_backward_output,
    decode_sample_response,
    encode_training_request,
)

MODEL = "test/debug"
TOKENS = [10, 20, 30, 40, 50]
LOSS = {
    "name": "likelihood",
    "inputs": [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}],
    "graph": {
        "format": 1,
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
            {"op": "placeholder", "name": "weights", "target": "weights", "args": [], "kwargs": {}},
            {
                "op": "call_function",
                "name": "mul",
                "target": "operator.mul",
                "args": [{"ref": "logprobs"}, {"ref": "weights"}],
                "kwargs": {},
            },
            {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "mul"}], "kwargs": {}},
            {"op": "call_function", "name": "neg", "target": "operator.neg", "args": [{"ref": "total"}], "kwargs": {}},
            {
                "op": "output",
                "name": "output",
                "target": "output",
                "args": [{"tuple": [{"ref": "neg"}, {"dict": {"custom/likelihood:sum": {"ref": "total"}}}]}],
                "kwargs": {},
            },
        ],
    },
}
"""The loss of cross_entropy, as a client uploads it."""


@dataclass
class Client:
    """A user's program: every call of the API by its name."""

    http: httpx2.AsyncClient
    user_id: str
    sdk: str = "0.36.0"
    headers: dict[str, str] = field(default_factory=dict)

    async def send(self, method: str, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        headers = {"user-agent": f"AsyncTinker/Python {self.sdk}", **self.headers, **options.pop("headers", {})}
        if body is not None:
            options["json"] = body
        return await self.http.request(method, f"/api/v1/{path}", headers=headers, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        return await self.send("POST", path, body, **options)

    async def get(self, path: str, **options: Any) -> httpx2.Response:
        return await self.send("GET", path, **options)

    async def ok(self, path: str, body: Any = None, **options: Any) -> Any:
        """The JSON of a POST that must succeed."""
        response = await self.post(path, body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def fetch(self, path: str, **options: Any) -> Any:
        """The JSON of a GET that must succeed."""
        response = await self.get(path, **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def poll(self, request_id: str, accept: str = "application/json", **body: Any) -> httpx2.Response:
        """The answer to a poll that is no longer "try again"."""
        while True:
            body = {"request_id": request_id, **body}
            response = await self.post("retrieve_future", body, headers={"accept": accept})
            if response.status_code != 408:
                return response

    async def result(self, promise: dict[str, Any]) -> Any:
        """The JSON result of a future, which must succeed."""
        response = await self.poll(promise["request_id"])
        assert response.status_code == 200, response.text
        assert "error" not in response.json(), response.text
        return response.json()

    async def failure(self, promise: dict[str, Any]) -> dict[str, str]:
        response = await self.poll(promise["request_id"])
        assert response.status_code == 200, response.text
        assert response.json().keys() == {"error", "category"}, response.text
        return response.json()

    async def session(self, **fields: Any) -> str:
        body = {"tags": [], "user_metadata": {}, "sdk_version": self.sdk, **fields}
        return (await self.ok("create_session", body))["session_id"]

    async def run(self, session_id: str | None = None, number: int = 0, rank: int = 4, **fields: Any) -> str:
        """A run, created and ready."""
        session_id = session_id or await self.session()
        body = {"session_id": session_id, "model_seq_id": number, "base_model": MODEL, "lora_config": {"rank": rank}}
        body["lora_config"]["seed"] = 1
        return (await self.result(await self.ok("create_model", body | fields)))["model_id"]

    async def train(self, model_id: str, seq_id: int, forward_only: bool = False, **fields: Any) -> Any:
        """A forward-backward in protobuf and its decoded result."""
        request = types.TrainingRequest(model_id, seq_id, **({"data": [datum()], "loss_fn": "cross_entropy"} | fields))
        promise = await self.submit(
            request if not forward_only else types.TrainingRequest(**vars(request) | {"forward_only": True})
        )
        response = await self.poll(promise["request_id"], PROTOBUF)
        assert response.headers["content-type"] == PROTOBUF, response.text
        return decode_forward_backward_output(response.content)

    async def logprobs(self, model_id: str, seq_id: int) -> np.ndarray:
        """Of the one datum, with the weights as they are."""
        found = await self.train(model_id, seq_id, forward_only=True)
        return found.loss_fn_outputs[0]["logprobs"].to_numpy()

    async def submit(self, request: types.TrainingRequest) -> Any:
        response = await self.post(
            "forward_backward", content=encode_training_request(request), headers={"content-type": PROTOBUF}
        )
        assert response.status_code == 200, response.text
        return response.json()

    async def step(self, model_id: str, seq_id: int, **params: float) -> Any:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.01, **params}}
        return await self.result(await self.ok("optim_step", body))

    async def save(self, model_id: str, seq_id: int, name: str, kind: str = "save_weights", **fields: Any) -> str:
        body = {"model_id": model_id, "seq_id": seq_id, "path": name, **fields}
        return (await self.result(await self.ok(kind, body)))["path"]

    async def sampler(self, session_id: str, number: int = 0, **fields: Any) -> str:
        body = {"session_id": session_id, "sampling_session_seq_id": number, **(fields or {"base_model": MODEL})}
        return (await self.ok("create_sampling_session", body))["sampling_session_id"]

    async def sample(self, sampler_id: str, seq_id: int = 0, **fields: Any) -> types.SampleResponse:
        """A sample and its decoded result."""
        promise = await self.ok("asample", sample_body(sampler_id, seq_id, **fields))
        response = await self.poll(promise["request_id"], PROTOBUF)
        assert response.headers.get("content-type") == PROTOBUF, response.text
        return decode_sample_response(response.content, promise["sample_sequence_ids"])

    def release(self, sdk: str) -> "Client":
        """The same user with another release of the SDK."""
        return Client(self.http, self.user_id, sdk, self.headers)


def sample_body(sampler_id: str, seq_id: int = 0, **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": 4, "seed": 7, "temperature": 1.0} | fields.pop("sampling_params", {})
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": TOKENS, "type": "encoded_text"}]},
        "sampling_params": params,
        **fields,
    }


def datum(tokens: list[int] = TOKENS, **inputs: Any) -> types.Datum:
    values = inputs or {
        "target_tokens": np.array([*tokens[1:], 60], np.int64),
        "weights": np.ones(len(tokens), np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=values)


@dataclass
class Server:
    app: Starlette
    context: Context
    ada: Client
    bob: Client
    eve: Client
    secrets: dict[str, str]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("model") / "debug"
    make_debug_model(directory)
    return directory


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(tmp_path_factory: pytest.TempPathFactory, model_directory) -> AsyncIterator[Server]:
    settings = Settings(
        models=(f"{MODEL}={model_directory}",),
        data=tmp_path_factory.mktemp("server") / "data",
        num_threads=1,
        dtype="float32",
        poll_seconds=20.0,
        failed_lookups_per_second=0,
    )
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        context: Context = app.state.context
        clients, secrets = {}, {}
        for name in ("ada", "bob", "eve"):
            key, secret = await context.credentials.create(name, f"{name}'s laptop", "for tests")
            transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
            http = httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60)
            clients[name] = Client(http, key.user_id, headers={"x-api-key": secret})
            secrets[name] = secret
        yield Server(app, context, **clients, secrets=secrets)
        for client in clients.values():
            await client.http.aclose()


@pytest.fixture
def ada(server: Server) -> Client:
    return server.ada


@pytest.fixture
def bob(server: Server) -> Client:
    return server.bob
