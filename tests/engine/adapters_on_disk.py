"""A base model and a trained adapter, as directories."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lorimer.engine.adapters import checkpoints
from lorimer.engine.adapters.adapters import create_adapter
from lorimer.engine.adapters.lora import find_targets
from lorimer.engine.messages import LoraConfig, OptimizerConfig
from lorimer.engine.model.base_model import load_model
from lorimer.models.debug import make_debug_model
from lorimer.models.export.merging import empty_model
from tests.engine.reference import DEVICE

TOKENS = [torch.arange(length) * 13 % 250 for length in (21, 8)]


def make_base(directory: Path, architecture: str, **overrides: Any) -> Path:
    make_debug_model(directory, architecture=architecture, **overrides)
    return directory


def make_adapter(base: Path, directory: Path, rank: int = 4, std: float = 0.05, **flags: bool) -> Path:
    """A saved adapter whose every factor is alive."""
    targets = find_targets(empty_model(base))
    rows = load_model(base, DEVICE, "base").rows if flags.get("use_dora") else None
    adapter = create_adapter(targets, LoraConfig(rank=rank, seed=3, **flags), OptimizerConfig(), base=rows)
    generator = torch.Generator().manual_seed(4)
    for _, b, *magnitudes in adapter.weights.values():
        b.normal_(0, std, generator=generator)
        for one in magnitudes:
            one.mul_(torch.empty(one.shape).uniform_(0.5, 1.5, generator=generator))
    checkpoints.save(adapter, targets, str(directory), base_model=str(base), weights_only=False)
    return directory


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of plain transformers, one sequence at a time."""
    return torch.cat([model(input_ids=tokens[None]).logits[0] for tokens in TOKENS]).float()


def plain_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    """Of PEFT, which knows nothing of the engine."""
    return logits(PeftModel.from_pretrained(plain_model(base), adapter).eval())
