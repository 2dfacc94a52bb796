"""Quantise a base model while transformers loads it: of its float32 weights only one is in memory at a time.

transformers calls a quantiser for each weight that it has read, renamed and joined (experts come in many pieces). Ours
keeps a ``QuantizedWeight`` in the module, and an empty parameter where the weight was. Quantised are the projections
that LoRA trains in decoder layers; embeddings, norms, routers, biases, the output head and a vision tower stay.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lorimer.engine.adapters.lora import LoraTarget, find_targets
from lorimer.engine.config import Quantize
from lorimer.engine.model.quantization import QuantizedWeight
from lorimer.errors import ModelRefused

_METHOD = "lorimer"
_ATTRIBUTE = "lorimer_quantized"


@dataclass(frozen=True)
class Quantization:
    """How the weights of a model are stored."""

    kind: Quantize
    targets: list[LoraTarget]
    """Found before the weights lost their shapes."""


def load_quantized(
    kind: Quantize, model_class: Any, config: Any, directory: Path, dtype: torch.dtype, name: str
) -> tuple[PreTrainedModel, Quantization]:
    """Load a Hugging Face directory, of floating-point weights, with its projections quantised."""
    for part in (config, config.get_text_config()):
        if stored := getattr(part, "quantization_config", None):
            method = stored.get("quant_method") if isinstance(stored, dict) else stored
            raise ModelRefused(f"{name!r} is stored quantised, by {method!r}; quantize accepts floating-point weights")
    model: PreTrainedModel = model_class.from_pretrained(
        directory,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        attn_implementation="eager",
        quantization_config=_Config(kind, dtype),
    )
    quantizer: Any = model.hf_quantizer
    quantizer.remove_quantization_config(model)
    return model, Quantization(kind, quantizer.targets)


def quantized_weights(module: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the quantised weights of a module, by the names of their parameters."""
    kept: Any = module._modules.get(_ATTRIBUTE)
    return {} if kept is None else dict(kept.items())


@contextlib.contextmanager
def materialized(model: nn.Module) -> Iterator[None]:
    """Let the modules of transformers compute with dense weights in the block, each only while it is called."""
    hooks = []
    for module in model.modules():
        if weights := quantized_weights(module):
            empty = {name: module._parameters[name] for name in weights}

            def fill(module: Any, _: Any) -> None:
                for name, weight in quantized_weights(module).items():
                    module._parameters[name] = nn.Parameter(weight.dense(), requires_grad=False)

            def clear(module: Any, *_: Any, empty: dict[str, Any] = empty) -> None:
                module._parameters.update(empty)

            hooks += [module.register_forward_pre_hook(fill), module.register_forward_hook(clear, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _projections(model: nn.Module, targets: list[LoraTarget]) -> list[str]:
    """Return the names of the parameters that are quantised: those of all targets but the last, the output head."""
    names = []
    for module in dict.fromkeys(target.module for target in targets[:-1]):
        owner = model.get_submodule(module)
        leaves = ["weight"] if isinstance(owner, nn.Linear) else ["gate_up_proj", "up_proj", "down_proj"]
        names += [f"{module}.{leaf}" for leaf in leaves if isinstance(getattr(owner, leaf, None), Tensor)]
    return names


def _owner(model: nn.Module, name: str) -> tuple[Any, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _keep(model: nn.Module, name: str, weight: Tensor, kind: Quantize, dtype: torch.dtype) -> Tensor:
    """Quantise a weight, keep it in its module, and return the empty parameter that stands for it."""
    module, leaf = _owner(model, name)
    quantized = QuantizedWeight(weight, kind, dtype, weight.dim() == 3 and module.is_transposed)
    if _ATTRIBUTE not in module._modules:
        module.add_module(_ATTRIBUTE, nn.ModuleDict())
    module._modules[_ATTRIBUTE][leaf] = quantized
    empty = nn.Parameter(torch.empty(0, quantized.shape[-1], dtype=dtype), requires_grad=False)
    module._parameters[leaf] = empty
    return empty


class _Config(QuantizationConfigMixin):
    def __init__(self, kind: Quantize, dtype: torch.dtype) -> None:
        self.quant_method: Any = _METHOD
        self.kind, self.pass_dtype = kind, dtype


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):
    targets: list[LoraTarget]

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        """Find the projections in the empty model, and have them read in float32, whatever passes compute in."""
        self.targets = find_targets(model)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._wanted = set(_projections(model, self.targets))
        for name in self._wanted:
            module, leaf = _owner(model, name)
            module._parameters[leaf] = nn.Parameter(torch.empty_like(module._parameters[leaf], dtype=torch.float32))
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        return param_name in self._wanted

    def get_quantize_ops(self) -> Any:
        return _QuantizeOp(self)

    def keep(self, model: Any, name: str, weight: Tensor) -> Tensor:
        """Quantise a weight that was read, if it is a projection."""
        config: Any = self.quantization_config
        return _keep(model, name, weight, config.kind, config.pass_dtype) if name in self._wanted else weight

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """Quantise what was read together with other weights, and check all of them.

        Not while they are read: transformers would pass over an error.
        """
        for name, parameter in list(model.named_parameters()):
            module, leaf = _owner(model, name)
            if name in self._wanted and leaf not in quantized_weights(module):
                self.keep(model, name, parameter.detach())
            elif name not in self._wanted:
                # A copy: as long as one tensor is a part of a mapped file, the whole file stays in memory.
                parameter.data = parameter.data.clone()
            found = quantized_weights(module)[leaf].stored_shape if name in self._wanted else parameter.shape
            if found != self._shapes[name]:
                raise ModelRefused(
                    f"the weight {name!r} has the shape {tuple(found)}; the model needs {tuple(self._shapes[name])}"
                )
            if name in self._wanted and not quantized_weights(module)[leaf].is_finite:
                raise ModelRefused(f"the weight {name!r} has numbers that are not finite, so it cannot be quantised")
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _QuantizeOp(ConversionOps):
    def __init__(self, quantizer: _Quantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        model = kwargs["model"]
        found = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        return {name: self._quantizer.keep(model, name, value) for name, value in found.items()}
