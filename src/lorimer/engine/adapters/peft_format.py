"""The form in which PEFT stores an adapter: names and shapes of its tensors, and its configuration.

PEFT has one pair for each stored weight. Parts of a fused weight are stacked into one pair of ``k * rank`` whose B
is block-diagonal, and ``alpha`` grows with it so that the scale stays. Experts become ``target_parameters``, with
their shared factor repeated for each expert. Reading undoes both, and also takes a plain pair over a fused weight;
pairs of different ranks become pairs of the highest by zeros, which get no gradient and so stay zeros. The magnitudes
of DoRA belong to rows, so those of the parts stand one after the other.
The merge tool of Tinker's cookbook reads the same names, save for experts and for a head tied to the embedding, where
it wants names that PEFT does not know. Files are left to `checkpoints`.

Shape letters: R rank of the stored pair, I input features, O output features, E experts.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from lorimer.engine.adapters.adapters import Pairs
from lorimer.engine.adapters.lora import ALPHA, MAX_RANK, LoraTarget, group_of, is_trained, scale_of
from lorimer.engine.messages import LoraConfig
from lorimer.errors import CheckpointError

_PREFIX = "base_model.model."
_PATTERN = re.compile(r"[\w\\.^$-]*(\*[\w\\.^$-]*){0,2}")
"""Accepted keys of ``rank_pattern``: an arbitrary expression from a stranger could take exponential time."""
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
_DORA_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(?:[AB]\.weight|magnitude_vector)")

_FUSED = {"qkv_proj": 3, "gate_up_proj": 2}
"""Parts of fused weights."""
_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that do not change the base model's weights."""

_HARMLESS = frozenset(
    """
    alpha_pattern auto_mapping base_model_name_or_path eva_config exclude_modules fan_in_fan_out inference_mode
    init_lora_weights layers_pattern layers_to_transform lora_alpha lora_dropout megatron_core peft_type peft_version
    qalora_group_size r rank_pattern revision runtime_config target_modules target_parameters task_type use_dora
    use_rslora
    """.split()
)
"""Fields that are read here, or that say nothing about what the tensors mean."""


@dataclass(frozen=True)
class _Weight:
    """One frozen weight that has a pair of its own in PEFT."""

    key: str
    """Where PEFT's pair hangs."""
    path: str
    """The module, or the parameter for stacked experts; ``rank_pattern`` and ``target_*`` speak of this."""
    parts: list[LoraTarget]

    @property
    def num_experts(self) -> int:
        return self.parts[0].num_experts

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)


def _weights(targets: Iterable[LoraTarget], config: LoraConfig) -> list[_Weight]:
    by_module: dict[str, list[LoraTarget]] = defaultdict(list)
    for target in targets:
        if is_trained(target, config):
            by_module[target.module].append(target)
    weights = []
    for module, parts in by_module.items():
        if not parts[0].num_experts:
            weights.append(_Weight(module, module, parts))
            continue
        # PEFT nests one wrapper for each parameter of a module, the first parameter innermost.
        *up, down = parts
        name = "gate_up_proj" if len(up) == 2 else "up_proj"
        weights.append(_Weight(f"{module}.base_layer", f"{module}.{name}", up))
        weights.append(_Weight(module, f"{module}.down_proj", [down]))
    return weights


def to_peft(
    pairs: Mapping[str, tuple[Tensor, ...]], targets: Iterable[LoraTarget], config: LoraConfig, base_model: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of ``adapter_model.safetensors`` and the content of ``adapter_config.json``."""
    targets = list(targets)
    weights = _weights(targets, config)
    tensors = {}
    for weight in weights:
        a, b = _fuse(weight, pairs, config.rank)
        tensors[f"{_PREFIX}{weight.key}.lora_A.weight"] = a
        tensors[f"{_PREFIX}{weight.key}.lora_B.weight"] = b
        if config.use_dora is True:
            magnitudes = [pairs[part.name][2] for part in weight.parts]
            tensors[f"{_PREFIX}{weight.key}.lora_magnitude_vector"] = torch.cat(magnitudes)
    modules, parameters = _target_names(weights, targets, config)
    factors, is_rslora = _factors(weights), config.use_rslora is True
    return tensors, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": is_rslora,
        "use_dora": config.use_dora is True,
        "modules_to_save": None,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "rank_pattern": {pattern: config.rank * factor for pattern, factor in factors.items()},
        "alpha_pattern": {
            pattern: ALPHA * (math.sqrt(factor) if is_rslora else factor) for pattern, factor in factors.items()
        },
    }


def _fuse(weight: _Weight, pairs: Mapping[str, tuple[Tensor, ...]], rank: int) -> tuple[Tensor, Tensor]:
    a, b, *_ = pairs[weight.parts[0].name]
    if len(weight.parts) > 1 or weight.num_experts:
        lead = (weight.num_experts or 1,)
        stacked = [pairs[part.name][0].expand(*lead, -1, -1) for part in weight.parts]
        a = torch.cat(stacked, dim=1).flatten(0, 1)
        b = torch.zeros(*lead, weight.out_features, rank * len(weight.parts), dtype=b.dtype, device=b.device)
        for index, part in enumerate(weight.parts):
            b[:, part.rows, index * rank : (index + 1) * rank] = pairs[part.name][1]
        # PEFT lays B out as (O, R, E) and A as (E, R, I), each flattened to a matrix.
        b = b.permute(1, 2, 0).flatten(1)
    return a.contiguous(), b.contiguous()


def _target_names(weights: list[_Weight], targets: list[LoraTarget], config: LoraConfig) -> tuple[list[str], list[str]]:
    """Return ``target_modules`` and ``target_parameters``: last words of paths, or whole paths if ambiguous."""
    untrained = {_last(target.module) for target in targets if not is_trained(target, config)}
    # A vision tower has layers whose paths end in the same words.
    is_part = any("language_model" in target.module.split(".") for target in targets)
    has_experts = any(weight.num_experts for weight in weights)
    modules, parameters = set(), set()
    for weight in weights:
        if weight.num_experts:
            parameters.add(_last(weight.path, 2))
        elif has_experts and weight.parts[0].group == "mlp":
            # PEFT takes 'gate_proj' and the like of a model with experts to mean the experts.
            parameters.add(f"{weight.path}.weight")
        else:
            modules.add(weight.path if is_part or _last(weight.path) in untrained else _last(weight.path))
    return sorted(modules), sorted(parameters)


def _factors(weights: list[_Weight]) -> dict[str, int]:
    """Return the number of parts of each fused weight, by a pattern with which PEFT finds it."""
    counts: dict[str, set[int]] = defaultdict(set)
    for weight in weights:
        counts[_last(weight.path)].add(len(weight.parts))
    return {
        _last(weight.path) if len(counts[_last(weight.path)]) == 1 else re.escape(weight.path): len(weight.parts)
        for weight in weights
        if len(weight.parts) > 1
    }


def _last(path: str, words: int = 1) -> str:
    return ".".join(path.split(".")[-words:])


def read_lora_config(names: Iterable[str], settings: Mapping[str, Any]) -> LoraConfig:
    """Read rank, scaling and trained groups of a PEFT adapter from the names of its tensors and its configuration."""
    _check_settings(settings)
    paths = _paths(names, settings)
    groups = {group_of(path) or "unembed" for path in paths}
    return LoraConfig(
        rank=_highest_rank(paths, settings),
        train_attn="attn" in groups,
        train_mlp="mlp" in groups,
        train_unembed="unembed" in groups,
        use_rslora=True if settings.get("use_rslora") else msgspec.UNSET,
        use_dora=True if settings.get("use_dora") else msgspec.UNSET,
    )


def _highest_rank(paths: Iterable[str], settings: Mapping[str, Any]) -> int:
    """Return the highest rank of the pairs; a fused weight may have the pairs of its parts side by side."""
    general, found = settings["r"], set()
    for path in paths:
        if path.endswith((".experts", ".experts.base_layer")):
            continue  # they share a factor, which pairs of different ranks cannot
        rank = int(_lookup(settings, "r", path))
        found.add(general if rank == general * _FUSED.get(_last(path), 1) else rank)
    highest = max(found, default=general)
    if not 1 <= highest <= MAX_RANK:
        raise CheckpointError(f"rank_pattern has the rank {highest}; 1 to {MAX_RANK} is accepted")
    return highest


def from_peft(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], targets: Iterable[LoraTarget], config: LoraConfig
) -> Pairs:
    """Convert to float32 pairs of the trained targets; refuse what cannot be expressed exactly as such pairs."""
    _check_settings(settings)
    if bool(settings.get("use_dora")) != (config.use_dora is True):
        raise CheckpointError(
            f"the saved adapter has use_dora={bool(settings.get('use_dora'))}, the run has"
            f" use_dora={config.use_dora is True}"
        )
    weights = _weights(targets, config)
    saved, wanted = _paths(tensors, settings), {weight.key for weight in weights}
    if (rank := _highest_rank(saved, settings)) != config.rank:
        raise CheckpointError(f"the saved adapter has rank {rank}, the run has rank {config.rank}")
    if saved != wanted:
        raise CheckpointError(
            "the saved adapter and the run train different modules;"
            f" only the saved one: {_some(saved - wanted)}; only the run: {_some(wanted - saved)}"
        )
    pairs: Pairs = {}
    for weight in weights:
        a, b = (_tensor(tensors, f"{_PREFIX}{weight.key}.lora_{factor}.weight") for factor in "AB")
        a, b = _check_shapes(weight, a, b)
        b = b * _relative_scale(weight, a.shape[-2], settings, config)
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise CheckpointError(f"the saved factors of {weight.path!r} hold numbers that are not finite")
        for index, part in enumerate(weight.parts):
            pairs[part.name] = _part(weight, part, index, a, b, config.rank)
        if config.use_dora is True:
            magnitudes = _magnitudes(tensors, weight)
            for part in weight.parts:
                pairs[part.name] += (magnitudes[part.rows].clone(),)
    return pairs


def _magnitudes(tensors: Mapping[str, Tensor], weight: _Weight) -> Tensor:
    found = _tensor(tensors, f"{_PREFIX}{weight.key}.lora_magnitude_vector")
    if found.shape != (weight.out_features,):
        raise CheckpointError(
            f"the saved magnitudes of {weight.path!r} have the shape {tuple(found.shape)},"
            f" the run's weight has {weight.out_features} rows"
        )
    if not torch.isfinite(found).all():
        raise CheckpointError(f"the saved magnitudes of {weight.path!r} hold numbers that are not finite")
    return found


def _check_settings(settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(f"the saved adapter is of type {settings.get('peft_type')!r}, only 'LORA' can be loaded")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK or not isinstance(alpha, int | float):
        raise CheckpointError(f"r={rank!r}, lora_alpha={alpha!r}: r must be from 1 to {MAX_RANK}, lora_alpha a number")
    if settings.get("init_lora_weights", True) not in _INITS:
        raise CheckpointError(
            f"init_lora_weights={settings['init_lora_weights']!r} changes the base model, so it cannot be loaded"
        )
    for name, value in settings.items():
        if value and name not in _HARMLESS and not (name == "bias" and value == "none"):
            raise CheckpointError(f"the saved adapter uses {name}={value!r}, which Lorimer does not have")


def _paths(names: Iterable[str], settings: Mapping[str, Any]) -> set[str]:
    paths, key = set(), _DORA_KEY if settings.get("use_dora") else _KEY
    for name in names:
        if (match := key.fullmatch(name)) is None:
            raise CheckpointError(f"the saved adapter holds {name!r}, which is not a LoRA factor of a linear weight")
        paths.add(match[1])
    return paths


def _some(names: set[str]) -> str:
    shown = sorted(names)[:4]
    more = len(names) - len(shown)
    return (", ".join(map(repr, shown)) or "none") + (f" and {more} more" if more else "")


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"the saved adapter lacks {name!r}")
    if not tensors[name].is_floating_point():
        raise CheckpointError(f"{name!r} holds {tensors[name].dtype}, not floating-point numbers")
    return tensors[name].to(torch.float32)


def _check_shapes(weight: _Weight, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape the factors to ``(R, I)`` and ``(O, R)``, with E in front for experts."""
    experts, rows = weight.num_experts or 1, weight.out_features
    width = a.shape[0]
    if a.shape != (width, weight.parts[0].in_features) or b.shape != (rows, width) or width % experts:
        raise CheckpointError(
            f"shapes of {weight.path!r}: the saved factors are {tuple(a.shape)} and {tuple(b.shape)},"
            f" the run's weight needs ({experts} * rank, {weight.parts[0].in_features}) and ({rows}, {experts} * rank)"
        )
    if not weight.num_experts:
        return a, b
    return a.reshape(experts, -1, a.shape[1]), b.reshape(rows, -1, experts).permute(2, 0, 1)


def _relative_scale(weight: _Weight, rank: int, settings: Mapping[str, Any], config: LoraConfig) -> float:
    stated, alpha = (_lookup(settings, field, weight.path) for field in ("r", "lora_alpha"))
    if stated != rank:
        raise CheckpointError(f"adapter_config.json gives {weight.path!r} rank {stated}, its tensors have rank {rank}")
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return scale / scale_of(config)


def _lookup(settings: Mapping[str, Any], field: str, path: str) -> float:
    """Return rank or alpha of one weight: of the first pattern that matches, else the general value."""
    table = "rank_pattern" if field == "r" else "alpha_pattern"
    value = settings[field]
    for pattern, own in (settings.get(table) or {}).items():
        if not _PATTERN.fullmatch(pattern) or not isinstance(own, int | float):
            raise CheckpointError(f"{table} has {pattern!r}: {own!r}; only names with at most two '*' can be read")
        if re.match(rf"(.*\.)?({pattern})$", path):
            value = own
            break
    assert isinstance(value, int | float)
    return value


def _part(weight: _Weight, part: LoraTarget, index: int, a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    own = slice(index * rank, (index + 1) * rank)
    b = b[..., part.rows, :]
    if a.shape[-2] == len(weight.parts) * rank and torch.count_nonzero(b) == torch.count_nonzero(b[..., own]):
        a, b = a[..., own, :], b[..., own]
    elif a.shape[-2] > rank:
        raise CheckpointError(f"{weight.path!r} is saved with rank {a.shape[-2]}, the run has rank {rank}")
    if part.shared:
        shared = a if part.shared == "A" else b
        if not torch.equal(shared, shared[:1].expand_as(shared)):
            raise CheckpointError(
                f"each expert of {weight.path!r} has its own lora_{part.shared}; here the experts of a layer share it"
            )
        a, b = (a[0], b) if part.shared == "A" else (a, b[0])
    missing = rank - a.shape[-2]
    a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    return a.clone(memory_format=torch.contiguous_format), b.clone(memory_format=torch.contiguous_format)
