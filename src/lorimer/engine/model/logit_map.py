"""What a model does to logits after its output head: a constant factor, or a soft cap."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LogitMap:
    """The transformation of logits after the head: a factor, then a soft cap."""

    factor: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits.mul_(self.factor)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def backpropagate_(self, d_logits: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of the mapped ``logits`` into that of the raw ones."""
        if self.softcap is not None:
            d_logits.mul_(1 - (logits / self.softcap).square_())
        if self.factor != 1.0:
            d_logits.mul_(self.factor)
        return d_logits


def find_logit_map(raw: Tensor, reference: Tensor, config: Any) -> LogitMap:
    """Return the map from the logits of our head to those of the model itself."""
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap:
        return LogitMap(softcap=float(softcap))
    # A constant factor (Granite, Cohere) shows as the same ratio everywhere; least squares finds it. Apple's GPUs have
    # no float64.
    ours, theirs = raw.cpu().double(), reference.cpu().double()
    factor = ((ours * theirs).sum() / ours.square().sum()).item()
    return LogitMap() if abs(factor - 1) < 0.01 else LogitMap(factor=factor)
