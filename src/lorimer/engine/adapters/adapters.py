"""The state of one run, and the frozen copy of its weights that samplers read.

An `Adapter` owns its weights, the gradient accumulated since the last step, its optimiser's state and its step
counter, all float32 on one device. ``model/linear.py`` applies the pairs, ``training/optim.py`` updates them and
``checkpoints.py`` stores them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorimer.engine.adapters.dora import BaseRows, RowScales, initial_magnitudes
from lorimer.engine.adapters.lora import LoraTarget, check_dora, init_adapter, scale_of
from lorimer.engine.messages import LoraConfig, OptimizerConfig
from lorimer.engine.training.optimizers import State, average_weights
from lorimer.errors import CheckpointError

Pairs = dict[str, tuple[Tensor, ...]]
"""Pairs (A, B), or tensors of the same shapes, by target name; in DoRA the magnitudes of the rows are a third."""
FACTORS = ("A", "B", "magnitude")


def flatten(pairs: Mapping[str, tuple[Tensor, ...]]) -> list[Tensor]:
    """Return all tensors of ``pairs`` in order, A before B."""
    return [tensor for pair in pairs.values() for tensor in pair]


def name_factors(pairs: Mapping[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Return all tensors of ``pairs`` in order, as ``<target>/A``, ``<target>/B`` and ``<target>/magnitude``."""
    return {
        f"{name}/{factor}": tensor
        for name, pair in pairs.items()
        for factor, tensor in zip(FACTORS[: len(pair)], pair, strict=True)
    }


def join_factors(tensors: Mapping[str, Tensor], like: Mapping[str, tuple[Tensor, ...]]) -> Pairs:
    """Undo ``name_factors`` for the targets and factors of ``like``."""
    return {name: tuple(tensors[f"{name}/{factor}"] for factor in FACTORS[: len(pair)]) for name, pair in like.items()}


def are_finite(tensors: list[Tensor]) -> bool:
    """Return whether no number in ``tensors`` is NaN or infinite."""
    if not tensors:
        return True
    # A norm is several times faster than checking every number, but it overflows for large finite ones.
    if bool(torch.stack(torch._foreach_norm(tensors)).isfinite().all()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@dataclass(frozen=True)
class FrozenAdapter:
    """An immutable copy of a run's weights, which sampling reads while training continues."""

    weights: Pairs
    rank: int
    scale: float
    row_scales: RowScales | None = None
    """In DoRA."""

    @property
    def memory_bytes(self) -> int:
        return _bytes(flatten(self.weights))


@dataclass
class Adapter:
    """One run being trained."""

    config: LoraConfig
    optimizer: OptimizerConfig
    weights: Pairs
    grads: Pairs | None = None
    """Sum of the gradients added since the last step; ``None`` when there was none."""
    moments: State = field(default_factory=dict)
    """The optimiser's tensors by its own names and those of ``name_factors``; empty before the first step."""
    step: int = 0
    """Steps applied; a skipped step does not count."""
    groups: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """What each factor belongs to, by the names of ``name_factors``; a step may multiply its learning rate by group."""
    base: Mapping[str, BaseRows] = field(default_factory=dict, repr=False)
    """The rows that the targets of a DoRA run adapt."""
    _row_scales: RowScales | None = field(default=None, repr=False)

    @property
    def row_scales(self) -> RowScales | None:
        """What the rows of a DoRA run are multiplied with; ``None`` for other runs."""
        if self.config.use_dora is True and self._row_scales is None:
            self._row_scales = RowScales(self.base, self.weights, self.scale)
        return self._row_scales

    def weights_changed(self) -> None:
        """Forget the norms of the weights before; whatever changes weights calls this."""
        self._row_scales = None

    @property
    def rank(self) -> int:
        return self.config.rank

    @property
    def scale(self) -> float:
        return scale_of(self.config)

    @property
    def device(self) -> torch.device:
        return next(iter(self.weights.values()))[0].device

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in flatten(self.weights))

    @property
    def memory_bytes(self) -> int:
        """Bytes held now: weights, accumulated gradient and optimiser state."""
        return _bytes(self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all tensors held now, in an order that depends on their names only."""
        kinds = {"weights": name_factors(self.weights), "grads": name_factors(self.grads or {}), **self.moments}
        return [tensor for _, tensors in sorted(kinds.items()) for _, tensor in sorted(tensors.items())]

    def new_gradient(self) -> Pairs:
        """Return zero buffers for the gradient of a batch."""
        return {name: tuple(map(torch.zeros_like, pair)) for name, pair in self.weights.items()}

    def add_gradient(self, grads: Pairs) -> None:
        """Accumulate ``grads``, which cover every target of ``weights``; the first ones are kept, not copied."""
        assert grads.keys() == self.weights.keys(), "a gradient covers exactly the trained targets"
        if self.grads is None:
            self.grads = {name: grads[name] for name in self.weights}
        else:
            torch._foreach_add_(flatten(self.grads), [tensor for name in self.grads for tensor in grads[name]])

    def clear_gradient(self) -> None:
        self.grads = None

    @property
    def averaged(self) -> Pairs | None:
        """The weights that samplers get, where the optimiser averages its weights; ``None`` if they are ``weights``."""
        found = average_weights(self.optimizer.type, name_factors(self.weights), self.moments)
        return None if found is None else join_factors(found, self.weights)

    def check_finite(self, verb: str) -> None:
        """Refuse weights or moments that are not finite; the gradient may be, and then its step is skipped."""
        kinds = {"weights": name_factors(self.weights), **self.moments}
        if (averaged := self.averaged) is not None:
            kinds["averaged weights"] = name_factors(averaged)
        for what, tensors in kinds.items():
            if not are_finite([tensor for tensor in tensors.values() if tensor.is_floating_point()]):
                raise CheckpointError(f"the run is not {verb}: its {what} hold numbers that are not finite")


def create_adapter(
    targets: Iterable[LoraTarget],
    config: LoraConfig,
    optimizer: OptimizerConfig,
    device: torch.device | str = "cpu",
    base: Mapping[str, BaseRows] | None = None,
) -> Adapter:
    """Create a run. The same seed gives the same weights on every device. DoRA needs the rows of the base."""
    targets = list(targets)
    check_dora(targets, config)
    weights: Pairs = {name: (a.to(device), b.to(device)) for name, (a, b) in init_adapter(targets, config).items()}
    if config.use_dora is True:
        assert base is not None, "magnitudes begin as the norms of the base"
        weights = {name: (*weights[name], m) for name, m in initial_magnitudes(base, weights).items()}
    groups = {f"{t.name}/{factor}": frozenset({t.group, f"lora_{factor}"}) for t in targets for factor in FACTORS}
    own = {name: groups[name] for name in name_factors(weights)}
    return Adapter(config, optimizer, weights, groups=own, base=base or {})


def snapshot(adapter: Adapter, dtype: torch.dtype = torch.float32) -> FrozenAdapter:
    """Copy the current weights, or their average; refuse numbers that are not finite."""
    adapter.check_finite("published")
    return freeze(adapter.averaged or adapter.weights, adapter.config, adapter.base, dtype)


def freeze(
    weights: Pairs, config: LoraConfig, base: Mapping[str, BaseRows], dtype: torch.dtype = torch.float32
) -> FrozenAdapter:
    """Copy weights for passes in ``dtype``, B column by column, as ``native/decode.py`` reads it.

    Those of a DoRA run stay float32, because the norms of its rows are computed from them.
    """
    scale = scale_of(config)
    if config.use_dora is True:
        copies: Pairs = {name: tuple(one.detach().clone() for one in pair) for name, pair in weights.items()}
        return FrozenAdapter(copies, config.rank, scale, RowScales(base, copies, scale))
    return FrozenAdapter(
        {name: (_copy(a, dtype), _copy(b.mT, dtype).mT) for name, (a, b) in weights.items()}, config.rank, scale
    )


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
