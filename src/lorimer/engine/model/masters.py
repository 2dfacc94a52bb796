"""The float32 weights of a full run, and the narrower copies of them that its passes compute with.

Optimisers, checkpoints and snapshots see the float32 weights, the masters. With the dtype float32 these are the
parameters of the model. With bfloat16 the parameters are copies, rounded to nearest after each change of the masters;
their gradients are added up in float32 buffers, as those of adapters are (``add_product``).
"""

import functools
import re

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lorimer.engine.native import matmul
from lorimer.engine.sharding import local_part
from lorimer.errors import ModelRefused

MASTER_DTYPE = torch.float32


class MasterWeights:
    def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
        """Make the parameters of ``model`` copies in ``dtype``; with ``None`` leave them as they are."""
        self._model = model
        self._masters: dict[str, Tensor] = {}
        self._wide: list[str] = []
        """Parameters that the architecture computes in float32 whatever the dtype is; they have no copy."""
        if dtype in (None, MASTER_DTYPE):
            return
        for name, parameter in model.named_parameters():
            assert parameter.dtype == MASTER_DTYPE, "a full run loads its model in float32"
            if _stays_wide(model, name):
                self._wide.append(name)
                continue
            self._masters[name] = parameter.data
            parameter.data = parameter.data.to(dtype)
            parameter.grad_dtype = MASTER_DTYPE

    def tensors(self) -> dict[str, Tensor]:
        """Return all masters by the names of the parameters, or of several ranks this one's parts of them."""
        parameters = self._model.named_parameters()
        return {name: self._masters.get(name, local_part(parameter)) for name, parameter in parameters}

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters, which have changed, into the copies."""
        for name, master in self._masters.items():
            self._model.get_parameter(name).copy_(master)

    def drop_copies(self) -> None:
        """Make the masters the parameters again, for ranks to divide; what these gather is rounded on the way."""
        if self._wide:
            raise ModelRefused(
                f"{type(self._model).__name__} computes {self._wide[0]!r} in float32 and others in a narrower dtype;"
                " full fine-tuning on several ranks gathers all in one: one process, or dtype 'float32', is accepted"
            )
        for name, master in self._masters.items():
            self._model.get_parameter(name).data = master
        self._masters = {}


def _stays_wide(model: PreTrainedModel, name: str) -> bool:
    # transformers' own rule when it loads a model in bfloat16.
    return any(re.search(part.replace("*", ".*"), name) for part in model._keep_in_fp32_modules_strict or ())


def add_product(buffer: Tensor, left: Tensor, right: Tensor, *, alpha: float = 1.0) -> None:
    """Add ``alpha * left.T @ right`` to ``buffer``, the gradient of a weight.

    Factors in a narrower dtype are multiplied in it. CUDA and compiled functions add the product without rounding it.
    torch's products on a CPU have the dtype of their factors, so that of each pass is rounded once, as its factors are;
    in float32 it would take twice as long where the CPU has units for bfloat16.
    """
    functions = matmul.functions_for(left)
    if functions is not None and functions.add_gradient(buffer, left, right, alpha):
        return
    if left.dtype == buffer.dtype:
        buffer.addmm_(left.t(), right, alpha=alpha)
    elif _has_wide_products(buffer.device, left.dtype, buffer.dtype):
        torch.addmm(buffer, left.t(), right, alpha=alpha, out_dtype=buffer.dtype, out=buffer)
    else:
        buffer.add_(left.t() @ right, alpha=alpha)


def add_sum(buffer: Tensor, rows: Tensor) -> None:
    """Add the sum of ``rows`` to ``buffer``, in the dtype of the buffer."""
    buffer += rows.sum(0, dtype=buffer.dtype)


@functools.cache
def _has_wide_products(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether the device adds products of narrow numbers to wide ones; CUDA does, in its matrix units."""
    if device.type != "cuda":
        return False
    left, right = (torch.arange(256, device=device).view(16, 16).roll(n, 1).to(narrow) for n in (0, 3))
    expected = 2 * left.t().double() @ right.double() + 1
    found = torch.ones(16, 16, dtype=wide, device=device)
    try:
        torch.addmm(found, left.t(), right, alpha=2, out_dtype=wide, out=found)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(found.double(), expected, rtol=1e-6)
