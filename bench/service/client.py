"""A minimal client of the protocol, with as few requests as possible."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from bench.service.http import PROTOBUF, Answer, HttpPool
from bench.service.server import MODEL
from lorimer import types
from lorimer.engine import messages
from lorimer.engine.translation import engine_datum
from lorimer.types.encoding import decode_forward_backward_output, encode_training_request
from lorimer.types.tensors import TensorData

RANK, SEED = 8, 7
NUM_TOKENS = 16
LEARNING_RATE = 1e-3


def datum(num_tokens: int = NUM_TOKENS) -> types.Datum:
    """Return a cross-entropy example, the same for all clients, so that losses can be compared."""
    tokens = np.random.default_rng(5).integers(3, 259, num_tokens + 1)
    inputs = {
        "target_tokens": TensorData.from_numpy(tokens[1:].astype(np.int64)),
        "weights": TensorData.from_numpy(np.ones(num_tokens, np.float32)),
    }
    return types.Datum(types.ModelInput.from_ints(tokens[:-1].tolist()), inputs)


DATUM = datum()
ENGINE_DATUM: messages.Datum = engine_datum(DATUM, 0)


class Session:
    """A session, and the requests that need no run."""

    def __init__(self, pool: HttpPool, session_id: str) -> None:
        self.pool, self.session_id = pool, session_id

    @classmethod
    async def create(cls, pool: HttpPool) -> "Session":
        body = {"tags": [], "sdk_version": "0.36.0", "type": "create_session"}
        return cls(pool, (await call(pool, "create_session", body)).json()["session_id"])

    async def heartbeat(self) -> None:
        await call(self.pool, "session_heartbeat", {"session_id": self.session_id})

    async def create_run(self, number: int = 0) -> "Run":
        lora = {"rank": RANK, "seed": SEED}
        body = {"session_id": self.session_id, "model_seq_id": number, "base_model": MODEL, "lora_config": lora}
        accepted = (await call(self.pool, "create_model", body)).json()
        await wait(self.pool, accepted["request_id"])
        return Run(self.pool, accepted["model_id"])

    async def create_sampler(self, number: int = 0, model: str = MODEL) -> "Sampler":
        body = {"session_id": self.session_id, "sampling_session_seq_id": number, "base_model": model}
        return Sampler(
            self.pool, (await call(self.pool, "create_sampling_session", body)).json()["sampling_session_id"]
        )


class Run:
    """A run and its numbered operations; each returns the id of its future."""

    def __init__(self, pool: HttpPool, model_id: str) -> None:
        self.pool, self.model_id = pool, model_id
        self.numbers = itertools.count(1)

    async def train(
        self, *, forward_only: bool = False, number: int | None = None, data: Sequence[types.Datum] = (DATUM,)
    ) -> str:
        seq_id = next(self.numbers) if number is None else number
        request = types.TrainingRequest(self.model_id, seq_id, list(data), "cross_entropy", {}, forward_only)
        answer = await self.pool.post("/api/v1/forward_backward", encode_training_request(request), PROTOBUF)
        return answer.json()["request_id"]

    async def step(self) -> str:
        params = {"learning_rate": LEARNING_RATE}
        body = {"model_id": self.model_id, "seq_id": next(self.numbers), "adam_params": params, "type": "optim_step"}
        return (await call(self.pool, "optim_step", body)).json()["request_id"]

    async def publish(self) -> str:
        """Save the present weights for sampling."""
        seq_id = next(self.numbers)
        body = {"model_id": self.model_id, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
        return (await call(self.pool, "save_weights_for_sampler", body)).json()["request_id"]

    async def forward(self) -> float:
        """Submit, wait and return the loss."""
        return loss_of(await wait(self.pool, await self.train(forward_only=True)))

    async def train_and_step(self) -> float:
        """Submit both operations before waiting for either, as training loops do."""
        trained, stepped = await self.train(), await self.step()
        loss = loss_of(await wait(self.pool, trained))
        await wait(self.pool, stepped)
        return loss


class Sampler:
    """A sampling session of the base model."""

    def __init__(self, pool: HttpPool, sampling_session_id: str) -> None:
        self.pool, self.sampling_session_id = pool, sampling_session_id
        self.numbers = itertools.count(1)

    async def submit(self, num_tokens: int) -> str:
        number = next(self.numbers)
        prompt = np.random.default_rng(number).integers(3, 259, NUM_TOKENS).tolist()
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            # No stop strings: every sample has its full length.
            "sampling_params": {"max_tokens": num_tokens, "seed": number, "stop": []},
            "sampling_session_id": self.sampling_session_id,
            "seq_id": number,
        }
        return (await call(self.pool, "asample", body)).json()["request_id"]

    async def finished(self, cursor: int, retrieved: list[str]) -> tuple[list[str], int]:
        """Return what has finished since ``cursor``, with one long poll for all futures."""
        target = {"sampling_session_id": self.sampling_session_id, "cloned_sampler_id": 0, "type": "sampling_session"}
        body = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": retrieved}
        found = (await call(self.pool, "retrieve_futures", body)).json()
        if failed := [item for item in found["completions"] if item["state"] != "finished"]:
            raise RuntimeError(f"a sample failed: {failed[0]!r}")
        return [item["request_id"] for item in found["completions"]], found["cursor"]


async def call(pool: HttpPool, name: str, body: dict[str, Any]) -> Answer:
    return await pool.post(f"/api/v1/{name}", msgspec.json.encode(body))


async def wait(pool: HttpPool, request_id: str) -> bytes:
    """Poll until there is a result; raise an error if the request failed."""
    body = msgspec.json.encode({"request_id": request_id})
    while True:
        answer = await pool.post("/api/v1/retrieve_future", body)
        if answer.status == 200:
            if answer.body.startswith(b'{"error"'):
                raise RuntimeError(f"request {request_id} failed: {answer.body[:500]!r}")
            return answer.body


def loss_of(result: bytes) -> float:
    return decode_forward_backward_output(result).loss
