"""What the files of a base model say before vLLM loads it: its description, and adapters made for its layers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig

from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import ModelInfo
from lorimer.engine.model.base_model import eos_token_ids, longest_context
from lorimer.engine.model.device import Device
from lorimer.errors import InvalidInput, ModelRefused
from lorimer.models.sources import ModelSource

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 8


class BaseFiles:
    """The base model in ``source``, as far as its files show it."""

    def __init__(self, source: ModelSource, config: EngineConfig, device: Device, tokenizer: Any) -> None:
        self.source = source
        settings = AutoConfig.from_pretrained(source.directory, local_files_only=True)
        if hasattr(settings, "vision_config"):
            raise ModelRefused(f"{source.name!r} reads images; only text models are sampled with vLLM")
        self.shapes = read_shapes(source.directory)
        self.layers = [name for name in self.shapes if "layers" in name.split(".")]
        strange = [name for name in self.layers if "experts" in name or name.rpartition(".")[2] not in PROJECTIONS]
        if strange or not self.layers:
            raise ModelRefused(
                f"{source.name!r} has {strange[0] if strange else 'no layers'!r}; vLLM samples models whose layers are"
                f" {', '.join(PROJECTIONS)}, not experts or fused layers: remove `sampler`, and the engine samples"
            )
        own_limit = longest_context(settings)
        if config.max_context > own_limit:
            raise InvalidInput(f"max_context {config.max_context} is more than the model's {own_limit}")
        self.info = ModelInfo(
            model_name=source.name,
            directory=str(source.directory),
            architecture=(settings.architectures or [settings.model_type])[0],
            vocab_size=settings.vocab_size,
            max_context=config.max_context or own_limit,
            num_parameters=sum(rows * columns for rows, columns in self.shapes.values()),
            dtype=str(device.dtype).removeprefix("torch."),
            device=device.type,
            token_budget=0,
            eos_token_ids=eos_token_ids(source.directory, settings, tokenizer),
            target_modules=sorted({name.rpartition(".")[2] for name in self.layers}),
            no_images="vLLM samples text only",
        )

    def write_adapter(self, directory: Path, scale: float) -> None:
        """Write an adapter of all layers with random factors whose product grows with ``scale``; 0 changes nothing."""
        random = np.random.default_rng(0)
        tensors: dict[str, np.ndarray] = {}
        for name in [*self.layers, "lm_head"] if "lm_head" in self.shapes else self.layers:
            rows, columns = self.shapes[name]
            a, b = random.standard_normal((RANK, columns)), random.standard_normal((rows, RANK))
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.astype(np.float32) / np.float32(columns**0.5)
            tensors[f"base_model.model.{name}.lora_B.weight"] = (scale * b).astype(np.float32)
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": RANK,
            "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in (*self.layers, "lm_head")}),
        }
        directory.mkdir()
        save_file(tensors, directory / "adapter_model.safetensors")
        (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def read_shapes(directory: Path) -> dict[str, tuple[int, int]]:
    """Return the shapes of all matrices by the name of their layer."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 (it is not a dict)
                shape = file.get_slice(name).get_shape()
                if name.endswith(".weight") and len(shape) == 2:
                    found[name.removesuffix(".weight")] = (shape[0], shape[1])
    return found


def check_adapter(directory: str, max_rank: int) -> None:
    """Refuse a saved adapter that vLLM would refuse, or would not read as the engine does."""
    settings = json.loads((Path(directory) / "adapter_config.json").read_text("utf-8"))
    if settings["r"] > max_rank:
        raise InvalidInput(f"the adapter has rank {settings['r']}; this sampler accepts up to {max_rank}")
    for name in ("target_parameters", "rank_pattern", "use_dora", "modules_to_save"):
        if settings.get(name):
            raise InvalidInput(f"the adapter has {name} {settings[name]!r}, which the vLLM sampler does not accept")
