"""The functions that an uploaded loss may call, and what a call costs.

Listed are functions of tensors and numbers that change nothing in place, use no randomness, expose no uninitialised
memory, and whose output size follows from their arguments. The cost of a call is a bound, known before it
runs, on the elements it makes or visits. ``custom_loss`` reads the graphs and runs them.
"""

import inspect
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Cost = Callable[[Args, Kwargs], int]

MAX_INT_BITS = 63
_EQUATION = re.compile(r"[a-zA-Z]*(,[a-zA-Z]*)*(->[a-zA-Z]*)?")
_TENSOR_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "T", "mT"})
_RESULT_FIELDS = frozenset({"values", "indices", "min", "max"})
ATTRIBUTES = _TENSOR_ATTRIBUTES | _RESULT_FIELDS


class Call(NamedTuple):
    function: Callable[..., Any]
    cost: Cost
    max_args: int | None = None
    """Arguments by position end here; the next would have the function write into one of them."""


# ── costs by shape ────────────────────────────────────────────────────────────────────────────────────


def extent(shape: Iterable[int]) -> int:
    """Return the number of elements, counting an empty dimension as 1: reducing it away creates elements."""
    return math.prod(max(size, 1) for size in shape)


def read(args: Args, kwargs: Kwargs) -> int:
    """Return the number of elements of all tensors among the arguments."""
    return sum(extent(tensor.shape) for tensor in _tensors(args, kwargs))


def _tensors(args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))


def _broadcast_extent(shapes: Iterable[Sequence[int]]) -> int:
    result: list[int] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for i in range(1, len(shape) + 1):
            result[-i] = max(result[-i], shape[-i])
    return extent(result)


def _broadcast(args: Args, kwargs: Kwargs) -> int:
    return _broadcast_extent(tensor.shape for tensor in _tensors(args, kwargs))


def _product(args: Args, kwargs: Kwargs) -> int:
    return math.prod(extent(tensor.shape) for tensor in _tensors(args, kwargs))


def _matrix_product(args: Args, kwargs: Kwargs) -> int:
    if len(args) != 2 or not all(isinstance(value, Tensor) and value.ndim for value in args):
        raise TypeError("two tensors by position are accepted")
    left, right = args
    rows = _broadcast_extent([left.shape[:-1], (*right.shape[:-2], 1)])
    return rows * extent(left.shape[-1:]) * (extent(right.shape[-1:]) if right.ndim > 1 else 1)


def _einsum(args: Args, kwargs: Kwargs) -> int:
    equation = args[0].replace(" ", "") if args and isinstance(args[0], str) else ""
    if not _EQUATION.fullmatch(equation):
        raise ValueError("an equation of letters, commas and -> is accepted")
    sizes: dict[str, int] = {}
    for labels, tensor in zip(equation.split("->")[0].split(","), _tensors(args, kwargs), strict=True):
        for label, size in zip(labels, tensor.shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    return extent(sizes.values())


def _pieces(args: Args, kwargs: Kwargs) -> int:
    # Each piece is an object with its own place in the autograd graph, dearer than its elements.
    return 64 * read(args, kwargs)


# ── costs by sizes among the arguments ────────────────────────────────────────────────────────────────


def _sizes(args: Args, kwargs: Kwargs, name: str) -> list[int]:
    """Return integers given as ``name``, as one tuple, or one by one."""
    given = kwargs.get(name, args[0] if args and isinstance(args[0], tuple | list) else args)
    sizes = list(given) if isinstance(given, tuple | list) else [given]
    if not all(isinstance(size, int) for size in sizes):
        raise TypeError(f"integers are accepted as {name}")
    return sizes


def _own_extent(args: Args) -> int:
    if not args or not isinstance(args[0], Tensor):
        raise TypeError("a tensor is accepted as the first argument, by position")
    return extent(args[0].shape)


def _filled(args: Args, kwargs: Kwargs) -> int:
    return extent(_sizes(args, kwargs, "size"))


def _full(args: Args, kwargs: Kwargs) -> int:
    return extent(_sizes(args[:1], kwargs, "size"))


def _new_filled(args: Args, kwargs: Kwargs) -> int:
    return _filled(args[1:], kwargs)


def _new_full(args: Args, kwargs: Kwargs) -> int:
    return _full(args[1:], kwargs)


def _expand(args: Args, kwargs: Kwargs) -> int:
    _own_extent(args)
    return _broadcast_extent([args[0].shape, [abs(size) for size in _sizes(args[1:], kwargs, "size")]])


def _repeat(args: Args, kwargs: Kwargs) -> int:
    return _own_extent(args) * extent(_sizes(args[1:], kwargs, "dims" if "dims" in kwargs else "repeats"))


def _repeat_interleave(args: Args, kwargs: Kwargs) -> int:
    (repeats,) = _sizes(args[1:2], kwargs, "repeats") or [0]
    if repeats < 1:  # a tensor alone would be taken for the repeats
        raise ValueError("repeats from 1 are accepted, one integer for all elements")
    return _own_extent(args) * repeats


def _range(args: Args, kwargs: Kwargs) -> int:
    if not 1 <= len(args) <= 3:
        raise TypeError("start, end and step are accepted by position")
    _numbers(args, {})
    start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    return math.ceil(abs((end - start) / step)) + 1


def _linspace(args: Args, kwargs: Kwargs) -> int:
    return extent(_sizes(args[2:3], kwargs, "steps"))


def _one_hot(args: Args, kwargs: Kwargs) -> int:
    num_classes = _sizes(args[1:2], kwargs, "num_classes")
    if not num_classes or num_classes[0] < 1:
        raise ValueError("num_classes from 1 is accepted")
    return _own_extent(args) * num_classes[0]


def _pad(args: Args, kwargs: Kwargs) -> int:
    _own_extent(args)
    pads, shape = _sizes(args[1:2], kwargs, "pad"), list(args[0].shape)
    for i in range(len(pads) // 2):
        shape[-1 - i] += pads[2 * i] + pads[2 * i + 1]
    return extent(shape)


def _difference(args: Args, kwargs: Kwargs) -> int:
    (order,) = _sizes(args[1:2] or [1], kwargs, "n")
    return read(args, kwargs) * max(order, 1)


# ── costs by index ────────────────────────────────────────────────────────────────────────────────────


def _index_select(args: Args, kwargs: Kwargs) -> int:
    (dim,) = _sizes(args[1:2], kwargs, "dim")
    index = kwargs["index"] if "index" in kwargs else args[2]
    return _own_extent(args) // extent([args[0].shape[dim]]) * _own_extent([index])


def _item(args: Args, kwargs: Kwargs) -> int:
    """``x[index]``: what the index picks of the dimensions it names, times the dimensions it leaves."""
    container, index = args
    if isinstance(container, tuple | list):
        if not isinstance(index, int | slice):
            raise TypeError("an integer or slice is accepted as the index of a tuple")
        return 0
    if not isinstance(container, Tensor):
        raise TypeError("a tensor or tuple is accepted")
    keys = list(index) if isinstance(index, tuple) else [index]
    ranks = [_index_rank(key) for key in keys]
    picked_dims: list[int] = []
    picks: list[Sequence[int]] = []
    position = 0
    for key, rank in zip(keys, ranks, strict=True):
        if isinstance(key, Tensor | list):
            picked_dims += container.shape[position : position + rank]
            picks.append((len(key),) if isinstance(key, list) else (key.numel(),) if _is_mask(key) else key.shape)
        position += container.ndim - sum(ranks) if key is Ellipsis else rank
    return extent(container.shape) // extent(picked_dims) * _broadcast_extent(picks)


def _is_mask(key: Tensor) -> bool:
    return key.dtype in (torch.bool, torch.uint8)


def _index_rank(key: Any) -> int:
    if key is None or key is Ellipsis:
        return 0
    if isinstance(key, Tensor):
        return key.ndim if _is_mask(key) else 1
    if isinstance(key, slice) or (isinstance(key, int) and not isinstance(key, bool)):
        return 1
    if isinstance(key, list) and all(isinstance(item, int) for item in key):
        return 1
    raise TypeError("integers, slices, None, ..., tensors and lists of integers are accepted as an index")


# ── costs of numbers ──────────────────────────────────────────────────────────────────────────────────


def _numbers(args: Args, kwargs: Kwargs) -> int:
    if not all(isinstance(value, int | float) for value in (*args, *kwargs.values())):
        raise TypeError("numbers are accepted; for tensors torch has a function that keeps the gradient")
    return 0


def _literal(args: Args, kwargs: Kwargs) -> int:
    numbers = list(_leaves(args))
    _numbers(numbers, {})
    return len(numbers)


def _new_literal(args: Args, kwargs: Kwargs) -> int:
    return _literal(args[1:], kwargs)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _operands(args: Args, kwargs: Kwargs) -> int:
    # Tuples and strings have operators too, and some of them make very long ones.
    if not all(isinstance(value, int | float | Tensor) for value in args):
        raise TypeError("tensors and numbers are accepted")
    return _broadcast(args, kwargs)


def _power(args: Args, kwargs: Kwargs) -> int:
    cost = _operands(args, kwargs)
    if all(isinstance(value, int) for value in args) and abs(args[0]).bit_length() * args[1] > MAX_INT_BITS:
        raise OverflowError(f"integers of at most {MAX_INT_BITS} bits are accepted")
    return cost


def _shift(args: Args, kwargs: Kwargs) -> int:
    cost = _operands(args, kwargs)
    if all(isinstance(value, int) for value in args) and abs(args[0]).bit_length() + args[1] > MAX_INT_BITS:
        raise OverflowError(f"integers of at most {MAX_INT_BITS} bits are accepted")
    return cost


# ── the tables ────────────────────────────────────────────────────────────────────────────────────────

_TENSOR_CALLS: Mapping[Cost, str] = {
    # elementwise; reductions; along a dimension; activations; losses; forms of one tensor
    _broadcast: """
        abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
        bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad digamma div divide entr eq erf erfc
        erfcx erfinv exp exp2 expit expm1 fix float_power floor floor_divide fmax fmin fmod frac gammaln ge greater
        greater_equal gt heaviside hypot isclose isfinite isinf isnan ldexp le lerp less less_equal lgamma log log10
        log1p log2 log_ndtr logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill
        masked_select maximum minimum mul multiply nan_to_num ndtr ndtri ne neg negative not_equal positive pow
        rad2deg reciprocal remainder round rsqrt rsub sgn sign signbit sin sinc sinh sqrt square sub subtract tan
        true_divide trunc where xlog1py xlogy
        all amax amin aminmax any argmax argmin count_nonzero dist logsumexp max mean median min mode nanmean
        nanmedian nansum norm prod std std_mean sum var var_mean vector_norm
        argsort cummax cummin cumprod cumsum flip kthvalue log_softmax logcumsumexp msort roll softmax sort topk tril
        triu
        celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish normalize relu relu6 selu sigmoid silu
        softmin softplus softshrink softsign tanh tanhshrink
        binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity gaussian_nll_loss hinge_embedding_loss
        huber_loss kl_div l1_loss margin_ranking_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
        bool clone contiguous detach dim double flatten float full_like half int long movedim narrow ndimension
        nelement numel ones_like permute ravel reshape select size squeeze swapaxes swapdims t transpose unflatten
        unsqueeze view zeros_like
    """,
    read: """
        bucketize cat concat concatenate cross_entropy expand_as gather hstack index_add index_copy index_fill nll_loss
        reshape_as scatter scatter_add scatter_reduce stack take to type_as view_as vstack
    """,
    _product: "outer ger quantile nanquantile",
    _matrix_product: "bmm dot matmul mm mv",
    _einsum: "einsum",
    _pieces: "chunk split unbind",
    _filled: "ones zeros",
    _full: "full",
    _new_filled: "new_ones new_zeros",
    _new_full: "new_full",
    _expand: "broadcast_to expand",
    _repeat: "repeat tile",
    _repeat_interleave: "repeat_interleave",
    _range: "arange",
    _linspace: "linspace",
    _one_hot: "one_hot",
    _pad: "pad",
    _difference: "diff",
    _index_select: "index_select",
    _literal: "tensor",
    _new_literal: "new_tensor",
}

_OPERATORS: Mapping[Cost, str] = {
    _operands: "abs add and_ eq floordiv ge gt invert le lt mod mul ne neg or_ pos sub truediv xor",
    _power: "pow",
    _shift: "lshift rshift",
    _matrix_product: "matmul",
    _item: "getitem",
}

_MATH = """
    acos asin atan atan2 ceil copysign cos cosh erf erfc exp expm1 fabs floor fmod hypot isfinite isinf isnan log log10
    log1p log2 pow sin sinh sqrt tan tanh trunc
"""

# A name means the same wherever torch has it. On the right, where torch.fx says the function is.
_NAMESPACES = (
    ("torch.", torch),
    ("torch.functional.", torch),
    ("torch.nn.functional.", F),
    ("torch._C._nn.", F),
    ("torch.special.", torch.special),
    ("torch._C._special.special_", torch.special),
)


def _attribute(value: Any, name: str) -> Any:
    is_result = type(value).__module__ == "torch.return_types"
    if name not in (_TENSOR_ATTRIBUTES if isinstance(value, Tensor) else _RESULT_FIELDS if is_result else ()):
        raise TypeError(f"a {type(value).__name__} has no attribute {name!r} that may be read")
    return getattr(value, name)


def _choose(condition: Tensor, input: Any, other: Any) -> Tensor:
    # Without its last two arguments torch.where would list indices, several for each element.
    return torch.where(condition, input, other)


def _max_args(function: Callable[..., Any]) -> int | None:
    try:
        parameters = list(inspect.signature(function).parameters)
    except ValueError:  # built in: such parameters go by name only
        return None
    return next((i for i, name in enumerate(parameters) if name in ("inplace", "out")), None)


def _list_functions() -> dict[str, Call]:
    calls = {f"math.{name}": Call(getattr(math, name), _numbers) for name in _MATH.split()}
    for cost, names in _OPERATORS.items():
        calls |= {f"operator.{name}": Call(getattr(operator, name), cost) for name in names.split()}
    for cost, names in _TENSOR_CALLS.items():
        for name in names.split():
            for prefix, namespace in _NAMESPACES:
                function = getattr(namespace, name, None)
                if callable(function):
                    calls[prefix + name] = Call(function, cost, _max_args(function))
    calls["torch.where"] = Call(_choose, _broadcast)
    calls["torch._C._nn.log_sigmoid"] = Call(F.logsigmoid, _broadcast)
    for name in ("torch.linalg.vector_norm", "torch._C._linalg.linalg_vector_norm"):
        calls[name] = Call(torch.linalg.vector_norm, _broadcast)
    calls |= {f"torch.sym_{name}": Call(getattr(torch, f"sym_{name}"), _numbers) for name in ("max", "min")}
    return calls | dict.fromkeys(("getattr", "builtins.getattr"), Call(_attribute, read))


def _list_methods() -> dict[str, Call]:
    return {
        name: Call(getattr(Tensor, name), cost)
        for cost, names in _TENSOR_CALLS.items()
        for name in names.split()
        if hasattr(Tensor, name)
    }


FUNCTIONS: Mapping[str, Call] = _list_functions()
"""By qualified name, as ``torch.fx`` gives it."""
METHODS: Mapping[str, Call] = _list_methods()
"""Of tensors."""
