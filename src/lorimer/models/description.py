"""Describe a base model without loading its weights: its size, what LoRA trains in it, and the memory for that."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from lorimer.engine.adapters.lora import LoraTarget, find_targets, shapes
from lorimer.engine.model.base_model import longest_context, refuse_unpackable
from lorimer.engine.model.quantization import FORMATS, stored_bytes
from lorimer.errors import ModelRefused
from lorimer.models.export.merging import empty_model, is_tied, stored_tensors

RANKS = (1, 8, 16, 32, 64, 128)
_STATES_PER_WEIGHT = 4
"""Numbers that a run keeps per parameter: weight, gradient and the two moments of Adam, float32 each."""
_LAYOUTS = 2
"""On a CPU the engine keeps each matrix a second time, in the layout that it multiplies fastest."""


@dataclass(frozen=True)
class ModelDescription:
    architecture: str
    model_type: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    """In tokens; the engine's limit, which may be less than the model claims."""
    is_tied: bool
    """Whether the output head is the embedding."""
    stored_dtypes: list[str]
    """Dtypes of the weights on disk; empty if these are not here."""
    has_chat_template: bool
    lora_targets: dict[str, list[str]]
    """By group: the projections that get a pair, and how many of each."""
    lora_parameters: dict[int, int]
    """Parameters that a run trains, by rank."""
    weights_bytes: dict[str, int]
    """Memory of the base on a CPU, by dtype, and by the format of a quantised one whose rest is float32."""
    run_bytes: dict[int, int]
    """Memory of a run in training, by rank."""
    cache_bytes_per_token: int
    """Of keys and values in sampling, in float32."""
    trouble: str
    """Why the engine refuses the model, as far as the configuration shows."""


def describe_model(directory: Path) -> ModelDescription:
    model = empty_model(directory)
    config = model.config.get_text_config()
    targets, trouble = _targets(model, config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    by_rank = {rank: _num_trained(targets, rank) for rank in RANKS}
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    is_stored = (directory / "model.safetensors").is_file() or (directory / "model.safetensors.index.json").is_file()
    return ModelDescription(
        architecture=type(model).__name__,
        model_type=config.model_type,
        num_parameters=num_parameters,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=longest_context(config),
        is_tied=is_tied(model),
        stored_dtypes=sorted({each.dtype for each in stored_tensors(directory).values()}) if is_stored else [],
        has_chat_template=_has_chat_template(directory),
        lora_targets=_by_group(targets),
        lora_parameters=by_rank,
        weights_bytes={
            str(dtype).removeprefix("torch."): _LAYOUTS * num_parameters * dtype.itemsize
            for dtype in (torch.float32, torch.bfloat16)
        }
        | _quantized_bytes(targets, num_parameters),
        run_bytes={rank: _STATES_PER_WEIGHT * 4 * count for rank, count in by_rank.items()},
        cache_bytes_per_token=2 * 4 * config.num_hidden_layers * kv_heads * head_dim,
        trouble=trouble,
    )


def _targets(model: torch.nn.Module, config: object) -> tuple[list[LoraTarget], str]:
    try:
        refuse_unpackable(config)
        return find_targets(model), ""
    except ModelRefused as error:
        return [], str(error)


def _num_trained(targets: list[LoraTarget], rank: int) -> int:
    return sum(torch.Size(shape).numel() for target in targets for shape in shapes(target, rank))


def _quantized_bytes(targets: list[LoraTarget], num_parameters: int) -> dict[str, int]:
    """Return the memory of the base by format: projections are quantised, all but the last target, the head."""
    sizes = [(target.out_features * max(1, target.num_experts), target.in_features) for target in targets[:-1]]
    rest = 4 * (num_parameters - sum(rows * columns for rows, columns in sizes))
    return {kind: rest + sum(stored_bytes(kind, *size) for size in sizes) for kind in FORMATS if sizes}


def _by_group(targets: list[LoraTarget]) -> dict[str, list[str]]:
    counts = Counter((target.group, target.name.rpartition(".")[2]) for target in targets)
    found: dict[str, list[str]] = {}
    for (group, name), count in counts.items():
        found.setdefault(group, []).append(f"{name} x{count}")
    return found


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    settings = directory / "tokenizer_config.json"
    return settings.is_file() and bool(json.loads(settings.read_text(encoding="utf-8")).get("chat_template"))
