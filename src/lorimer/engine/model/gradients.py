"""Gradients of weights that ranks share: whole while their layer is computed, then each rank's rows of the sum.

FSDP2 gathers the weights of one unit (a layer, the embedding, the head, the rest of the decoder) at a time. Layers add
their gradients to ``weight.grad`` as for one process. Before the backward pass of a unit its weights get such buffers,
and after it the buffers are summed over the ranks in float32, and only the rows of this rank are kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lorimer.engine.sharding import Shards
from lorimer.errors import ModelRefused


def refuse_outside(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Refuse a model with parameters outside of ``modules``, which are shared: a rank would train them by itself."""
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    if outside := [name for name, parameter in model.named_parameters() if id(parameter) not in inside]:
        raise ModelRefused(
            f"{type(model).__name__} has {', '.join(map(repr, outside))} outside of its decoder and head; full"
            " fine-tuning on several ranks does not train such a model, one process does"
        )


class SharedGradients:
    """The gradients of a model that ranks share, from the place of one of them."""

    def __init__(
        self,
        model: nn.Module,
        decoder: nn.Module,
        layers: Sequence[nn.Module],
        others: Sequence[nn.Module],
        shards: Shards,
    ) -> None:
        """``others`` are the embedding and, unless it is tied to that, the head."""
        modules = [*layers, *others, decoder]
        unit_of = {id(module): id(unit) for unit in reversed(modules) for module in unit.modules()}
        places: dict[int, dict[str, tuple[nn.Module, str]]] = {id(unit): {} for unit in modules}
        for name, _ in model.named_parameters():
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            places[unit_of[id(module)]][name] = module, leaf
        self._units = [UnitGradient(unit, places[id(unit)], shards) for unit in modules]
        for layer, unit in zip(layers, self._units, strict=False):
            unit.surround(layer)
        embedding, *_, root = self._units[len(layers) :]
        self._ends = [embedding, root]
        self._head = self._units[len(layers) + len(others) - 1]

    def record(self, parts: Mapping[str, Tensor]) -> None:
        """Add gradients of the following passes to ``parts``, by the names of the weights; nothing without any."""
        for unit in self._units:
            unit.record(parts)

    def begin_head(self) -> None:
        """Give the weight of the head, which is gathered now, a buffer."""
        self._head.catch()
        self._head.begin()

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Compute a pass backward within the block, after the head."""
        if self._head not in self._ends:
            self._head.finish()
        for unit in self._ends:
            unit.begin()
        yield
        for unit in self._ends:
            unit.finish()


class UnitGradient:
    """The gradients of one unit of sharding, from the place of one rank."""

    def __init__(self, unit: nn.Module, places: Mapping[str, tuple[nn.Module, str]], shards: Shards) -> None:
        """``places`` are the module and the name within it of each parameter, by its name in the model."""
        self._places, self._shards = places, shards
        self._parts: dict[str, Tensor] = {}
        self._gathered: list[tuple[Tensor, Tensor]] = []
        """Trained weights of the pass, whole or freed, each with this rank's part of its gradient."""
        unit.register_forward_pre_hook(lambda module, arguments: self.catch())

    def surround(self, layer: nn.Module) -> None:
        """Begin and finish with the backward pass of a layer, as gradients reach its output and its input."""
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.register_forward_hook(self._leave)

    def record(self, parts: Mapping[str, Tensor]) -> None:
        """Add gradients of the following passes to ``parts``, by the names of the weights; nothing without any."""
        for whole, _ in self._gathered:
            whole.grad = None
        self._gathered = []
        self._parts = {name: part for name, part in parts.items() if name in self._places}

    def catch(self) -> None:
        """Remember the weights, which are gathered now."""
        if self._parts and torch.is_grad_enabled():
            places = ((self._places[name], part) for name, part in self._parts.items())
            self._gathered = [(getattr(module, leaf), part) for (module, leaf), part in places]
            for whole, part in self._gathered:
                whole.grad_dtype = part.dtype

    def begin(self) -> None:
        """Give the weights buffers, unless they have some."""
        for whole, _ in self._gathered:
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)

    def finish(self) -> None:
        """Sum the buffers over the ranks and free them; all ranks do so together."""
        wholes, parts = [], []
        for whole, part in self._gathered:
            assert whole.grad is not None, "finish follows begin"
            wholes.append(whole.grad)
            parts.append(part)
            whole.grad = None
        self._gathered = []
        with torch.no_grad():
            self._shards.add_sums(wholes, parts)

    def _enter(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._gathered and torch.is_grad_enabled():
            hidden = next(one for one in (*arguments, *keywords.values()) if _has_gradient(one))
            hidden.register_hook(lambda gradient: self.finish())

    def _leave(self, layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if self._gathered and torch.is_grad_enabled():
            outputs = output if isinstance(output, tuple) else (output,)
            next(one for one in outputs if _has_gradient(one)).register_hook(lambda gradient: self.begin())


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
