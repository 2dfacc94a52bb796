"""`python -m lorimer.engine.self_test MODEL`: compares the device of this machine with its CPU, as one line of JSON.

`lorimer doctor --gpu` runs it in a process of its own. The reference is this machine's CPU in float32: logprobs of a
packed batch of two adapters before and after a step, the step's gradient, and a greedy sample. Throughput is measured
with the device's own precision.
"""

import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import torch

from lorimer.engine import messages
from lorimer.engine.config import EngineConfig, Quantize, split_quantize
from lorimer.engine.engine import Engine

RUNS = {"one": 4, "two": 16}
"""Adapters of the test by name, with their ranks."""
LENGTHS = (7, 33, 90)
NUM_SAMPLED = 24
SECONDS = 5.0
MAX_LOGPROB, MAX_GRADIENT = 1e-2, 1e-2
"""Accepted differences in float32: of a logprob, and of a gradient relative to its largest value. TF32 has 1e-3."""


def report(model: str) -> dict[str, Any]:
    source, quantize = split_quantize(model)
    config = EngineConfig(model=source, quantize=cast("Quantize", quantize), seed=0)
    reference = _measure(msgspec.structs.replace(config, device="cpu", dtype="float32"))
    gc.collect()  # the next engine needs the memory
    exact = _measure(msgspec.structs.replace(config, dtype="float32"))
    gc.collect()
    chosen = _measure(config, has_speed=True)
    differences = {name: _compare(found, reference) for name, found in (("float32", exact), ("chosen", chosen))}
    worst = differences["float32"]
    is_finite = all(np.isfinite(list(one.values())).all() for one in differences.values())
    return {
        "model": model,
        "device": chosen["info"].device,
        "name": torch.cuda.get_device_name() if chosen["info"].device.startswith("cuda") else platform.processor(),
        "dtype": chosen["info"].dtype,
        "quantize": chosen["info"].quantize,
        "token_budget": chosen["info"].token_budget,
        "kernels": chosen["info"].kernels,
        "torch": str(torch.__version__),
        "differences": differences,
        "accepted": {"logprob": MAX_LOGPROB, "gradient": MAX_GRADIENT},
        "is_equal": bool(is_finite and worst["logprob"] <= MAX_LOGPROB and worst["gradient"] <= MAX_GRADIENT),
        "train_tokens_per_second": chosen["train"],
        "sample_tokens_per_second": chosen["sample"],
    }


def _measure(config: EngineConfig, *, has_speed: bool = False) -> dict[str, Any]:
    """Return what one engine computes, on the CPU's side."""
    engine = Engine(config)
    for name, rank in RUNS.items():
        lora = messages.LoraConfig(rank=rank, seed=1)
        engine.create_run(messages.CreateRun(request_id=name, model_id=name, lora=lora))
    before = _logprobs(engine)
    gradients = [_gradient(engine, name) for name in RUNS]
    for name in RUNS:
        engine.optim_step(messages.OptimStep(request_id=name, model_id=name, params={"learning_rate": 1e-3}))
    after = _logprobs(engine)
    engine.publish_sampler(messages.PublishSampler(request_id="p", model_id="one", sampler_id="s"))
    sampled = _sample(engine, 1, NUM_SAMPLED)
    found: dict[str, Any] = {
        "info": engine.info,
        "logprobs": np.concatenate([*before, *after]),
        "gradient": np.concatenate(gradients),
        "sampled": sampled,
    }
    if has_speed:
        found["train"] = _rate(lambda: sum(len(part) for part in _logprobs(engine)))
        found["sample"] = _rate(lambda: len(_sample(engine, 8, NUM_SAMPLED)))
    return found


def _compare(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    scale = float(np.abs(reference["gradient"]).max())
    same = np.cumprod(found["sampled"][: len(reference["sampled"])] == reference["sampled"]).sum()
    return {
        "logprob": float(np.abs(found["logprobs"] - reference["logprobs"]).max()),
        "gradient": float(np.abs(found["gradient"] - reference["gradient"]).max()) / scale,
        "equal_sampled_tokens": float(same),
    }


def _datum(engine: Engine, length: int) -> messages.Datum:
    limit = min(engine.info.vocab_size, 200)
    tokens = np.array([3 + (7 * i + i * i) % (limit - 3) for i in range(length + 1)])
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
    return messages.Datum(tokens=tokens[:-1], loss_fn_inputs=inputs)


def _logprobs(engine: Engine) -> list[np.ndarray]:
    """Compute a batch of all adapters, with its gradients, and return the logprobs."""
    data = [_datum(engine, length) for length in LENGTHS]
    operations = [
        messages.ForwardBackward(request_id=name, model_id=name, data=data, loss_fn="cross_entropy") for name in RUNS
    ]
    found: list[np.ndarray] = []
    for result in engine.train(operations):
        if isinstance(result, Exception):
            raise result
        found += result.logprobs
    return found


def _gradient(engine: Engine, name: str) -> np.ndarray:
    pairs = engine._run(name).grads
    assert pairs is not None
    return np.concatenate([tensor.float().flatten().cpu().numpy() for pair in pairs.values() for tensor in pair])


def _sample(engine: Engine, num_samples: int, num_tokens: int) -> np.ndarray:
    params = messages.SamplingParams(max_tokens=num_tokens, temperature=0.0, stop=[], seed=0)
    prompt = _datum(engine, LENGTHS[0]).tokens
    request = messages.SampleRequest(
        request_id="sample", prompt=prompt, sampler_id="s", num_samples=num_samples, params=params
    )
    engine.add_sample(request)
    while True:
        for reply in engine.sampler.step():
            if isinstance(reply, messages.Failed):
                raise RuntimeError(reply.error)
            if isinstance(reply, messages.Done) and isinstance(reply.result, messages.SampleResult):
                return np.concatenate([sequence.tokens for sequence in reply.result.sequences])


def _rate(work: Callable[[], int]) -> float:
    """Return the tokens a second of ``work``, which returns how many it computed, and waits for them."""
    work()
    began, tokens = time.perf_counter(), 0
    while not tokens or time.perf_counter() - began < SECONDS:
        tokens += work()
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report(sys.argv[1])) + "\n")
