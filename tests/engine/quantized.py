"""Quantised base models and their references: plain transformers with weights that are rounded here, in numpy."""

import numpy as np
import torch

from lorimer.engine.model.base_model import load_model, register_implementations
from lorimer.models.debug import make_debug_model, tiny_model
from tests.engine.reference import DEVICE

WIDE = {"hidden_size": 96, "intermediate_size": 136}
"""Sizes of several blocks, the last of them not full."""
NF4 = np.array(
    "-1 -0.6961928 -0.52507305 -0.3949175 -0.28444138 -0.18477343 -0.091050036 0 0.0795803 0.1609302 0.2461123"
    " 0.33791524 0.44070983 0.562617 0.72295684 1".split(),
    np.float32,
)


def rounded(weight, kind):
    """A float32 matrix, or one of each expert, after it was quantised along its last axis and converted back."""
    if weight.ndim == 3:
        return np.stack([rounded(one, kind) for one in weight])
    size = weight.shape[1] if kind == "int8" else 64
    levels = {"int8": np.arange(-127, 128), "int4": np.arange(-8, 8), "nf4": NF4}[kind].astype(np.float32)
    found = np.zeros_like(weight)
    for row, values in enumerate(weight):
        for start in range(0, len(values), size):
            block = values[start : start + size]
            largest = block[np.abs(block).argmax()]
            scale = {"int8": abs(largest) / 127, "int4": largest / -8, "nf4": abs(largest)}[kind]
            if scale:
                assert block.dtype == scale.dtype == np.float32  # in float64 a level near a border would be another
                quotient = block / scale
                nearest = levels[np.abs(quotient[:, None] - levels).argmin(1)]
                found[row, start : start + size] = (np.rint(quotient) if kind == "int8" else nearest) * scale
    return found


def projections(model):
    """The parameters that are quantised, by name."""
    names = {}
    for target in model.targets[:-1]:
        if target.num_experts:
            names |= {f"{target.module}.gate_up_proj": True, f"{target.module}.down_proj": True}
        else:
            names[f"{target.module}.weight"] = True
    return list(names)


def open_quantized(directory, architecture, kind, device=DEVICE):
    """The engine's quantised model, and plain transformers with rounded weights."""
    register_implementations()
    make_debug_model(directory, architecture=architecture, **WIDE)
    model = load_model(directory, device, architecture, quantize=kind)
    plain = tiny_model(architecture, **WIDE)
    plain.config._attn_implementation = "eager"
    with torch.no_grad():
        for name in projections(model):
            parameter = plain.get_parameter(name)
            module = plain.get_submodule(name.rpartition(".")[0])
            is_transposed = parameter.dim() == 3 and module.is_transposed
            weight = parameter.transpose(1, 2) if is_transposed else parameter
            found = torch.from_numpy(rounded(weight.contiguous().numpy(), kind))
            assert not torch.equal(found, weight), "rounding changed nothing"
            parameter.copy_(found.transpose(1, 2) if is_transposed else found)
    return model, plain.requires_grad_(False).eval()
