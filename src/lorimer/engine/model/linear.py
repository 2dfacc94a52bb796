"""Frozen linear layers with the low-rank pairs of many adapters on top.

The base weight never gets a gradient. Each adapter of the pass owns a slice of the token axis; its products are
plain matrix products on that slice, and its gradients are added, in float32, straight to the buffers the pass
brings along, so autograd only carries the activations. In DoRA the rows are scaled afterwards (``adapters/dora.py``).
Experts are in ``experts.py``, the output head in ``head.py``, weights in 8 or 4 bits in ``quantization.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
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
from lorimer.engine.native import matmul
from lorimer.engine.native.decode import Decoding, LowRank, PairTable
from lorimer.engine.native.matmul import LinearParts
from lorimer.engine.training.batch import AdapterSlice, PassSlot


class FrozenMatrix:
    """A frozen weight ``(O, I)``, and a bias if the layer has one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._tensors: Mapping[str, Tensor | None] = {"weight": weight.detach(), "bias": bias}
        self._biases: Mapping[str, Tensor | None] = self._tensors
        self._parts: LinearParts | None = None

    @classmethod
    def of(cls, module: nn.Module) -> "FrozenMatrix":
        """Return a matrix whose weight and bias are those that ``module`` has when they are needed.

        Sharding replaces the parameters of a module before and after each pass.
        """
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        matrix = cls(weight, bias)
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

    def multiply(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x (rows, I)``."""
        y = self._multiply_compiled(x, [self.weight], [self.bias])
        return F.linear(x, self.weight, self.bias) if y is None else y

    def _multiply_compiled(self, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor | None:
        functions = matmul.functions_for(x)
        if functions is None:
            return None
        if self._parts is None or not self._parts.is_of(weights, biases):
            self._parts = LinearParts(weights, biases)
        return functions.multiply(x, self._parts)

    def multiply_transposed(self, d_y: Tensor) -> Tensor:
        return matmul.multiply(d_y, self.weight)

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
    """A frozen weight in 8 or 4 bits."""

    def __init__(self, quantized: QuantizedWeight, module: nn.Module) -> None:
        """Take the bias from ``module``, whose own weight is empty."""
        super().__init__(quantized.codes[:0], None)
        self._tensors = self._biases = module._parameters
        self._quantized = quantized

    def multiply(self, x: Tensor) -> Tensor:
        y = self._quantized.multiply(x)
        return y if self.bias is None else y.add_(self.bias)

    def multiply_transposed(self, d_y: Tensor) -> Tensor:
        return self._quantized.multiply_transposed(d_y)

    def dense_rows(self, rows: slice | Tensor) -> Tensor:
        return self._quantized.rows(rows)


class JoinedMatrix(FrozenMatrix):
    """The weights of layers that get the same input, for passes that are not computed backward: one product for all."""

    def __init__(self, matrices: Sequence[FrozenMatrix]) -> None:
        super().__init__(matrices[0].weight, None)
        # Not the weight itself, which sharding has to free.
        self._tensors, self._biases = matrices[0]._tensors, matrices[0]._biases
        self._matrices = matrices
        self._is_dense = not any(isinstance(matrix, QuantizedMatrix) for matrix in matrices)

    @property
    def bias(self) -> Tensor | None:
        found = [matrix.bias for matrix in self._matrices]
        if all(bias is None for bias in found):
            return None
        pairs = zip(self._matrices, found, strict=True)
        return torch.cat([m.weight.new_zeros(len(m.weight)) if bias is None else bias for m, bias in pairs])

    def multiply(self, x: Tensor) -> Tensor:
        y = None
        if self._is_dense:
            y = self._multiply_compiled(x, [m.weight for m in self._matrices], [m.bias for m in self._matrices])
        return torch.cat([matrix.multiply(x) for matrix in self._matrices], 1) if y is None else y


class FrozenLinear(nn.Module):
    """Replaces an ``nn.Linear`` of the model."""

    def __init__(self, linear: nn.Linear, targets: list[LoraTarget], slot: PassSlot) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Owned here, so that the parameters of the model are those it computes with, and sharding finds them.
        self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias
        self.quantized = quantized_weights(linear).get("weight")
        self.matrix = FrozenMatrix.of(self) if self.quantized is None else QuantizedMatrix(self.quantized, self)
        self.targets = targets
        self.slot = slot
        # Makes autograd record the layer even where its input has no gradient (the first layer).
        self._anchor = torch.empty(0, device=linear.weight.device, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        slices = self.slot.current.slices
        if torch.is_grad_enabled() and self.slot.current.is_trained:
            y = _LoraLinear.apply(rows, self._anchor, self, slices)
        else:
            y, _ = multiply_with_adapters(rows, self.matrix, self.targets, slices)
        return y.view(*x.shape[:-1], self.out_features)


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
    return y, add_products(x, y, targets, slices, matrix)


def add_products(
    x: Tensor, y: Tensor, targets: list[LoraTarget], slices: list[AdapterSlice], matrix: FrozenMatrix | None = None
) -> Products:
    """Add the low-rank products of the slices to ``y``, the output of the matrix; return the inner products."""
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
            inner, rows = matmul.multiply(x[part.start : part.stop], a.t()), y[part.start : part.stop, target.rows]
            matmul.add_multiplied(rows, inner, b.t(), part.scale)
            unscaled = None
            if part.row_scales is not None:
                bias = None if matrix is None else matrix.bias
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
        d_inner = matmul.multiply(d_y_part, b.to(d_y.dtype)).mul_(part.scale)
        if part.grads is not None:
            d_a, d_b, *_ = part.grads[target.name]
            add_product(d_a, d_inner, x_part)
            add_product(d_b, d_y_part, inner, alpha=part.scale)
        if d_x is not None:
            matmul.add_multiplied(d_x[part.start : part.stop], d_inner, a.to(d_inner.dtype))


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
