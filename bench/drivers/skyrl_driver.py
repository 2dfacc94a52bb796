"""Trains and samples with the JAX engine of SkyRL (tx): ``python -m bench.drivers.skyrl_driver`` where it is installed.

Calls the engine's backend as its Tinker server does, without the server and its polling.
"""

import json
import tarfile
import tempfile
import typing
from pathlib import Path
from typing import Any

import typing_extensions
from cloudpathlib import AnyPath

from bench.drivers.lines import serve
from bench.drivers.tokenizer import make_tokenizer

# SkyRL 0.3 gives pydantic the class of ``typing``, which pydantic accepts from Python 3.12 on.
typing.TypedDict = typing_extensions.TypedDict
from skyrl.backends.jax import JaxBackend, JaxBackendConfig  # noqa: E402
from skyrl.tinker import types  # noqa: E402

LOADED = "loaded"


class Skyrl:
    """One backend with a model for each adapter."""

    def __init__(
        self,
        model: str,
        adapters: list[str],
        dtype: str,
        num_threads: int,
        rank: int,
        vocab_size: int,
        micro_batch_size: int,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        root, self._numbers = Path(self._folder.name), 0
        directory = _with_tokenizer(Path(model), root / "model", dtype, vocab_size)
        # Slot 0 is the base.
        config = JaxBackendConfig(
            max_lora_adapters=len(adapters) + 1, max_lora_rank=rank, train_micro_batch_size=micro_batch_size
        )
        self._backend = JaxBackend(str(directory), config)
        self._models = [f"model-{i}" for i in range(len(adapters))]
        for name, adapter in zip(self._models, adapters, strict=True):
            alpha = json.loads((Path(adapter) / "adapter_config.json").read_text("utf-8"))["lora_alpha"]
            self._backend.create_model(name, types.LoraConfig(rank=rank, alpha=alpha, seed=0))
            self._load(name, _packed(Path(adapter), root / f"{name}.tar.gz"))

    def train(self, data: list[dict[str, list[Any]]], loss_fn: str) -> float:
        """Run forward, backward and a step of the first model. Return the sum of the losses."""
        name = self._models[0]
        batch = types.PreparedModelPassBatch(
            all_model_inputs=[_input(datum["tokens"]) for datum in data],
            all_targets=[datum["target_tokens"] for datum in data],
            all_token_weights=[datum["weights"] for datum in data],
            all_sampling_logprobs=[datum["logprobs"] for datum in data],
            all_advantages=[datum["advantages"] for datum in data],
            all_values=[[] for _ in data],
            all_returns=[[] for _ in data],
            all_model_ids=[name] * len(data),
            all_loss_fns=[loss_fn] * len(data),
            all_loss_fn_configs=[None] * len(data),
            request_batch_slices=[("request", name, 0, len(data))],
        )
        output = self._backend.forward_backward(batch)["request"]
        adam = types.AdamParams(learning_rate=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
        self._backend.optim_step(name, types.OptimStepInput(adam_params=adam))
        return sum(sum(found["elementwise_loss"]["data"]) for found in output.loss_fn_outputs)

    def sample(
        self, prompts: list[list[int]], num_samples: int, num_new: int, adapters: list[int] | None
    ) -> list[list[tuple[list[int], list[float]]]]:
        """Return the tokens and logprobs of the samples of each prompt; ``adapters`` has the adapter of each."""
        names = [""] * len(prompts) if adapters is None else [self._models[number] for number in adapters]
        rows = [(prompt, name) for prompt, name in zip(prompts, names, strict=True) for _ in range(num_samples)]
        self._numbers += 1
        params = [
            types.SamplingParams(temperature=1.0, max_tokens=num_new, seed=self._numbers * len(rows) + number)
            for number in range(len(rows))
        ]
        starts = range(0, len(rows), num_samples)
        batch = types.PreparedSampleBatch(
            all_model_inputs=[_input(prompt) for prompt, _ in rows],
            all_sampling_params=params,
            all_model_ids=[name for _, name in rows],
            all_checkpoint_ids=[LOADED if name else "" for _, name in rows],
            all_checkpoint_paths=["" for _ in rows],
            all_session_ids=[None for _ in rows],
            needs_prompt_logprobs=False,
            request_batch_slices=[(str(start), rows[start][1], start, start + num_samples, False) for start in starts],
        )
        found = self._backend.sample(batch)
        return [[(one.tokens, one.logprobs) for one in found[str(start)].sequences] for start in starts]

    def publish(self) -> None:
        """Save the weights of the first model for sampling, and load them."""
        path = Path(self._folder.name) / "published.tar.gz"
        self._backend.save_sampler_checkpoint(AnyPath(path), self._models[0])
        self._load(self._models[0], path)

    def _load(self, name: str, path: Path) -> None:
        self._backend.load_sampler_checkpoint(name, LOADED, AnyPath(path))


def _input(tokens: list[int]) -> Any:
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens)])


def _with_tokenizer(model: Path, directory: Path, dtype: str, vocab_size: int) -> Path:
    """Return a directory with the files of the model, a tokenizer, and the dtype, which SkyRL takes from the config."""
    directory.mkdir()
    for file in model.glob("*.safetensors"):
        (directory / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text("utf-8")) | {"dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    make_tokenizer(vocab_size).save_pretrained(directory)
    return directory


def _packed(adapter: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz", compresslevel=0) as packed:
        packed.add(adapter, arcname="")
    return archive


if __name__ == "__main__":
    serve(Skyrl)
