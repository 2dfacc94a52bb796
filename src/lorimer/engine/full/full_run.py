"""The state of one full run, and the copies of its weights that samplers read.

A `FullRun` trains the weights of the model itself, float32, in place; passes may compute with narrower copies of them
(``model/masters.py``). ``model/`` adds their gradients to the buffers of a batch, ``training/optim.py`` updates them
and ``full/checkpoints.py`` stores them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lorimer.engine.adapters.adapters import are_finite
from lorimer.engine.full.trained_parameters import choose_parameters, find_groups
from lorimer.engine.messages import FullConfig, OptimizerConfig, StepField
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.sharding import Shards
from lorimer.engine.training.division import Division
from lorimer.engine.training.optim import take_step
from lorimer.engine.training.optimizers import OPTIMIZERS, average_weights
from lorimer.errors import CheckpointError

Tensors = dict[str, Tensor]
"""Tensors by the names of the model's parameters."""


@dataclass
class FullRun:
    """The run that an engine of the method ``full`` trains."""

    model: BaseModel
    config: FullConfig
    optimizer: OptimizerConfig
    weights: Tensors
    """The trained masters, or of several ranks this one's parts of them; after a change the model is refreshed."""
    groups: Mapping[str, frozenset[str]]
    """The group of each trained parameter; a step may multiply its learning rate by group."""
    grads: Tensors | None = None
    """Sum of the gradients added since the last step; ``None`` when there was none."""
    moments: dict[str, Tensors] = field(default_factory=dict)
    """The optimiser's tensors by its own names; empty before the first step."""
    step: int = 0
    """Steps applied; a skipped step does not count."""

    @property
    def shards(self) -> Shards:
        return self.model.shards

    @cached_property
    def division(self) -> Division:
        """How the ranks share weights, gradient and moments."""
        parameters = dict(self.model.transformer.named_parameters())
        shapes = {name: parameters[name].shape for name in self.weights}
        return Division.of(self.shards, self.optimizer.type, shapes, self.groups)

    @property
    def num_parameters(self) -> int:
        return self.division.num_parameters

    @property
    def frozen(self) -> Tensors:
        """The parameters that are not trained, or of several ranks this one's parts of them."""
        return {name: master for name, master in self.model.masters.tensors().items() if name not in self.weights}

    @cached_property
    def frozen_sha256(self) -> str:
        """The digest of the parameters that are not trained; they never change. Ranks find it together."""
        digest = hashlib.sha256()
        for name, part in sorted(self.frozen.items()):
            shape = self.model.transformer.get_parameter(name).shape
            tensor = part if self.shards.is_alone else self.shards.gather_rows(part, shape[0], to=0)
            digest.update(f"{name}:{list(shape)}:{part.dtype}\n".encode())
            if tensor is not None:
                digest.update(bytes_of(tensor))
        return self.shards.exchange(digest.digest())[0].hex()

    @property
    def memory_bytes(self) -> int:
        """Bytes that this process holds besides the weights: accumulated gradient and optimiser state."""
        return _bytes(tensor for kind in (self.grads or {}, *self.moments.values()) for tensor in kind.values())

    def tensors(self) -> list[Tensor]:
        """Return all tensors held now, in an order that depends on their names only."""
        kinds = {"weights": self.weights, "grads": self.grads or {}, **self.moments}
        return [tensor for _, tensors in sorted(kinds.items()) for _, tensor in sorted(tensors.items())]

    def new_gradient(self) -> Tensors:
        """Return zero buffers for the gradient of a batch."""
        return {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def recording(self, grads: Tensors) -> AbstractContextManager[None]:
        """Add the gradients of passes within the block to ``grads``."""
        return self.model.recording(grads)

    def add_gradient(self, grads: Tensors) -> None:
        """Accumulate ``grads``, which cover every trained parameter; the first ones are kept, not copied."""
        assert grads.keys() == self.weights.keys(), "a gradient covers exactly the trained parameters"
        if self.grads is None:
            self.grads = grads
        else:
            torch._foreach_add_(list(self.grads.values()), [grads[name] for name in self.grads])

    def clear_gradient(self) -> None:
        self.grads = None

    @property
    def has_average(self) -> bool:
        """Whether the optimiser averages its weights."""
        return OPTIMIZERS[self.optimizer.type].average is not None

    @property
    def averaged(self) -> Tensors | None:
        """The weights that samplers get, where the optimiser averages its weights; ``None`` if they are ``weights``."""
        return average_weights(self.optimizer.type, self.weights, self.moments)

    def check_finite(self, verb: str) -> None:
        """Refuse weights or moments that are not finite; the gradient may be, and then its step is skipped."""
        kinds = {"weights": self.weights, **self.moments}
        if (averaged := self.averaged) is not None:
            kinds["averaged weights"] = averaged
        with self.shards.agreed():
            for what, tensors in kinds.items():
                if not are_finite([tensor for tensor in tensors.values() if tensor.is_floating_point()]):
                    raise CheckpointError(f"the run is not {verb}: its {what} hold numbers that are not finite")

    def state(self, *, with_weights: bool) -> dict[str, tuple[str, str, Tensor]]:
        """Return what the run has besides its weights, or with these too: kind, name and part by ``kind/name``."""
        kinds = dict(self.moments)
        if self.grads is not None:
            kinds["grad"] = self.grads
        if with_weights:
            kinds["weight"] = self.weights
        return {f"{kind}/{name}": (kind, name, one) for kind, tensors in kinds.items() for name, one in tensors.items()}


@dataclass(frozen=True, eq=False)
class PublishedWeights:
    """An immutable copy of all weights of a model, which sampling reads while training continues."""

    weights: Tensors

    @property
    def memory_bytes(self) -> int:
        return _bytes(self.weights.values())


def create_full_run(model: BaseModel, config: FullConfig, optimizer: OptimizerConfig) -> FullRun:
    """Create a run that begins with the weights that the model has now."""
    groups = find_groups(model.transformer)
    chosen = choose_parameters(model.transformer, config)
    masters = model.masters.tensors()
    weights = {name: masters[name] for name in chosen}
    return FullRun(model, config, optimizer, weights, {name: frozenset({groups[name]}) for name in weights})


def apply_step(run: FullRun, params: Mapping[str, StepField]) -> dict[str, float]:
    """Take one step with the accumulated gradient, and clear that; return the metrics of the step."""
    outcome = take_step(
        run.optimizer,
        run.weights,
        run.grads,
        run.moments,
        run.step,
        params,
        run.groups,
        run.division,
        run.model.device.product_dtype,
    )
    run.model.masters.refresh()
    run.clear_gradient()
    run.step += outcome.is_applied
    return outcome.metrics


def publish(run: FullRun) -> PublishedWeights:
    """Copy what passes compute with now, or the average of the weights; refuse numbers that are not finite."""
    run.check_finite("published")
    weights = {name: parameter.detach() for name, parameter in run.model.transformer.named_parameters()}
    averaged = run.averaged or {}
    return PublishedWeights(
        {name: averaged.pop(name).to(w.dtype) if name in averaged else w.clone() for name, w in weights.items()}
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, on the CPU without a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
