"""Check that a merged model is exactly its base plus the adapter.

Two checks: plain transformers with the sum of base and adapter computes on random sequences what the engine computes
with the two; and every parameter of the written directory is that sum, except for the rounding of its dtype. The effect
of rounding on log probabilities is reported, not judged. One or two models are open at a time, in float32 if that fits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from lorimer.engine.adapters.adapters import freeze
from lorimer.engine.model.attention import group_sequences
from lorimer.engine.model.base_model import load_model
from lorimer.engine.model.device import Device, free_bytes
from lorimer.engine.model.head import Head
from lorimer.engine.model.vision import model_class
from lorimer.engine.training.batch import AdapterSlice, Pass
from lorimer.errors import CheckpointError, InvalidInput
from lorimer.models.export.merging import LoadedAdapter

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.25}
"""Largest difference of a log probability that computing in the dtype explains."""
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}
"""Largest relative difference of a number that storing it in the dtype explains."""
_LEAST = 1e-7
_LENGTHS = (33, 17, 9)
_COPIES = 3
"""The engine keeps a weight in several layouts; the comparison has two models open."""

Allowed = Callable[[Tensor], Tensor]
"""Maps the intended numbers to the largest difference of each that rounding explains."""


@dataclass(frozen=True)
class Comparison:
    """Largest differences of a log probability to the base with its adapter."""

    difference: float
    """Difference of the written model, rounding included."""
    unrounded: float
    """Difference of the sum of base and adapter before rounding."""
    effect: float
    """Difference of the base alone."""


def check_merged(
    adapter: LoadedAdapter, base: Path, merged: Path, dtypes: set[torch.dtype], progress: Callable[[str, None], None]
) -> Comparison:
    """Compare the two; raise `CheckpointError` if they differ by more than rounding to ``dtypes``."""
    dtype = _computing_dtype(sum(p.numel() for p in adapter.model.parameters()))
    sequences = random_sequences(adapter.model)
    progress("computing with the adapter", None)
    device = Device(torch.device("cpu"), dtype, free_bytes(torch.device("cpu")))
    alone, adapted = _engine_logprobs(adapter, base, sequences, device)
    progress("computing with the merged model", None)
    exact = _sum_in_memory(adapter, base, dtype)
    written = open_model(merged, dtype)
    rounding = max(ROUNDING[each] for each in dtypes)
    compare_parameters(exact, written, lambda numbers: rounding * numbers.abs() + _LEAST)
    unrounded, difference, effect = (
        (adapted - other).abs().max().item()
        for other in (logprobs(exact, sequences), logprobs(written, sequences), alone)
    )
    if not unrounded <= TOLERANCE[dtype]:
        raise CheckpointError(
            f"the merged model differs from its base with the adapter by {unrounded:.3g} in log probability, where"
            f" computing explains {TOLERANCE[dtype]:g} (the adapter's effect is {effect:.3g}); nothing was written"
        )
    return Comparison(difference, unrounded, effect)


def compare_parameters(meant: nn.Module, written: nn.Module, allowed: Allowed) -> None:
    """Raise `CheckpointError` unless both have the same parameters, within ``allowed``."""
    ours, theirs = (dict(model.named_parameters(remove_duplicate=False)) for model in (meant, written))
    if ours.keys() != theirs.keys():
        raise CheckpointError(f"the written model has other weights: {sorted(ours.keys() ^ theirs.keys())[0]!r}")
    for name, numbers in ours.items():
        excess = (theirs[name].float() - numbers.float()).abs() - allowed(numbers.float())
        if not excess.max() <= 0:
            raise CheckpointError(
                f"the written weight {name!r} is off by {excess.max().item():.3g} more than rounding explains;"
                " nothing was written"
            )


def _computing_dtype(num_parameters: int) -> torch.dtype:
    free = free_bytes(torch.device("cpu"))
    needed = {dtype: _COPIES * num_parameters * dtype.itemsize for dtype in TOLERANCE}
    for dtype, num_bytes in needed.items():
        if num_bytes < free:
            return dtype
    raise InvalidInput(
        f"checking the merged model takes {min(needed.values()) / 1e9:.0f} GB of memory and {free / 1e9:.0f} are free;"
        " --no-check writes it unchecked"
    )


@torch.no_grad()
def _engine_logprobs(
    adapter: LoadedAdapter, base: Path, sequences: list[Tensor], device: Device
) -> tuple[Tensor, Tensor]:
    """Return log probabilities of the base alone and with the adapter, one row for each token."""
    model = load_model(base, device, base.name)
    head = Head(model)
    lengths = [len(sequence) for sequence in sequences]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    positions = torch.cat([torch.arange(length) for length in lengths])
    found = []
    frozen = freeze(adapter.pairs, adapter.config, model.rows)
    whole = AdapterSlice(0, sum(lengths), frozen.weights, frozen.scale, row_scales=frozen.row_scales)
    for slices in ([], [whole]):
        current = Pass(slices, groups=group_sequences(lengths, starts, device.handle))
        hidden = model.hidden(torch.cat(sequences), positions, current)
        found.append(head.logits(hidden, slices).log_softmax(-1))
    return found[0], found[1]


@torch.no_grad()
def _sum_in_memory(adapter: LoadedAdapter, base: Path, dtype: torch.dtype) -> Any:
    """Open the base in plain transformers and add the adapter's changes to its parameters."""
    model = open_model(base, dtype)
    for weight in adapter.by_weight:
        owner, _, name = weight.rpartition(".")
        module = model.get_submodule(owner)
        # A new parameter, so that an embedding it was tied to stays as it is.
        merged = adapter.apply(weight, getattr(module, name)).to(dtype)
        setattr(module, name, nn.Parameter(merged, requires_grad=False))
    return model


def open_model(directory: Path, dtype: torch.dtype) -> Any:
    """Open the model of a directory in plain transformers; refuse it if weights are missing."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    opened: Any = model_class(config, str(directory)).from_pretrained(
        directory,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        attn_implementation="eager",
        output_loading_info=True,
    )
    model, loading = opened
    if missing := sorted(loading["missing_keys"]):
        raise CheckpointError(f"{str(directory)!r} lacks {missing[0]!r} ({len(missing)} weights are missing)")
    return model.requires_grad_(False)


def random_sequences(model: Any) -> list[Tensor]:
    """Return a few sequences of token ids of the model's vocabulary."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    return [torch.randint(vocab_size, (length,), generator=generator) for length in _LENGTHS]


@torch.no_grad()
def logprobs(model: Any, sequences: list[Tensor]) -> Tensor:
    """Return log probabilities, one row for each token, computing each sequence alone."""
    rows = [model(input_ids=sequence[None], use_cache=False).logits[0].float() for sequence in sequences]
    return torch.cat(rows).log_softmax(-1)
