"""Runs Lorimer's engine in this process, through its commands.

Steps use a learning rate of 0, which costs the same as any other and leaves the weights unchanged. So every repetition
on both sides computes the same loss, and the rows check that.
"""

import itertools
import sys
from pathlib import Path

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
        for run in self.runs:
            self.engine.create_run(CreateRun(request_id="", model_id=run, lora=LoraConfig(rank=RANK, seed=0)))
            if adapter.exists():
                self.engine.load_state(LoadState(request_id="", model_id=run, directory=str(adapter)))
        if not adapter.exists():
            self._make_adapter(adapter)
        self.sampler_id = self._publish()

    def _make_adapter(self, directory: Path) -> None:
        """Take one real step, so that B is not zero, and save the adapter for all contestants."""
        (run,) = self.runs
        self.train({run: sft_data([32, 32], self.engine.model.vocab_size, seed=1)}, "cross_entropy", learning_rate=1e-2)
        command = SaveState(request_id="", model_id=run, directory=str(directory), weights_only=True)
        self.engine.save_state(command)

    def train(self, batches: dict[str, list[Datum]], loss_fn: str, learning_rate: float = 0.0) -> float:
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
            self.engine.optim_step(
                OptimStep(request_id=run, model_id=run, params={"learning_rate": learning_rate, "eps": 1e-8})
            )
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
        sampler_id = self.sampler_id if with_adapter else None
        params = SamplingParams(max_tokens=num_new, stop=[], seed=next(self._numbers))
        for i, prompt in enumerate(prompts):
            request = SampleRequest(
                request_id=str(i), prompt=prompt, sampler_id=sampler_id, num_samples=num_samples, params=params
            )
            self.engine.add_sample(request)
        found: dict[str, list[SampledSequence]] = {}
        while not self.engine.sampler.is_idle:
            for reply in self.engine.sampler.step():
                if isinstance(reply, Failed):
                    raise RuntimeError(reply.error)
                if isinstance(reply, Done) and isinstance(reply.result, SampleResult):
                    found[reply.request_id] = reply.result.sequences
        return [found[str(i)] for i in range(len(prompts))]

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

    def _publish(self) -> str:
        sampler_id = f"sampler-{next(self._numbers)}"
        self.engine.publish_sampler(PublishSampler(request_id="", model_id=self.runs[0], sampler_id=sampler_id))
        return sampler_id


class FullLorimer:
    """One engine with one run that trains all weights of the model."""

    def __init__(self, directory: Path, num_threads: int) -> None:
        config = EngineConfig(model=str(directory), dtype="float32", num_threads=num_threads, seed=0, method="full")
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
