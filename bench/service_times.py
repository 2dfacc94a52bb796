"""Measures what an engine needs for each kind of work, for the simulations that compute nothing."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorimer.engine import messages
from lorimer.engine.config import EngineConfig
from lorimer.engine.process import EngineProcess

NUM_RUNS, RANK = 8, 32
SAMPLED_TOKENS, PROMPT_TOKENS, NUM_SEQUENCES = 64, 64, 8
"""One sample request: a prompt, and sequences of so many new tokens."""


@dataclass(frozen=True, kw_only=True)
class ServiceTimes:
    """Seconds of engine time."""

    batch: float
    token: float
    adapter: float
    step: float
    create: float
    save: float
    load: float
    decode: float
    """A decoding step of one sample request."""
    decode_more: float
    """What each further request adds to a decoding step."""

    def train(self, num_tokens: int, num_adapters: int) -> float:
        return self.batch + num_tokens * self.token + num_adapters * self.adapter

    def decode_step(self, num_requests: int) -> float:
        return self.decode + (num_requests - 1) * self.decode_more

    def describe(self) -> str:
        return (
            f"a pass {1e3 * self.batch:.2f} ms + {1e6 * self.token:.1f} µs a token + {1e3 * self.adapter:.2f} ms an "
            f"adapter; an optimiser step {1e3 * self.step:.2f} ms; create a run {1e3 * self.create:.1f} ms, save "
            f"{1e3 * self.save:.1f} ms, load {1e3 * self.load:.1f} ms; a decoding step of {NUM_SEQUENCES} sequences "
            f"{1e3 * self.decode:.2f} ms, of {NUM_SEQUENCES} more {1e3 * self.decode_more:.2f} ms."
        )


def fit(num_threads: int, model: str = "lorimer/tiny") -> ServiceTimes:
    """Measure an engine that serves ``model``."""
    config = EngineConfig(model=model, num_threads=num_threads, dtype="float32")
    with EngineProcess(config) as engine, tempfile.TemporaryDirectory() as folder:
        engine.ready.result()
        return _Measurement(engine, folder).times()


class _Measurement:
    def __init__(self, engine: EngineProcess, folder: str) -> None:
        self._engine, self._folder = engine, folder
        self._numbers = itertools.count()

    def times(self) -> ServiceTimes:
        created = _median(lambda: self._create(f"n{next(self._numbers)}"))
        for run in range(NUM_RUNS):
            self._create(f"m{run}")
        rows, seconds = [], []
        for num_runs, tokens in itertools.product((1, 2, 4, NUM_RUNS), (64, 256, 512)):
            rows.append([1.0, num_runs * tokens, num_runs])
            seconds.append(_median(lambda: self._train(num_runs, tokens)))  # noqa: B023 (called here)
        (fixed, token, adapter), *_ = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)
        state = str(Path(self._folder) / "state")
        self._engine.submit(messages.SaveState(request_id="state", model_id="m0", directory=state)).result()
        one, several = (_median(lambda: self._sample(count)) / SAMPLED_TOKENS for count in (1, 8))  # noqa: B023
        return ServiceTimes(
            batch=max(float(fixed), 1e-4),
            token=max(float(token), 1e-7),
            adapter=max(float(adapter), 0.0),
            step=self._time(lambda name: messages.OptimStep(request_id=name, model_id="m0")),
            create=created,
            save=self._time(
                lambda name: messages.SaveState(request_id=name, model_id="m0", directory=f"{self._folder}/{name}")
            ),
            load=self._time(lambda name: messages.LoadState(request_id=name, model_id="m1", directory=state)),
            decode=one,
            decode_more=max(0.0, (several - one) / 7),
        )

    def _create(self, model_id: str) -> None:
        lora = messages.LoraConfig(rank=RANK)
        self._engine.submit(
            messages.CreateRun(request_id=f"c{next(self._numbers)}", model_id=model_id, lora=lora)
        ).result()

    def _train(self, num_runs: int, tokens: int) -> None:
        operations: list[messages.ForwardBackward | messages.EncodedForwardBackward] = [
            messages.ForwardBackward(
                request_id=f"t{next(self._numbers)}", model_id=f"m{run}", data=_data(tokens), loss_fn="cross_entropy"
            )
            for run in range(num_runs)
        ]
        for future in self._engine.train(messages.TrainBatch(operations=operations)):
            future.result()

    def _sample(self, num_requests: int) -> None:
        params = messages.SamplingParams(max_tokens=SAMPLED_TOKENS, seed=1, stop=[])
        prompt = np.arange(2, 2 + PROMPT_TOKENS, dtype="i4")
        requests = [
            messages.SampleRequest(
                request_id=f"s{next(self._numbers)}", prompt=prompt, num_samples=NUM_SEQUENCES, params=params
            )
            for _ in range(num_requests)
        ]
        for future in [self._engine.submit(request) for request in requests]:
            future.result()

    def _time(self, make: Callable[[str], messages.Command]) -> float:
        return _median(lambda: self._engine.submit(make(f"x{next(self._numbers)}")).result())


def _data(tokens: int) -> list[messages.Datum]:
    ids = np.arange(tokens, dtype="i4") % 50 + 2
    return [messages.Datum(tokens=ids, loss_fn_inputs={"target_tokens": ids, "weights": np.ones(tokens, "f4")})]


def _median(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
