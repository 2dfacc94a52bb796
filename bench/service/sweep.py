"""Measures the cost of sharing an engine: several concurrent runs against one run over as many tokens.

All train with the cookbook's loop and our SDK, as the recipe ``sweep`` does, from a run's creation to its last
checkpoint. The single run gets the same batches: those of a step joined into one, or one after the other.
"""

import asyncio
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import psutil

import lorimer
from bench.service.figures import Figure, median
from bench.service.server import MODEL, BenchServer
from bench.service.setting import Bench
from bench.timing import Contestant, Timings, compete
from lorimer import Datum
from lorimer.cookbook import supervised
from lorimer.cookbook.datasets import Dataset, ShuffledDataset
from lorimer.cookbook.datums import datum_from_tokens

TINY = "lorimer/tiny"
RANK = 16
NUM_TOKENS = 32
"""Tokens per example, about as many as a sum in the recipe."""
MAX_SECONDS = 600.0
WARM_STEPS = 2

Way = Literal["concurrent", "larger batches", "more steps"]
WAYS: tuple[Way, ...] = ("concurrent", "larger batches", "more steps")


class Repeated:
    """Batches of a dataset, each repeated: within one batch, or one after the other."""

    def __init__(self, dataset: Dataset[Datum], times: int, *, in_one_batch: bool) -> None:
        self._dataset, self._times, self._in_one_batch = dataset, times, in_one_batch

    def __len__(self) -> int:
        return len(self._dataset) * (1 if self._in_one_batch else self._times)

    def get_batch(self, step: int) -> list[Datum]:
        if self._in_one_batch:
            return self._dataset.get_batch(step) * self._times
        return self._dataset.get_batch(step // self._times)


async def sweep(bench: Bench) -> list[Figure]:
    """Measure the time of several concurrent runs over that of one run, in both variants."""
    model = MODEL if bench.shared is not None else TINY
    async with bench.server("sweep", model) as (server, _):
        return await asyncio.to_thread(race, bench, server, model)


def race(bench: Bench, server: BenchServer, model: str) -> list[Figure]:
    sizes = bench.sizes
    computed: dict[Way, list[float]] = defaultdict(list)
    with lorimer.ServiceClient(base_url=f"http://{server.host}:{server.port}") as service:

        def run(number: int, way: Way, num_steps: int) -> None:
            directory = bench.root / "sweep-logs" / f"{way} {number}"
            before = cpu_seconds(server)
            train(configs(way, model, sizes.sweep_runs, sizes.sweep_batch, num_steps, directory), service)
            if number:
                computed[way].append(cpu_seconds(server) - before)

        contestants = [
            Contestant(
                name=f"sweep: {way}",
                team=way,
                run=partial(run, way=way, num_steps=sizes.sweep_steps),
                warm_up=partial(run, 0, way, WARM_STEPS),
            )
            for way in WAYS
        ]
        rounds = sizes.sweep_rounds
        timings = compete(contestants, num_rounds=rounds, max_seconds=MAX_SECONDS, progress=bench.progress)
    text = f"{sizes.sweep_runs} concurrent runs of {sizes.sweep_steps} steps of {sizes.sweep_batch} sequences"
    return [figure(f"{text} over one run of as many tokens, {way}", timings, way, computed) for way in WAYS[1:]]


def cpu_seconds(server: BenchServer) -> float:
    """Return the CPU time of server, engine and this process so far, which depends little on other load."""
    api = psutil.Process(server.pid)
    times = [process.cpu_times() for process in (api, *api.children(recursive=True))]
    return time.process_time() + sum(each.user + each.system for each in times)


def configs(
    way: Way, model: str, num_runs: int, batch_size: int, num_steps: int, directory: Path
) -> list[supervised.Config]:
    """Return the configurations of one variant; all variants have the same batches, equally often."""
    tokens = np.random.default_rng(0).integers(3, 259, (2 * batch_size, NUM_TOKENS + 1)).tolist()
    data = [datum_from_tokens(row, [1.0] * len(row)) for row in tokens]
    dataset = ShuffledDataset[Datum](data, batch_size, num_epochs=-(-num_steps // 2))
    repeated = Repeated(dataset, num_runs, in_one_batch=way == "larger batches")
    batches: Dataset[Datum] = dataset if way == "concurrent" else repeated
    return [
        supervised.Config(
            log_dir=directory / str(index),
            base_model=model,
            dataset=batches,
            max_steps=num_steps * (num_runs if way == "more steps" else 1),
            learning_rate=1e-3 * (1 + index),
            rank=RANK,
            sinks=["jsonl"],
        )
        for index in range(num_runs if way == "concurrent" else 1)
    ]


def train(settings: list[supervised.Config], service: lorimer.ServiceClient) -> None:
    async def train_all() -> list[supervised.Result]:
        return await asyncio.gather(*(supervised.train(config, service) for config in settings))

    for config, result in zip(settings, asyncio.run(train_all()), strict=True):
        if result.checkpoint.step != config.num_steps:
            raise RuntimeError(f"a run of {config.num_steps} steps ended after {result.checkpoint.step}")


def figure(text: str, timings: Timings, way: Way, computed: dict[Way, list[float]]) -> Figure:
    many, one = timings.best("concurrent"), timings.best(way)
    processors = [f"{median(computed[each]):.1f} s" for each in ("concurrent", way)]
    return Figure(
        text=text,
        value=many.median / one.median,
        details=f"concurrent {many.duration()}, one run {one.duration()}; processor time {' and '.join(processors)}",
        aim="sweep",
    )
