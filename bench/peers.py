"""Runs the peers: plain transformers with PEFT, in the common variants.

``Peft`` trains an adapter, ``Plain`` all weights. Training runs the model's own forward over padded batches of 8 (as in
TRL), over packed rows with a block-diagonal mask, or over one sequence at a time; sampling is ``generate``. In bfloat16
the adapter is bfloat16 too, which avoids the casts of PEFT's default but rounds small updates away. The learning rate
is 0, as on our side.

Legend: N sequences, T positions, V vocabulary.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.workloads import group_advantages, samples_as_data
from lorimer.engine.messages import Datum, SampledSequence

Layout = Literal["padded", "packed", "micro-batch 1", "completions"]
"""``completions`` is padded and computes logits of the completions only, as TRL does for GRPO."""
BATCH = 8


@dataclass(frozen=True)
class Batch:
    """Arguments of one forward pass, and the loss inputs of each logit; 0 at padding."""

    arguments: dict[str, Any]
    inputs: dict[str, Tensor]


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """PEFT warns about tied embeddings; the adapter of the head is not meant to change the embedding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


class Peft:
    """One model with the adapter in ``adapter``."""

    def __init__(self, directory: Path, adapter: Path, dtype: str) -> None:
        self._directory, self._dtype = directory, getattr(torch, dtype)
        with _without_warnings():
            self.model = PeftModel.from_pretrained(
                self._open(), str(adapter), is_trainable=True, autocast_adapter_dtype=False
            ).eval()
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = _adamw(weights)
        self._plain: Any = None
        self._many: Any = None

    def _open(self) -> Any:
        return _open(self._directory, self._dtype)

    def train(self, data: list[Datum], loss_fn: str, layout: Layout) -> float:
        """Run forward, backward and a step. Return the sum of the losses."""
        return _train(self.model, self._optimizer, data, loss_fn, layout, self._dtype)

    def sample(self, prompts: list[np.ndarray], num_samples: int, num_new: int, with_adapter: bool) -> np.ndarray:
        """Return new tokens, ``(prompts * samples, num_new)``, without logprobs, which our side always computes."""
        if not with_adapter and self._plain is None:
            self._plain = self._open()
        model = self.model if with_adapter else self._plain
        tokens = _generate(model, prompts, num_samples, num_new).sequences
        return tokens[:, len(prompts[0]) :].numpy()

    def sample_with(self, prompts: list[np.ndarray], num_new: int, adapters: Sequence[Path]) -> np.ndarray:
        """Sample each prompt once, with an adapter of its own, all in one batch."""
        with _without_warnings():
            if self._many is None:
                self._many = PeftModel.from_pretrained(self._open(), str(adapters[0]), adapters[0].name).eval()
            for adapter in adapters:
                if adapter.name not in self._many.peft_config:
                    self._many.load_adapter(str(adapter), adapter.name)
        found = _generate(self._many, prompts, 1, num_new, adapter_names=[adapter.name for adapter in adapters])
        return found.sequences[:, len(prompts[0]) :].numpy()

    def iterate(self, prompts: list[np.ndarray], num_samples: int, num_new: int, seed: int) -> float:
        """Generate and train on the samples. Return the relative error of the loss against a ratio of 1."""
        output = _generate(self.model, prompts, num_samples, num_new, output_logits=True)
        tokens = output.sequences[:, len(prompts[0]) :]
        steps = [
            logits.float().log_softmax(-1).gather(1, tokens[:, i : i + 1]) for i, logits in enumerate(output.logits)
        ]
        logprobs = torch.cat(steps, 1).numpy()
        advantages = group_advantages(len(prompts), num_samples, seed)
        data = []
        for i, prompt in enumerate(prompts):
            rows = range(i * num_samples, (i + 1) * num_samples)
            samples = [
                SampledSequence(tokens=tokens[row].numpy(), logprobs=logprobs[row], stop_reason="length")
                for row in rows
            ]
            data += samples_as_data(prompt, samples, advantages[i])
        loss = self.train(data, "importance_sampling", "completions")
        return abs(loss + num_new * advantages.sum()) / float(num_new * np.abs(advantages).sum())


class Plain:
    """One model, all of whose weights are trained.

    Weights, gradients and moments are float32 in any dtype, as on our side; bfloat16 is torch's autocast.
    """

    def __init__(self, directory: Path, dtype: str) -> None:
        self._dtype = getattr(torch, dtype)
        self.model = _open(directory, torch.float32)
        self._optimizer = _adamw(list(self.model.parameters()))

    def train(self, data: list[Datum], loss_fn: str, layout: Layout) -> float:
        """Run forward, backward and a step. Return the sum of the losses."""
        with torch.autocast("cpu", self._dtype, enabled=self._dtype is not torch.float32):
            return _train(self.model, self._optimizer, data, loss_fn, layout, self._dtype)


def _open(directory: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    ).eval()


def _adamw(weights: Sequence[Tensor]) -> torch.optim.AdamW:
    return torch.optim.AdamW(weights, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def _train(
    model: Any, optimizer: torch.optim.AdamW, data: list[Datum], loss_fn: str, layout: Layout, dtype: torch.dtype
) -> float:
    total = 0.0
    for batch in _batches(data, layout, dtype):
        logits_TV = model(**batch.arguments, use_cache=False).logits.flatten(0, 1)
        loss = _loss(logits_TV, batch.inputs, loss_fn)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


@torch.no_grad()
def _generate(
    model: Any,
    prompts: list[np.ndarray],
    num_samples: int,
    num_new: int,
    *,
    output_logits: bool = False,
    **arguments: list[str],
) -> Any:
    tokens = torch.from_numpy(np.stack(prompts))
    # All prompts of a call have the same length, so nothing is padded.
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=num_new,
        num_return_sequences=num_samples,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=output_logits,
    )
    mask = torch.ones_like(tokens)
    return model.generate(input_ids=tokens, attention_mask=mask, generation_config=config, **arguments)


def _loss(logits_TV: Tensor, inputs: dict[str, Tensor], loss_fn: str) -> Tensor:
    nll_T = F.cross_entropy(logits_TV.float(), inputs["target_tokens"], reduction="none")
    if loss_fn == "cross_entropy":
        return (inputs["weights"] * nll_T).sum()
    assert loss_fn == "importance_sampling"
    return -(torch.exp(-nll_T - inputs["logprobs"]) * inputs["advantages"]).sum()


def _batches(data: list[Datum], layout: Layout, dtype: torch.dtype) -> Iterator[Batch]:
    size = 1 if layout == "micro-batch 1" else BATCH
    for start in range(0, len(data), size):
        part = data[start : start + size]
        yield _packed(part, dtype) if layout == "packed" else _padded(part, only_completions=layout == "completions")


def _padded(data: list[Datum], only_completions: bool) -> Batch:
    """Pad on the right. If all sequences have the same length, omit the mask."""
    tokens_NT = _stack([datum.tokens for datum in data])
    lengths = torch.tensor([len(datum.tokens) for datum in data])
    inputs = {name: _stack([d.loss_fn_inputs[name] for d in data]) for name in data[0].loss_fn_inputs}
    arguments: dict[str, Any] = {"input_ids": tokens_NT}
    if bool((lengths != lengths[0]).any()):
        arguments["attention_mask"] = (torch.arange(tokens_NT.shape[1]) < lengths[:, None]).long()
    if only_completions:
        kept = int((inputs["advantages"] != 0).sum(1).max())
        arguments["logits_to_keep"] = kept
        inputs = {name: values[:, -kept:] for name, values in inputs.items()}
    return Batch(arguments, {name: values.flatten() for name, values in inputs.items()})


def _packed(data: list[Datum], dtype: torch.dtype) -> Batch:
    """Pack all sequences into one row: positions restart, and attention stays within each sequence."""
    lengths = torch.tensor([len(datum.tokens) for datum in data])
    owner_T = torch.repeat_interleave(torch.arange(len(data)), lengths)
    is_seen_TT = (owner_T[:, None] == owner_T).tril()
    mask_TT = torch.zeros(is_seen_TT.shape, dtype=dtype).masked_fill_(~is_seen_TT, -torch.inf)
    arguments = {
        "input_ids": torch.from_numpy(np.concatenate([datum.tokens for datum in data]))[None],
        "position_ids": torch.cat([torch.arange(int(n)) for n in lengths])[None],
        "attention_mask": mask_TT[None, None],
    }
    names = data[0].loss_fn_inputs
    return Batch(arguments, {n: torch.from_numpy(np.concatenate([d.loss_fn_inputs[n] for d in data])) for n in names})


def _stack(rows: list[np.ndarray]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True)
