"""What is checked, and chosen, before a request is committed."""

import json
import secrets
from typing import Any

from lorimer import types
from lorimer.errors import InvalidInput, Unsupported
from lorimer.store.runs import Run
from lorimer.store.weights import Weights

MAX_RANK = 512
"""The engine's own limit, repeated here so that a larger rank is refused immediately."""


def check_seq_id(seq_id: int) -> int:
    if not 1 <= seq_id < 2**31:
        raise InvalidInput(f"seq_id is {seq_id}; 1 to 2**31 - 1 is accepted")
    return seq_id


def check_rank(rank: int) -> int:
    if not 1 <= rank <= MAX_RANK:
        raise InvalidInput(f"lora_config.rank is {rank}; 1 to {MAX_RANK} is accepted")
    return rank


def choose_seed(seed: int | None) -> int:
    """Choose the seed of a run's weights. It is chosen here so that a replay uses the same."""
    if seed is None:
        return secrets.randbits(62)
    if not 0 <= seed < 2**63:
        raise InvalidInput(f"lora_config.seed is {seed}; 0 to 2**63 - 1 is accepted")
    return seed


def metadata(values: dict[str, Any] | None) -> dict[str, str]:
    """Return metadata as clients read it back: every value a string."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in (values or {}).items()}


def check_optimizer_state(weights: Weights, optimizer: bool) -> None:
    if optimizer and not weights.has_optimizer:
        raise InvalidInput("these weights were saved for sampling and hold no optimizer state; load them without it")


def check_fits(run: Run, weights: Weights) -> None:
    for name in ("base_model", "rank", "train_attn", "train_mlp", "train_unembed"):
        theirs, ours = getattr(weights, name), getattr(run, name)
        if theirs != ours:
            raise InvalidInput(f"the weights have {name} {theirs!r}, the run {ours!r}; make a new run from the weights")


def check_sample(request: types.SampleRequest) -> None:
    if request.record_stability_info:
        raise Unsupported("record_stability_info is not supported: 'stable_reinforce', which needs it, is not")
    for chunk in request.prompt.chunks:
        if chunk.type not in ("encoded_text", "image"):
            raise Unsupported(f"prompt has a chunk of type {chunk.type!r}; accepted are text and images")
