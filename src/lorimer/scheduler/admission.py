"""What is checked, and chosen, before a request is committed."""

import json
import secrets
from collections.abc import Collection
from typing import Any

from lorimer import types
from lorimer.errors import InvalidInput
from lorimer.store.runs import Run, RunValues
from lorimer.store.weights import Weights

GROUPS = ("attn", "mlp", "unembed", "embed", "norms")
"""What a run may train; adapters have the first three."""
FULL_SUFFIX = ":full"
"""After the name of a base model, it asks for a full run; for clients that can only ask for an adapter."""
MAX_RANK = 512
"""The engine's own limit, repeated here so that a larger rank is refused immediately."""


def check_rank(rank: int) -> int:
    if not 1 <= rank <= MAX_RANK:
        raise InvalidInput(f"lora_config.rank is {rank}; 1 to {MAX_RANK} is accepted")
    return rank


def full_config(request: types.CreateModelRequest, served: Collection[str]) -> tuple[str, types.FullConfig | None]:
    """Return the base model of a new run, and what it trains if it is a full run."""
    name, lora, full = request.base_model, request.lora_config, request.full_config
    if full is not None and lora is not None:
        raise InvalidInput("lora_config and full_config are both given; a run has one of them")
    if full is None and name not in served and name.endswith(FULL_SUFFIX):
        name, lora = name.removesuffix(FULL_SUFFIX), lora or types.LoraConfig(rank=1)
        full = types.FullConfig(
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
            train_embed=lora.train_unembed,
        )
    if full is not None and not any(getattr(full, f"train_{group}") for group in GROUPS):
        raise InvalidInput(f"{', '.join(f'train_{group}' for group in GROUPS)} are all false; at least one is needed")
    return name, full


def values_of_request(request: types.CreateModelRequest, served: Collection[str]) -> RunValues:
    """Return the parameters of a new run."""
    base_model, full = full_config(request, served)
    user_metadata, optimizer_type = metadata(request.user_metadata), request.optimizer_config.type
    if full is not None:
        return RunValues(
            base_model=base_model,
            rank=0,
            seed=0,
            **full.model_dump(),
            user_metadata=user_metadata,
            optimizer_type=optimizer_type,
            method="full",
        )
    lora = request.lora_config or types.LoraConfig(rank=32)
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise InvalidInput("train_attn, train_mlp and train_unembed are all false; at least one is needed")
    return RunValues(
        base_model=base_model,
        rank=check_rank(lora.rank),
        seed=choose_seed(lora.seed),
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        user_metadata=user_metadata,
        optimizer_type=optimizer_type,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
    )


def values_of_weights(request: types.LoadWeightsRequest, weights: Weights) -> RunValues:
    """Return the parameters of a new run with the shape of saved weights."""
    named = request.base_model
    if named is not None and weights.method == "full":
        named = named.removesuffix(FULL_SUFFIX)
    if named is not None and named != weights.base_model:
        raise InvalidInput(f"base_model {request.base_model!r} is not that of the weights, {weights.base_model!r}")
    chosen = weights.optimizer_type if request.optimizer else "adamw"
    if request.optimizer_config is not None:
        chosen = request.optimizer_config.type
    check_optimizer_state(weights, request.optimizer, chosen)
    return RunValues(
        base_model=weights.base_model,
        rank=weights.rank,
        seed=choose_seed(None),
        train_attn=weights.train_attn,
        train_mlp=weights.train_mlp,
        train_unembed=weights.train_unembed,
        train_embed=weights.train_embed,
        train_norms=weights.train_norms,
        use_rslora=weights.use_rslora,
        use_dora=weights.use_dora,
        method=weights.method,
        user_metadata=metadata(request.user_metadata),
        optimizer_type=chosen,
    )


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


def check_optimizer_state(weights: Weights, optimizer: bool, optimizer_type: str) -> None:
    """Refuse to restore a state that was not saved, or that is of another optimizer than the run's."""
    if optimizer and not weights.has_optimizer:
        raise InvalidInput("these weights were saved for sampling and hold no optimizer state; load them without it")
    if optimizer and weights.optimizer_type != optimizer_type:
        raise InvalidInput(
            f"the saved optimizer state is of {weights.optimizer_type!r}, the run's optimizer is {optimizer_type!r};"
            " load the weights without it"
        )


def check_fits(run: Run, weights: Weights) -> None:
    for name in ("base_model", "method", "rank", "use_rslora", "use_dora", *(f"train_{group}" for group in GROUPS)):
        theirs, ours = getattr(weights, name), getattr(run, name)
        if theirs != ours:
            raise InvalidInput(f"the weights have {name} {theirs!r}, the run {ours!r}; make a new run from the weights")
