"""A user's program that speaks HTTP itself: it sees each status and each failure, and retries nothing on its own."""

from collections.abc import Sequence
from typing import Any

import httpx2

from tests.faults.tenant import MODEL, PROMPT

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}


class Caller:
    """One user of one server. Use as a context."""

    def __init__(self, url: str, key: str = "tml-local", model: str = MODEL) -> None:
        self.model = model
        self.http = httpx2.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=120)
        self._num_runs = self._num_samplers = 0
        self._next: dict[str, int] = {}
        self.session_id = ""

    def __enter__(self) -> "Caller":
        self.session_id = self.ok("create_session", tags=[], user_metadata={}, sdk_version="0.36.0")["session_id"]
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, route: str, /, **body: Any) -> httpx2.Response:
        return self.http.post(f"/{route}", json=body)

    def ok(self, route: str, /, **body: Any) -> Any:
        answer = self.post(route, **body)
        assert answer.status_code == 200, f"{route}: {answer.status_code} {answer.text}"
        return answer.json()

    def outcome(self, request_id: str) -> dict[str, Any]:
        """What a future comes to, good or bad."""
        while (answer := self.post("retrieve_future", request_id=request_id)).status_code == 408:
            continue
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
        return dict(answer.json())

    def result(self, promise: dict[str, Any]) -> dict[str, Any]:
        found = self.outcome(promise["request_id"])
        assert "error" not in found, found
        return found

    def failure(self, promise: dict[str, Any]) -> str:
        found = self.outcome(promise["request_id"])
        assert "error" in found, found
        return str(found["error"])

    # ── operations ────────────────────────────────────────────────────────────────────────────────────

    def create_run(self, **fields: Any) -> dict[str, Any]:
        self._num_runs += 1
        lora = {"rank": 4, "seed": 1}
        body = {"session_id": self.session_id, "model_seq_id": self._num_runs, "base_model": self.model}
        return dict(self.ok("create_model", **{**body, "lora_config": lora, **fields}))

    def run(self) -> str:
        """A run that is ready."""
        return str(self.result(self.create_run())["model_id"])

    def operate(self, kind: str, run: str, /, **fields: Any) -> dict[str, Any]:
        """Submit the next operation of a run; its number counts as used only when it was accepted."""
        answer = self.try_operation(kind, run, **fields)
        assert answer.status_code == 200, f"{kind}: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def try_operation(self, kind: str, run: str, /, **fields: Any) -> httpx2.Response:
        seq_id = self._next.get(run, 1)
        answer = self.post(kind, model_id=run, seq_id=seq_id, **fields)
        if answer.status_code == 200:
            self._next[run] = seq_id + 1
        return answer

    def forward_backward(self, run: str, tokens: Sequence[int] = range(10, 40), num_data: int = 1) -> dict[str, Any]:
        return self.operate("forward_backward", run, forward_backward_input=training_input(tokens, num_data))

    def step(self, run: str) -> int:
        """Train on a little, step, and say how many steps the run has had."""
        self.result(self.forward_backward(run))
        return int(self.result(self.operate("optim_step", run, adam_params=ADAM))["metrics"]["optimizer_step"])

    def save(self, run: str, name: str, kind: str = "save_weights") -> dict[str, Any]:
        return self.operate(kind, run, path=name)

    def sampler(self, **fields: Any) -> str:
        self._num_samplers += 1
        body = {"session_id": self.session_id, "sampling_session_seq_id": self._num_samplers}
        return str(
            self.ok("create_sampling_session", **body, **(fields or {"base_model": self.model}))["sampling_session_id"]
        )

    def sample(self, sampler: str, seq_id: int = 0, prompt: Sequence[int] = PROMPT, **fields: Any) -> dict[str, Any]:
        return dict(self.ok("asample", **sample_body(sampler, seq_id, prompt, **fields)))

    def address(self, path: str) -> httpx2.Response:
        """The answer to whoever wants to download the checkpoint ``path``."""
        run, kind, name = path.removeprefix("tinker://").split("/")
        return self.http.get(f"/training_runs/{run}/checkpoints/{kind}/{name}/archive")


def training_input(tokens: Sequence[int], num_data: int = 1) -> dict[str, Any]:
    """The tokens, and then the same in other orders: what datums share is computed once."""
    orders = [[tokens[(i + j * (1 + i % 7)) % len(tokens)] for j in range(len(tokens))] for i in range(num_data)]
    return {"data": [_datum(order) for order in orders], "loss_fn": "cross_entropy"}


def _datum(tokens: Sequence[int]) -> dict[str, Any]:
    targets = {"data": [*tokens[1:], 60], "dtype": "int64", "shape": [len(tokens)]}
    weights = {"data": [1.0] * len(tokens), "dtype": "float32", "shape": [len(tokens)]}
    chunk = {"type": "encoded_text", "tokens": list(tokens)}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": targets, "weights": weights}}


def sample_body(sampler: str, seq_id: int, prompt: Sequence[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": 6, "seed": 7, "temperature": 1.0, "stop": []} | fields.pop("sampling_params", {})
    chunk = {"tokens": list(prompt), "type": "encoded_text"}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [chunk]},
        "sampling_params": params,
        **fields,
    }
