"""Runs Lorimer's engine in this process, through its commands.

Steps use a learning rate of 0, which costs the same as any other and leaves the weights unchanged. So every repetition
on both sides computes the same loss, and the rows check that.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from bench.models import RANK
from bench.workloads import group_advantages, samples_as_data, sft_data
from lorimer.engine.config import Dtype, EngineConfig
from lorimer.engine.engine import Engine
from lorimer.engine.messages import (
    CreateRun,
    Datum,
    Done,
    DropSampler,
    Failed,
    ForwardBackward,
    FullConfig,
    LoadSampler,
    LoadState,
    LoraConfig,
    OptimStep,
    PublishSampler,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    SaveState,
    StepField,
)


class Lorimer:
    """One engine with ``num_runs`` runs, each initialised from the adapter in ``adapter``."""

    def __init__(self, directory: Path, adapter: Path, dtype: Dtype, num_threads: int, num_runs: int = 1) -> None:
        self.dtype = dtype
        self.engine = Engine(EngineConfig(model=str(directory), dtype=dtype, num_threads=num_threads, seed=0))
        self.runs = [f"run-{i}" for i in range(num_runs)]
        self._numbers = itertools.count()
        self._samplers: dict[Path, str] = {}
        for run in self.runs:
            # The saved state says which layers have a pair.
            self.engine.create_run(CreateRun(request_id="", model_id=run, lora=read_lora(adapter)))
            self.engine.load_state(LoadState(request_id="", model_id=run, directory=str(adapter)))
        self.sampler_id = self._publish()

    def train(self, batches: dict[str, list[Datum]], loss_fn: str) -> float:
        """Run forward, backward and a step for each run of ``batches`` in one batch. Return the sum of the losses."""
        operations = [
            ForwardBackward(request_id=run, model_id=run, data=data, loss_fn=loss_fn) for run, data in batches.items()
        ]
        total = 0.0
        for result in self.engine.train(operations):
            if isinstance(result, Exception):
                raise result
            total += result.metrics["loss:sum"]
        for run in batches:
            self.engine.optim_step(OptimStep(request_id=run, model_id=run, params={"learning_rate": 0.0, "eps": 1e-8}))
        return total

    def train_one(self, data: list[Datum], loss_fn: str) -> float:
        return self.train({self.runs[0]: data}, loss_fn)

    def train_unshared(self, data: list[Datum], loss_fn: str) -> float:
        """Do the same as ``train_one``, computing prefixes that the data have in common for each datum."""
        trainer = self.engine.trainer
        before, trainer.min_shared = trainer.min_shared, sys.maxsize
        try:
            return self.train_one(data, loss_fn)
        finally:
            trainer.min_shared = before

    def sample(
        self, prompts: list[np.ndarray], num_samples: int, num_new: int, with_adapter: bool
    ) -> list[list[SampledSequence]]:
        """Sample ``num_new`` tokens each; every prompt is a separate, concurrent request."""
        return self._sample(prompts, num_samples, num_new, [self.sampler_id if with_adapter else None] * len(prompts))

    def sample_with(self, prompts: list[np.ndarray], num_new: int, adapters: Sequence[Path]) -> list[SampledSequence]:
        """Sample each prompt once, with an adapter of its own, all in one batch."""
        groups = self._sample(prompts, 1, num_new, [self._load(adapter) for adapter in adapters])
        return [sequence for (sequence,) in groups]

    def _sample(
        self, prompts: list[np.ndarray], num_samples: int, num_new: int, sampler_ids: Sequence[str | None]
    ) -> list[list[SampledSequence]]:
        params = SamplingParams(max_tokens=num_new, stop=[], seed=next(self._numbers))
        requests = [
            SampleRequest(
                request_id=str(i), prompt=prompt, sampler_id=sampler_id, num_samples=num_samples, params=params
            )
            for i, (prompt, sampler_id) in enumerate(zip(prompts, sampler_ids, strict=True))
        ]
        return [result.sequences for result in self._answer(requests)]

    def score(
        self, prompts: list[np.ndarray], samples: list[np.ndarray], adapters: Sequence[Path | None]
    ) -> list[np.ndarray]:
        """Return the logprobs of tokens that were sampled elsewhere, after their prompts."""
        requests = [
            SampleRequest(
                request_id=str(i),
                prompt=np.concatenate([prompt, sample]),
                sampler_id=None if adapter is None else self._load(adapter),
                params=SamplingParams(max_tokens=1, stop=[]),
                prompt_logprobs=True,
            )
            for i, (prompt, sample, adapter) in enumerate(zip(prompts, samples, adapters, strict=True))
        ]
        found = []
        for result, prompt in zip(self._answer(requests), prompts, strict=True):
            assert result.prompt_logprobs is not None
            found.append(result.prompt_logprobs[len(prompt) :])
        return found

    def _answer(self, requests: list[SampleRequest]) -> list[SampleResult]:
        for request in requests:
            self.engine.add_sample(request)
        found: dict[str, SampleResult] = {}
        while not self.engine.sampler.is_idle:
            for reply in self.engine.sampler.step():
                if isinstance(reply, Failed):
                    raise RuntimeError(reply.error)
                if isinstance(reply, Done) and isinstance(reply.result, SampleResult):
                    found[reply.request_id] = reply.result
        return [found[request.request_id] for request in requests]

    def iterate(self, prompts: list[np.ndarray], num_samples: int, num_new: int, seed: int) -> float:
        """Sample, train on the samples, publish. Return the relative error of the loss against a ratio of 1."""
        groups = self.sample(prompts, num_samples, num_new, with_adapter=True)
        advantages = group_advantages(len(prompts), num_samples, seed)
        data = [
            datum
            for prompt, samples, row in zip(prompts, groups, advantages, strict=True)
            for datum in samples_as_data(prompt, samples, row)
        ]
        loss = self.train_one(data, "importance_sampling")
        before, self.sampler_id = self.sampler_id, self._publish()
        self.engine.drop_sampler(DropSampler(request_id="", sampler_id=before))
        return abs(loss + num_new * advantages.sum()) / float(num_new * np.abs(advantages).sum())

    def _load(self, adapter: Path) -> str:
        """Return the sampler of a saved adapter."""
        if adapter not in self._samplers:
            self._samplers[adapter] = f"sampler-{next(self._numbers)}"
            command = LoadSampler(request_id="", sampler_id=self._samplers[adapter], directory=str(adapter))
            self.engine.load_sampler(command)
        return self._samplers[adapter]

    def _publish(self) -> str:
        sampler_id = f"sampler-{next(self._numbers)}"
        self.engine.publish_sampler(PublishSampler(request_id="", model_id=self.runs[0], sampler_id=sampler_id))
        return sampler_id


def write_adapters(directory: Path, adapters: Sequence[Path], num_threads: int, has_head: bool) -> None:
    """Write adapters for all contestants, each different; one real step makes B other than zero."""
    engine = Engine(EngineConfig(model=str(directory), dtype="float32", num_threads=num_threads, seed=0))
    for seed, adapter in enumerate(adapters):
        name = adapter.name
        lora = LoraConfig(rank=RANK, seed=seed, train_unembed=has_head)
        engine.create_run(CreateRun(request_id="", model_id=name, lora=lora))
        data = sft_data([32, 32], engine.model.vocab_size, seed=seed + 1)
        (result,) = engine.train([ForwardBackward(request_id="", model_id=name, data=data, loss_fn="cross_entropy")])
        if isinstance(result, Exception):
            raise result
        engine.optim_step(OptimStep(request_id="", model_id=name, params={"learning_rate": 1e-2, "eps": 1e-8}))
        engine.save_state(SaveState(request_id="", model_id=name, directory=str(adapter), weights_only=True))


def read_lora(adapter: Path) -> LoraConfig:
    """Return the configuration of an adapter that we wrote."""
    manifest = json.loads((adapter / "lorimer.json").read_text("utf-8"))
    return msgspec.convert(manifest["lora"], LoraConfig)


class FullLorimer:
    """One engine with one run that trains all weights of the model."""

    def __init__(self, directory: Path, dtype: Dtype, num_threads: int) -> None:
        config = EngineConfig(model=str(directory), dtype=dtype, num_threads=num_threads, seed=0, method="full")
        self.engine = Engine(config)
        self.engine.create_run(CreateRun(request_id="", model_id="run", full=FullConfig()))

    def train(self, data: list[Datum], loss_fn: str) -> float:
        """Run forward, backward and a step. Return the sum of the losses."""
        operation = ForwardBackward(request_id="", model_id="run", data=data, loss_fn=loss_fn)
        (result,) = self.engine.train([operation])
        if isinstance(result, Exception):
            raise result
        params: dict[str, StepField] = {"learning_rate": 0.0, "eps": 1e-8}
        self.engine.optim_step(OptimStep(request_id="", model_id="run", params=params))
        return result.metrics["loss:sum"]
