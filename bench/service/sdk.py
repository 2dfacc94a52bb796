"""Compares our SDK with the official one on the same server, alternating: the total time of many small calls.

Both run in this process with default settings, except that the telemetry of the official one is off.
"""

import asyncio
import os
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import tinker

import lorimer
from bench.service.figures import Figure
from bench.service.server import MODEL
from bench.service.setting import Bench
from bench.timing import Contestant, Timings, compete

NUM_TOKENS = 16
SAMPLE_TOKENS = 4
MAX_SECONDS = 600.0
RANK = 8


@dataclass(frozen=True)
class Side:
    """A session of one of the two SDKs, with a run and a sampler."""

    types: ModuleType
    trainer: Any
    sampler: Any

    @classmethod
    def open(cls, sdk: ModuleType, service: Any) -> "Side":
        trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=0)
        return cls(sdk.types, trainer, service.create_sampling_client(base_model=MODEL))

    def forward(self, count: int, _: int = 0) -> None:
        """Submit all calls before waiting for the first result."""
        tokens = np.random.default_rng(0).integers(3, 259, NUM_TOKENS + 1).tolist()
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * NUM_TOKENS}
        datum = self.types.Datum(model_input=self.types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        futures = [self.trainer.forward([datum], "cross_entropy") for _ in range(count)]
        losses = {round(future.result().metrics["loss:sum"], 3) for future in futures}
        if len(losses) != 1:
            raise RuntimeError(f"{count} equal calls gave different losses: {sorted(losses)[:5]}")

    def sample(self, count: int, round_number: int = 0) -> None:
        prompts = np.random.default_rng(round_number).integers(3, 259, (count, NUM_TOKENS)).tolist()
        params = self.types.SamplingParams(max_tokens=SAMPLE_TOKENS, seed=1, stop=[])
        futures = [self.sampler.sample(self.types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
        lengths = {len(future.result().sequences[0].tokens) for future in futures}
        if lengths != {SAMPLE_TOKENS}:
            raise RuntimeError(f"samples of {SAMPLE_TOKENS} tokens came with lengths {lengths}")


async def sdk(bench: Bench) -> list[Figure]:
    """Time the same concurrent training and sampling calls with both SDKs."""
    async with bench.server("sdk") as (server, _):
        return await asyncio.to_thread(race, bench, f"http://{server.host}:{server.port}")


def race(bench: Bench, url: str) -> list[Figure]:
    sizes = bench.sizes
    counts = {"forward": sizes.sdk_calls, "sample": sizes.sdk_samples}
    with (
        patch.dict(os.environ, {"TINKER_TELEMETRY": "0"}),
        lorimer.ServiceClient(base_url=url) as ours,
        tinker.ServiceClient(base_url=url, api_key="tml-bench") as theirs,
    ):
        sides = {"ours": Side.open(lorimer, ours), "official": Side.open(tinker, theirs)}
        return [
            figure(f"{count} concurrent tiny `{call}` calls, all results", compete_with(bench, sides, call, count))
            for call, count in counts.items()
        ]


def compete_with(bench: Bench, sides: dict[str, Side], call: str, count: int) -> Timings:
    contestants = [
        Contestant(
            name=f"sdk: {name} {call}",
            team=name,
            run=partial(getattr(side, call), count),
            warm_up=partial(getattr(side, call), max(1, count // 10)),
        )
        for name, side in sides.items()
    ]
    rounds = bench.sizes.sdk_rounds
    return compete(contestants, num_rounds=rounds, max_seconds=MAX_SECONDS, progress=bench.progress)


def figure(text: str, timings: Timings) -> Figure:
    ours, official = timings.best("ours"), timings.best("official")
    return Figure(
        text=f"{text}: our SDK's time over the official one's",
        value=ours.median / official.median,
        details=f"ours {ours.duration()}, official {official.duration()}",
        aim="sdk overhead",
    )
