"""The token budget of a training pass, from the memory that a short pass keeps for its backward pass.

A pass has at most ``token_budget`` tokens, unless one sequence is longer. As long as its activations fit into memory
they are kept; a longer pass computes each layer again in its backward pass.
"""

import torch
from torch import Tensor

from lorimer.engine.adapters.adapters import create_adapter
from lorimer.engine.messages import LoraConfig, OptimizerConfig
from lorimer.engine.model.attention import group_sequences
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.device import Device
from lorimer.engine.training.batch import AdapterSlice, Pass

MIN_BUDGET, MAX_BUDGET = 256, 2048
"""Longer passes are not faster, because their matrix products are large already, and they delay samples."""
MAX_DEVICE_BUDGET = 8192
"""Of devices other than a CPU, whose products must be larger to fill them."""
MAX_FULL_BUDGET = 512
"""Of a full run in float32 on a CPU: not slower than longer passes, and less memory beside its large state. In bfloat16
twice as many take as much memory, and less time, because each pass adds its products to the gradients separately."""
_PROBE_TOKENS, _PROBE_TOKENS_ON_DEVICE = 16, 64
"""Of the measured pass: few, because it takes memory at start; a device's kernels work on blocks of 64."""
_RANK = 32
"""Of the adapters that the estimate is for."""
_NUM_BACKWARD_TENSORS = 4


def count_fitting_tokens(model: BaseModel, memory_bytes: int) -> int:
    """Return the number of tokens whose activations fit into ``memory_bytes``."""
    return int(memory_bytes / activation_bytes_per_token(model))


def count_fitting_dora_tokens(model: BaseModel, memory_bytes: int, fitting_tokens: int) -> int:
    """Return how many tokens of DoRA runs fit, which keep outputs of layers too, where so many of others do."""
    kept = sum(t.out_features for t in model.targets if not t.num_experts and t.group != "unembed")
    each = memory_bytes / max(1, fitting_tokens) + kept * model.device.dtype.itemsize
    return int(memory_bytes / each)


def choose_token_budget(fitting_tokens: int, device: Device, is_full: bool = False) -> int:
    """Return the maximum number of tokens of a pass, where ``fitting_tokens`` fit into memory."""
    on_cpu = MAX_FULL_BUDGET * 4 // device.dtype.itemsize if is_full else MAX_BUDGET
    return max(MIN_BUDGET, min(on_cpu if device.type == "cpu" else MAX_DEVICE_BUDGET, fitting_tokens))


def activation_bytes_per_token(model: BaseModel) -> float:
    """Return the bytes per token of a pass with a rank-32 adapter: activations kept, and gradients.

    The gradients of the backward pass take as much as the activations, plus a few tensors of a layer's largest size.
    The measured pass has an adapter of rank 2, because what a pass keeps does not depend on the rank.
    """
    adapter = create_adapter(model.targets, LoraConfig(rank=2, seed=0), OptimizerConfig(), model.device.handle)
    frozen = {p.untyped_storage().data_ptr() for p in model.decoder.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            kept[storage.data_ptr()] = storage.nbytes()
        # Not the tensor itself: an operation that saves its result would refer to itself, and hold all weights forever.
        return tensor.detach()

    size = _PROBE_TOKENS if model.device.type == "cpu" else _PROBE_TOKENS_ON_DEVICE
    tokens = torch.arange(size, device=model.device.handle) % model.vocab_size
    current = Pass([AdapterSlice(0, size, adapter.weights, adapter.scale)], groups=group_sequences([size], [0]))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        hidden = model.hidden(tokens, torch.arange(size, device=tokens.device), current)
    inner = 4 * _RANK * len(model.targets)
    del hidden
    return 2 * (sum(kept.values()) / size + inner) + _NUM_BACKWARD_TENSORS * max(kept.values()) / size
