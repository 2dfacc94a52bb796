"""Small things that many tests need: datums, new names, sums over results, downloads, waiting for what comes soon."""

import secrets
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

MODEL = "conformance/debug"
TWIN = "conformance/twin"
SEEING = "conformance/seeing"
"""Reads images."""
VOCAB_SIZE = 272
RANK = 4
WAIT_SECONDS = 20.0


def tokens_of(length: int, seed: int) -> list[int]:
    """Plain tokens: none of them special."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


def new_name(what: str) -> str:
    """A name that nothing else on the server has: other tests, and this one with another SDK, share its users."""
    return f"{what}-{secrets.token_hex(4)}"


def prompt_of(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def datum_of(tokens: list[int], **inputs: Any) -> types.Datum:
    """A datum with any inputs of a loss: lists, arrays or tensors, which the SDK converts."""
    return types.Datum(model_input=prompt_of(tokens), loss_fn_inputs=inputs)


def datum(tokens: list[int], weights: list[float] | None = None) -> types.Datum:
    """Predict each next token; every position counts once unless ``weights`` say otherwise."""
    targets = tokens[1:]
    return datum_of(tokens[:-1], target_tokens=targets, weights=[1.0] * len(targets) if weights is None else weights)


def batch(lengths: tuple[int, ...] = (9, 14, 5), seed: int = 0) -> list[types.Datum]:
    """Datums of several lengths, with weights of all kinds: fractions, zeros and negative ones."""
    rng = np.random.default_rng(seed)
    return [
        datum(tokens_of(length, seed * 100 + length), rng.choice([0.0, 0.5, 1.0, -0.25], length - 1).tolist())
        for length in lengths
    ]


def logprobs(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]


def flat_logprobs(output: types.ForwardBackwardOutput) -> np.ndarray:
    return np.concatenate([one.ravel() for one in logprobs(output)])


def weighted_sum(data: list[types.Datum], output: types.ForwardBackwardOutput) -> float:
    """What cross_entropy is: the sum of -logprob x weight."""
    pairs = zip(data, logprobs(output), strict=True)
    return float(sum(-(one * item.loss_fn_inputs["weights"].to_numpy()).sum(dtype=np.float64) for item, one in pairs))


def step(trainer: tinker.TrainingClient, data: list[types.Datum], **params: float) -> types.ForwardBackwardOutput:
    """One step of training; both operations are submitted before either is waited for."""
    result = trainer.forward_backward(data, "cross_entropy")
    done = trainer.optim_step(types.AdamParams(**({"learning_rate": 1e-2} | params)))
    done.result()
    return result.result()


def current_logprobs(trainer: tinker.TrainingClient, data: list[types.Datum]) -> np.ndarray:
    return flat_logprobs(trainer.forward(data, "cross_entropy").result())


def fetch(url: str) -> bytes:
    """Download as the SDK does: no credential, only the address."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        content: bytes = answer.read()
        assert len(content) == int(answer.headers["Content-Length"])
        return content


def download(rest: tinker.RestClient, path: str, directory: Path) -> Path:
    """The files of an export, in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, url in rest.get_external_weights_urls(path).result().urls.items():
        (directory / name).write_bytes(fetch(url))
    return directory


def eventually(condition: Callable[[], object]) -> None:
    """Wait for something that the server does on its own account."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
