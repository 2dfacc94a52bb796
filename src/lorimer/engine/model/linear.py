"""Frozen linear layers with the low-rank pairs of many adapters on top.

The base weight never gets a gradient. Each adapter of the pass owns a slice of the token axis; its products are
plain matrix products on that slice, and its gradients are added, in float32, straight to the buffers the pass
brings along, so autograd only carries the activations. In DoRA the rows are scaled afterwards (``adapters/dora.py``).
Experts are in ``experts.py``, the output head in ``head.py``, weights in 8 or 4 bits in ``quantization.py``.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorimer.engine.adapters.adapters import Pairs
from lorimer.engine.adapters.dora import RowScale
from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.model import grouped
from lorimer.engine.model.grouped import GroupedSlices
from lorimer.engine.model.masters import add_product, add_sum
from lorimer.engine.model.quantization import QuantizedWeight
from lorimer.engine.model.quantized_loading import quantized_weights
from lorimer.engine.native.decode import Decoding, LowRank, PairTable
from lorimer.engine.training.batch import AdapterSlice, PassSlot


class FrozenMatrix:
    """A frozen weight ``(O, I)``, with a second copy in the layout that is fastest for few rows on the CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None, max_packed_rows: int, is_kept: bool = True) -> None:
        """Without ``is_kept`` only the packed layout stays, and at most ``max_packed_rows`` rows are accepted."""
        self._tensors: Mapping[str, Tensor | None] = {
            "weight": weight.detach() if is_kept else weight.detach()[:0],
            "bias": None if bias is None else bias.detach(),
        }
        self._biases: Mapping[str, Tensor | None] = self._tensors
        self._max_packed_rows = max_packed_rows
        self._packed = pack(weight.detach()) if max_packed_rows else None

    @classmethod
    def of(cls, module: nn.Module, max_packed_rows: int) -> "FrozenMatrix":
        """Return a matrix whose weight and bias are those that ``module`` has when they are needed.

        Sharding replaces the parameters of a module before and after each pass.
        """
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        matrix = cls(weight, bias, max_packed_rows)
        matrix._tensors = matrix._biases = module._parameters
        return matrix

    def with_bias_of(self, module: nn.Module) -> "FrozenMatrix":
        """Take the bias from another module than the weight."""
        self._biases = module._parameters
        return self

    @property
    def weight(self) -> Tensor:
        weight = self._tensors["weight"]
        assert weight is not None
        return weight

    @property
    def bias(self) -> Tensor | None:
        return self._biases.get("bias")

    def unpack(self) -> None:
        """Free the packed copy, unless it serves any number of rows."""
        if self._max_packed_rows < ANY_ROWS:
            self._packed = None

    def multiply(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x (rows, I)``."""
        if self._packed is not None and len(x) <= self._max_packed_rows:
            return multiply_packed(x, self._packed, self.bias)
        return F.linear(x, self.weight, self.bias)

    def multiply_transposed(self, d_y: Tensor) -> Tensor:
        return d_y @ self.weight

    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        """Return rows of the weight that products compute with."""
        return self.weight[rows]

    def add_gradient(self, x: Tensor, d_y: Tensor) -> None:
        """Add the gradients of weight and bias to their buffers; only a full run has these."""
        if self.weight.grad is not None:
            add_product(self.weight.grad, d_y, x)
        if self.bias is not None and self.bias.grad is not None:
            add_sum(self.bias.grad, d_y)


class QuantizedMatrix(FrozenMatrix):
    """A frozen weight in 8 or 4 bits, of which there is no copy in another layout."""

    def __init__(self, quantized: QuantizedWeight, module: nn.Module) -> None:
        """Take the bias from ``module``, whose own weight is empty."""
        super().__init__(quantized.codes[:0], None, 0)
        self._tensors = self._biases = module._parameters
        self._quantized = quantized

    def multiply(self, x: Tensor) -> Tensor:
        y = self._quantized.multiply(x)
        return y if self.bias is None else y.add_(self.bias)

    def multiply_transposed(self, d_y: Tensor) -> Tensor:
        return self._quantized.multiply_transposed(d_y)

    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        return self._quantized.rows(rows)


def pack(weight: Tensor) -> Tensor:
    """Pack the weight for oneDNN, which would otherwise do so on each call."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)


def multiply_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


ANY_ROWS = 1 << 30
FEW_ROWS = 64
"""Above this many rows the time to pack a weight is negligible."""


def fastest_packed_rows(weight: Tensor) -> int:
    """Return up to how many rows the packed layout is faster: few, or any number; 0 without oneDNN."""
    if weight.device.type != "cpu":
        return 0
    try:
        packed = FrozenMatrix(weight, None, ANY_ROWS)
    except (RuntimeError, AttributeError):  # a build of torch without oneDNN
        return 0
    x = torch.ones(1024, weight.shape[1], dtype=weight.dtype)
    return ANY_ROWS if _fastest(packed, x) < 0.95 * _fastest(FrozenMatrix(weight, None, 0), x) else FEW_ROWS


def _fastest(matrix: FrozenMatrix, x: Tensor) -> float:
    """Return the best of several timings, in seconds: other processes disturb the rest."""
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        matrix.multiply(x)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class FrozenLinear(nn.Module):
    """Replaces an ``nn.Linear`` of the model."""

    def __init__(self, linear: nn.Linear, targets: list[LoraTarget], slot: PassSlot, max_packed_rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Owned here, so that the parameters of the model are those it computes with, and sharding finds them.
        self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias
        self.quantized = quantized_weights(linear).get("weight")
        self.matrix = (
            FrozenMatrix.of(self, max_packed_rows) if self.quantized is None else QuantizedMatrix(self.quantized, self)
        )
        self.targets = targets
        self.slot = slot
        self.siblings: Siblings | None = None
        # Makes autograd record the layer even where its input has no gradient (the first layer).
        self._anchor = torch.empty(0, device=linear.weight.device, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        slices = self.slot.current.slices
        if torch.is_grad_enabled() and self.slot.current.is_trained:
            y = _LoraLinear.apply(rows, self._anchor, self, slices)
        elif self.siblings is not None and len(rows) <= self.siblings.max_rows:
            y = self.siblings.multiply(self, x, rows, slices)
        else:
            y, _ = multiply_with_adapters(rows, self.matrix, self.targets, slices)
        return y.view(*x.shape[:-1], self.out_features)


class Siblings:
    """Layers of one parent that get the same input: with few rows they are computed in one product.

    The first layer called with an input computes all outputs and stores those of the others.
    """

    def __init__(self, layers: list[FrozenLinear], max_rows: int) -> None:
        weight = torch.cat([layer.matrix.weight for layer in layers])
        biases = [layer.matrix.bias for layer in layers]
        bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
        self.layers, self.max_rows = layers, max_rows
        self.matrix = FrozenMatrix(weight, bias, max_rows, is_kept=False)
        self._ranges: dict[int, slice] = {}
        self.targets: list[LoraTarget] = []
        start = 0
        for layer in layers:
            self._ranges[id(layer)] = slice(start, start + layer.out_features)
            self.targets += [replace(t, row_offset=t.row_offset + start) for t in layer.targets]
            start += layer.out_features
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._left: set[int] = set()

    def multiply(self, layer: FrozenLinear, x: Tensor, rows: Tensor, slices: list[AdapterSlice]) -> Tensor:
        if self._input is not x or id(layer) not in self._left or self._output is None:
            self._output, _ = multiply_with_adapters(rows, self.matrix, self.targets, slices)
            self._input, self._left = x, set(self._ranges)
        self._left.discard(id(layer))
        y = self._output[:, self._ranges[id(layer)]]
        if not self._left:
            self._input = self._output = None
        return y


SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join_siblings(model: nn.Module, max_rows: int) -> None:
    """Find layers that transformers' models always call with the same input, and join them into ``Siblings``."""
    for parent in model.modules():
        for names in SIBLINGS:
            layers = [getattr(parent, name, None) for name in names]
            joined = [layer for layer in layers if isinstance(layer, FrozenLinear)]
            are_alike = len({(layer.in_features, layer.matrix.bias is None) for layer in joined}) == 1
            if max_rows and len(joined) == len(names) and are_alike:
                siblings = Siblings(joined, min(max_rows, FEW_ROWS))
                for layer in joined:
                    layer.siblings = siblings
                    layer.matrix.unpack()


class Product(NamedTuple):
    """What the backward pass of a low-rank product needs."""

    part: AdapterSlice | GroupedSlices
    target: LoraTarget
    inner: Tensor
    """``A @ x``."""
    unscaled: Tensor | None = None
    """In DoRA what the layer computed for these rows, without the bias, before they were scaled."""


Products = list[Product]


def multiply_with_adapters(
    x: Tensor, matrix: FrozenMatrix, targets: list[LoraTarget], slices: list[AdapterSlice]
) -> tuple[Tensor, Products]:
    """Return the layer's output, and the inner products ``A @ x`` that its backward pass needs."""
    y = matrix.multiply(x)
    return y, add_products(x, y, targets, slices, matrix.bias)


def add_products(
    x: Tensor, y: Tensor, targets: list[LoraTarget], slices: list[AdapterSlice], bias: Tensor | None = None
) -> Products:
    """Add the low-rank products of the slices to ``y``, which has the bias in it; return the inner products."""
    products: Products = []
    if isinstance(slices, CompiledSlices) and slices.add_products(x, y, targets):
        return products
    for target in targets:
        is_grouped = isinstance(slices, GroupedSlices) and grouped.accepts(target)
        if isinstance(slices, GroupedSlices) and is_grouped:
            found = grouped.multiply(x, y, target, slices)
            products += [] if found is None else [Product(slices, target, found)]
        for part in slices:
            pair = part.weights.get(target.name)
            if pair is None or (is_grouped and part.row_scales is None):
                continue
            a, b = (factor.to(x.dtype) for factor in pair[:2])
            inner = x[part.start : part.stop] @ a.t()
            rows = y[part.start : part.stop, target.rows].addmm_(inner, b.t(), alpha=part.scale)
            unscaled = None
            if part.row_scales is not None:
                own_bias = None if bias is None else bias[target.rows]
                unscaled = _scale_rows_(rows, own_bias, part.row_scales.of(target.name), part.grads is not None)
            products.append(Product(part, target, inner, unscaled))
    return products


def _scale_rows_(rows: Tensor, bias: Tensor | None, scale: RowScale, is_trained: bool) -> Tensor | None:
    """Scale an output in place, but not the bias in it; return what it was without the bias, if that is trained."""
    unscaled = None
    if is_trained:
        unscaled = rows.clone() if bias is None else rows - bias
    rows.mul_(scale.factors_O)
    if bias is not None:
        # Not the difference times the factor plus the bias, which would round even where the factor is one.
        rows.add_(bias * (1 - scale.factors_O))
    return unscaled


def unscale_gradient(d_y: Tensor, products: Products, is_owned: bool = False) -> Tensor:
    """Return the gradient of a layer's output before DoRA scaled it; add those of magnitudes to their buffers.

    ``d_y`` is changed only with ``is_owned``, and returned itself where nothing was scaled. What the products keep
    unscaled is used up.
    """
    for part, target, _, unscaled in products:
        if isinstance(part, GroupedSlices) or part.row_scales is None:
            continue
        scale, rows = part.row_scales.of(target.name), d_y[part.start : part.stop, target.rows]
        if part.grads is not None:
            assert unscaled is not None
            _, _, d_magnitudes = part.grads[target.name]
            d_magnitudes.addcmul_(unscaled.float().mul_(rows).sum(0), scale.inverses_O)
        if is_owned:
            rows.mul_(scale.factors_O)
        elif rows.shape == d_y.shape:
            d_y, is_owned = (d_y * scale.factors_O).to(d_y.dtype), True
        else:
            d_y, is_owned = d_y.clone(), True
            d_y[part.start : part.stop, target.rows].mul_(scale.factors_O)
    return d_y


def backpropagate(x: Tensor, d_y: Tensor, products: Products, d_x: Tensor | None) -> None:
    """Add the adapters' part to ``d_x`` and their own gradients to the buffers of their slices."""
    for part, target, inner, _ in products:
        if isinstance(part, GroupedSlices):
            grouped.backpropagate(x, d_y, inner, target, part, d_x)
            continue
        a, b, *_ = part.weights[target.name]
        x_part, d_y_part = x[part.start : part.stop], d_y[part.start : part.stop, target.rows]
        d_inner = (d_y_part @ b.to(d_y.dtype)).mul_(part.scale)
        if part.grads is not None:
            d_a, d_b, *_ = part.grads[target.name]
            add_product(d_a, d_inner, x_part)
            add_product(d_b, d_y_part, inner, alpha=part.scale)
        if d_x is not None:
            d_x[part.start : part.stop].addmm_(d_inner, a.to(d_inner.dtype))


class CompiledSlices(list[AdapterSlice]):
    """The slices of decoding passes, whose products compiled functions add: one call for all adapters of a matrix."""

    def __init__(self, slices: Iterable[AdapterSlice], native: Decoding) -> None:
        super().__init__(slices)
        self._native = native
        self._tables: dict[int, PairTable | None] = {}

    def add_products(self, x: Tensor, y: Tensor, targets: list[LoraTarget]) -> bool:
        """Add the products of all pairs of ``targets``, which belong to one matrix; return false if torch has to."""
        key = id(targets)  # they live as long as their layer
        if key not in self._tables:
            self._tables[key] = self._make_table(targets)
        table = self._tables[key]
        if table is None or not self._native.accepts(x, y):
            return False
        if table.num_tasks:
            assert x.shape[1] == table.in_features
            self._native.add_pairs(x, y, table)
        return True

    def _make_table(self, targets: list[LoraTarget]) -> PairTable | None:
        pairs = []
        for target in targets:
            for part in self:
                if (pair := part.weights.get(target.name)) is not None:
                    found = LowRank(pair[0], pair[1], part.start, part.stop, target.row_offset, part.scale)
                    is_readable = found.is_possible and self._native.accepts(pair[0], pair[1].t())
                    if part.row_scales is not None or target.row_step != 1 or not is_readable:
                        return None
                    pairs.append(found)
        return PairTable(pairs)


@torch.no_grad()
def multiplies_as_torch(native: Decoding, dtype: torch.dtype) -> bool:
    """Return whether compiled functions multiply with low-rank pairs as torch does, on a probe of two adapters."""
    target, x = LoraTarget("probe", "probe", "attn", 64, 80), torch.linspace(-1, 1, 9 * 64).view(9, 64).to(dtype)
    pairs = [(torch.linspace(-1, 2, n * 64).view(n, 64), torch.linspace(1, -2, n * 80).view(n, 80).t()) for n in (3, 8)]
    weights: list[Pairs] = [{target.name: (a.to(dtype), b.to(dtype))} for a, b in pairs]
    slices = [AdapterSlice(0, 7, weights[0], 0.5), AdapterSlice(8, 9, weights[1], 2.0)]
    expected, found = (torch.ones(9, 80, dtype=dtype) for _ in range(2))
    add_products(x, expected, [target], slices)
    if add_products(x, found, [target], CompiledSlices(slices, native)):
        return False
    return bool((found - expected).abs().max() <= 8 * torch.finfo(dtype).eps * expected.abs().max())


class Grouping:
    """Decides for each pass whether the products of its adapters are grouped."""

    def __init__(self, device: torch.device, dtype: torch.dtype, hidden_size: int) -> None:
        def alone(x: Tensor, target: LoraTarget, slices: list[AdapterSlice]) -> None:
            y = torch.zeros_like(x)
            backpropagate(x, y, add_products(x, y, [target], slices), torch.zeros_like(x))

        self._device = device
        # Not compared on a CPU, where a small product takes no time to start and grouping only copies.
        self.is_used, self.reason = (
            grouped.compare(device, dtype, hidden_size, alone)
            if device.type == "cuda"
            else (False, f"grouped ones are not taken on {device.type!r}")
        )

    def __str__(self) -> str:
        return f"{'grouped' if self.is_used else 'one by one'} ({self.reason})"

    def arrange(self, slices: list[AdapterSlice]) -> list[AdapterSlice]:
        """Return the slices of a pass in the form in which they are multiplied: one alone gains nothing."""
        return GroupedSlices(slices, self._device) if self.is_used and len(slices) > 1 else slices


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: FrozenLinear, slices: list[AdapterSlice]) -> Tensor:
        y, ctx.products = multiply_with_adapters(x, layer.matrix, layer.targets, slices)
        ctx.layer = layer
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        d_y = unscale_gradient(grads[0], ctx.products)
        d_x = ctx.layer.matrix.multiply_transposed(d_y) if ctx.needs_input_grad[0] else None
        backpropagate(x, d_y, ctx.products, d_x)
        ctx.layer.matrix.add_gradient(x, d_y)
        return d_x, None, None, None
