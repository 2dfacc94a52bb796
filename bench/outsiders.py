"""The peers that are not installed with us, each in an environment and processes of its own: vLLM, TRL and SkyRL.

They get the model files, the adapters and the data of the other contestants. A process is started when it is first
asked, and ends with the contest.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.driver_process import DriverProcess
from bench.environments import SKYRL, TRL, VLLM, Environment
from bench.models import RANK, ModelShape
from bench.peers import BATCH
from bench.timing import PeerFailed
from bench.workloads import group_advantages, samples_as_data
from lorimer.engine.config import Dtype
from lorimer.engine.messages import Datum, SampledSequence

VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "JAX_PLATFORMS": "cpu",
    # Else vLLM leaves a core to others, which the others do not do.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all outsiders of a contest get."""

    shape: ModelShape
    directory: Path
    adapters: Sequence[Path]
    dtype: Dtype
    num_threads: int


@dataclass
class Outsider:
    name: ClassVar[str]
    environment: ClassVar[Environment]
    module: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]] = ()
    """How it can train."""
    can_sample: ClassVar[bool] = False
    can_iterate: ClassVar[bool] = False

    setting: Setting
    _processes: dict[str, DriverProcess | PeerFailed] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The release and dtype, for the table."""
        return f"{self.environment.release} {self.setting.dtype}"

    def process(self, kind: str, **settings: Any) -> DriverProcess:
        """Return the process of this kind, started if need be. Raise the reason each time if it cannot be."""
        if kind not in self._processes:
            try:
                self._processes[kind] = self._start(kind, settings)
            except PeerFailed as error:
                self._processes[kind] = error
        found = self._processes[kind]
        if isinstance(found, PeerFailed):
            raise found
        return found

    def _start(self, kind: str, settings: dict[str, Any]) -> DriverProcess:
        setting = self.setting
        python = self.environment.make()
        common = {"model": str(setting.directory), "dtype": setting.dtype, "num_threads": setting.num_threads}
        log = setting.directory.parent / f"{self.name}-{kind}-{setting.dtype}.log"
        variables = VARIABLES | {"OMP_NUM_THREADS": str(setting.num_threads)} | self.variables()
        return DriverProcess(python, self.module, log, variables, common | settings)

    def variables(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        """End the processes. What could not be started is not tried again."""
        for kind, process in list(self._processes.items()):
            if isinstance(process, DriverProcess):
                process.close()
                del self._processes[kind]

    def train(self, data: list[Datum], loss_fn: str, layout: str) -> float:
        """Run forward, backward and a step. Return the sum of the losses."""
        raise NotImplementedError

    def sample(
        self, prompts: list[np.ndarray], num_samples: int, num_new: int, adapters: list[int] | None
    ) -> list[list[SampledSequence]]:
        """Return the samples of each prompt; ``adapters`` has the number of the adapter of each."""
        raise NotImplementedError

    def warm_up_tokens(self, num_new: int) -> int:
        """Return how many tokens to sample before the first round."""
        return num_new

    def iterate(self, prompts: list[np.ndarray], num_samples: int, num_new: int, seed: int) -> float:
        """Sample, train on the samples, publish. Return the relative error of the loss against a ratio of 1."""
        raise NotImplementedError


class Vllm(Outsider):
    """Two engines, because the one with adapters samples the base slowly."""

    name, environment, module = "vLLM", VLLM, "bench.drivers.vllm_driver"
    can_sample = True

    def variables(self) -> dict[str, str]:
        """vLLM's documentation asks for its OpenMP library, which is in its environment, to be loaded first."""
        library = self.environment.directory / "lib" / "libiomp5.so"
        return {"LD_PRELOAD": str(library)} if library.exists() else {}

    def sample(
        self, prompts: list[np.ndarray], num_samples: int, num_new: int, adapters: list[int] | None
    ) -> list[list[SampledSequence]]:
        setting = self.setting
        process = self.process(
            "base" if adapters is None else "adapters",
            adapters=[] if adapters is None else [str(path) for path in setting.adapters],
            rank=RANK,
            is_compiled=setting.shape.is_worth_compiling,
        )
        return _sample(process, prompts, num_samples, num_new, adapters)

    def warm_up_tokens(self, num_new: int) -> int:
        """All shapes of the batch occur, and memory of the cache is allocated before: a few steps will do."""
        return max(1, num_new // 8)


class Trl(Outsider):
    name, environment, module = "TRL", TRL, "bench.drivers.trl_driver"
    layouts = ("padded", "micro-batch 1")
    can_iterate = True

    def _trainer(self) -> DriverProcess:
        setting = self.setting
        return self.process("trainer", adapter=str(setting.adapters[0]), vocab_size=setting.shape.vocab_size)

    def train(self, data: list[Datum], loss_fn: str, layout: str) -> float:
        batch_size = 1 if layout == "micro-batch 1" else min(BATCH, len(data))
        texts = [np.append(datum.tokens, datum.loss_fn_inputs["target_tokens"][-1]) for datum in data]
        if loss_fn == "cross_entropy":
            return self._trainer().ask("sft", sequences=_lists(texts), batch_size=batch_size)
        assert loss_fn == "importance_sampling"
        kept = [datum.loss_fn_inputs["advantages"] != 0 for datum in data]
        return self._trainer().ask(
            "grpo",
            prompts=_lists(text[: -int(mask.sum())] for text, mask in zip(texts, kept, strict=True)),
            completions=_lists(text[-int(mask.sum()) :] for text, mask in zip(texts, kept, strict=True)),
            logprobs=_lists(datum.loss_fn_inputs["logprobs"][mask] for datum, mask in zip(data, kept, strict=True)),
            advantages=[float(datum.loss_fn_inputs["advantages"][-1]) for datum in data],
            batch_size=batch_size,
        )

    def iterate(self, prompts: list[np.ndarray], num_samples: int, num_new: int, seed: int) -> float:
        """Return 0, or infinity if it samples another number of tokens: TRL has no logprobs of its sampler."""
        num_sampled = self._trainer().ask("iterate", prompts=_lists(prompts), num_samples=num_samples, num_new=num_new)
        return 0.0 if num_sampled == len(prompts) * num_samples * num_new else float("inf")


class Skyrl(Outsider):
    """Two engines: the more adapters one has room for, the slower it trains."""

    name, environment, module = "SkyRL tx", SKYRL, "bench.drivers.skyrl_driver"
    layouts = ("padded",)
    can_sample = can_iterate = True

    def _engine(self, num_adapters: int = 1) -> DriverProcess:
        setting = self.setting
        return self.process(
            f"{num_adapters}",
            adapters=[str(path) for path in setting.adapters[:num_adapters]],
            rank=RANK,
            vocab_size=setting.shape.vocab_size,
            micro_batch_size=BATCH,
        )

    def train(self, data: list[Datum], loss_fn: str, layout: str) -> float:
        return self._engine().ask("train", data=[_as_json(datum) for datum in data], loss_fn=loss_fn)

    def sample(
        self, prompts: list[np.ndarray], num_samples: int, num_new: int, adapters: list[int] | None
    ) -> list[list[SampledSequence]]:
        engine = self._engine(len(self.setting.adapters) if adapters and max(adapters) > 0 else 1)
        return _sample(engine, prompts, num_samples, num_new, adapters)

    def iterate(self, prompts: list[np.ndarray], num_samples: int, num_new: int, seed: int) -> float:
        groups = self.sample(prompts, num_samples, num_new, [0] * len(prompts))
        advantages = group_advantages(len(prompts), num_samples, seed)
        found = [samples_as_data(*group) for group in zip(prompts, groups, advantages, strict=True)]
        loss = self.train(list(itertools.chain(*found)), "importance_sampling", "padded")
        self._engine().ask("publish")
        return abs(loss + num_new * advantages.sum()) / float(num_new * np.abs(advantages).sum())


OUTSIDERS: tuple[type[Outsider], ...] = (Vllm, Trl, Skyrl)


def _sample(
    process: DriverProcess, prompts: list[np.ndarray], num_samples: int, num_new: int, adapters: list[int] | None
) -> list[list[SampledSequence]]:
    groups = process.ask("sample", prompts=_lists(prompts), num_samples=num_samples, num_new=num_new, adapters=adapters)
    return [
        [SampledSequence(tokens=np.array(t), logprobs=np.array(p), stop_reason="length") for t, p in group]
        for group in groups
    ]


def _as_json(datum: Datum) -> dict[str, Any]:
    """Return a datum with all inputs, as SkyRL wants them; the weights of RL are 1 where there is an advantage."""
    inputs = datum.loss_fn_inputs
    zeros = np.zeros(len(datum.tokens), np.float32)
    found = {name: inputs.get(name, zeros) for name in ("target_tokens", "logprobs", "advantages")}
    found["weights"] = inputs["weights"] if "weights" in inputs else (inputs["advantages"] != 0).astype(np.float32)
    return {name: values.tolist() for name, values in found.items()} | {"tokens": datum.tokens.tolist()}


def _lists(rows: Any) -> list[list[Any]]:
    return [np.asarray(row).tolist() for row in rows]
