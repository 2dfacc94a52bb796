"""The products of ``matmul.c``: of linear layers, of the gradients of their inputs and of those of their weights.

They read weights as these are stored: there is one copy of them for few rows and for many, forward and backward. torch
multiplies what they do not accept, and all where it is much faster, as on a CPU with matrix units.

Legend: N rows, K summed numbers, M columns.
"""

import ctypes
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lorimer.engine.native.library import INT, POINTER, Library, declare, load

FEW_ROWS = 64
"""Up to this many rows, reading the weights takes as long as multiplying with them."""
_WIDTH, _ROWS, _BLOCK, _CHUNK = 32, 768, 96, 512
"""What a thread packs, multiplies and turns together, at the most, as in ``matmul.c``."""
_ALONE = 1 << 17
"""Multiplications that one thread does faster than several."""
_MUCH_FASTER = 0.67
"""torch is taken only where there can be no doubt, so that every engine on a machine takes the same."""


class _Part(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("bias", POINTER), ("num_columns", INT)]


class LinearParts:
    """Weights ``(M, K)`` and biases of layers with one input, whose outputs stand beside each other."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        """Keep the places of the tensors, not the tensors."""
        self.size, self.num_columns = weights[0].shape[1], sum(len(weight) for weight in weights)
        self.dtype = weights[0].dtype
        self.is_accepted = all(
            one is None or (one.is_contiguous() and one.dtype == self.dtype) for one in (*weights, *biases)
        )
        self.is_accepted &= self.num_columns > 0 and all(weight.shape[1] == self.size for weight in weights)
        self.places = _places(weights, biases)
        self.num = len(weights)
        places = zip(self.places[: self.num], self.places[self.num :], map(len, weights), strict=True)
        self.array = (_Part * self.num)(*(_Part(*fields) for fields in places))

    def is_of(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
        """Return whether the layers still have these weights: a full run replaces them, as sharding does."""
        return _places(weights, biases) == self.places


def _places(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[int | None]:
    return [None if one is None else one.data_ptr() for one in (*weights, *biases)]


class Matmul:
    """The compiled products for one dtype."""

    def __init__(self, library: Library) -> None:
        functions = library.functions
        functions.is_paired.restype = INT
        self.dtype, self._is_paired = library.dtype, bool(functions.is_paired())
        self.compiler = library.compiler
        self.max_rows: float = math.inf
        """torch multiplies more rows."""
        rows = [POINTER, INT, INT, INT]
        to = [POINTER, INT, INT, POINTER]
        self._multiply = declare(functions.multiply, *rows, POINTER, INT, ctypes.c_float, INT, *to)
        self._multiply_transposed = declare(
            functions.multiply_transposed, *rows, POINTER, INT, INT, ctypes.c_float, INT, *to
        )
        sides = [POINTER, INT, INT, POINTER, INT, INT]
        self._add_gradient = declare(functions.add_gradient, *sides, INT, ctypes.c_float, *to)
        self._is_widened = library.dtype == torch.bfloat16 and not self._is_paired
        self._step = 2 if self._is_paired else 1
        """Numbers of a row that are multiplied together."""

    def multiply(
        self, x_NK: Tensor, parts: LinearParts, out_NM: Tensor | None = None, scale: float = 1.0
    ) -> Tensor | None:
        """Return ``x @ weight.T + bias`` of all parts, or add ``scale * x @ weight.T``; ``None`` if torch has to."""
        num_rows, size = x_NK.shape
        is_readable = parts.is_accepted and parts.dtype == self.dtype and size == parts.size
        if not (is_readable and size % self._step == 0 and self._accepts_rows(x_NK)):
            return None
        y = x_NK.new_empty(num_rows, parts.num_columns) if out_NM is None else out_NM
        if not self._accepts(y) or y.shape != (num_rows, parts.num_columns):
            return None
        x_NK = self._rows(x_NK)
        num_threads, scratch = _threads(num_rows * size * parts.num_columns, size * _WIDTH)
        self._multiply(
            x_NK.data_ptr(),
            x_NK.stride(0) // self._step,
            num_rows,
            size,
            parts.array,
            parts.num,
            scale,
            out_NM is not None,
            y.data_ptr(),
            y.stride(0),
            num_threads,
            scratch.data_ptr(),
        )
        return y

    def multiply_transposed(
        self, x_NK: Tensor, weight_KM: Tensor, out_NM: Tensor | None, scale: float
    ) -> Tensor | None:
        """Return ``scale * x @ weight``, or add it to ``out``; ``None`` if torch has to."""
        num_rows, size = x_NK.shape
        y = x_NK.new_empty(num_rows, weight_KM.shape[1]) if out_NM is None else out_NM
        if size % self._step or not (self._accepts_rows(x_NK) and self._accepts(weight_KM, y)):
            return None
        if weight_KM.numel() == 0:
            return None
        if len(weight_KM) != size or y.shape != (num_rows, weight_KM.shape[1]):
            return None
        x_NK = self._rows(x_NK)
        num_threads, scratch = _threads(num_rows * weight_KM.numel(), (_CHUNK + _ROWS) * _WIDTH)
        self._multiply_transposed(
            x_NK.data_ptr(),
            x_NK.stride(0) // self._step,
            num_rows,
            size,
            weight_KM.data_ptr(),
            weight_KM.shape[1],
            weight_KM.stride(0),
            scale,
            out_NM is not None,
            y.data_ptr(),
            y.stride(0),
            num_threads,
            scratch.data_ptr(),
        )
        return y

    def add_gradient(self, gradient_KM: Tensor, left_NK: Tensor, right_NM: Tensor, scale: float) -> bool:
        """Add ``scale * left.T @ right`` to a gradient in float32; return false if torch has to."""
        if gradient_KM.stride(1) != 1:
            gradient_KM, left_NK, right_NM = gradient_KM.t(), right_NM, left_NK
        num_rows = len(left_NK)
        is_wide = gradient_KM.dtype == torch.float32 and gradient_KM.stride(1) == 1
        is_wide &= gradient_KM.shape == (left_NK.shape[1], right_NM.shape[1]) and len(right_NM) == num_rows
        if not (is_wide and gradient_KM.numel() and 0 < num_rows <= self.max_rows and self._accepts(left_NK, right_NM)):
            return False
        num_threads, scratch = _threads(num_rows * gradient_KM.numel(), _CHUNK * (_WIDTH + _BLOCK))
        self._add_gradient(
            left_NK.data_ptr(),
            left_NK.stride(0),
            left_NK.shape[1],
            right_NM.data_ptr(),
            right_NM.stride(0),
            right_NM.shape[1],
            num_rows,
            scale,
            gradient_KM.data_ptr(),
            gradient_KM.stride(0),
            num_threads,
            scratch.data_ptr(),
        )
        return True

    def _accepts(self, *tensors: Tensor) -> bool:
        return all(
            one.dtype == self.dtype and one.dim() == 2 and (one.stride(1) == 1 or one.shape[1] == 1) for one in tensors
        )

    def _accepts_rows(self, x: Tensor) -> bool:
        """Return whether the rows can be read, which are to be multiplied with columns."""
        is_aligned = self._step == 1 or (x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0)
        is_recorded = x.requires_grad and torch.is_grad_enabled()
        return is_aligned and not is_recorded and 0 < len(x) <= self.max_rows and self._accepts(x)

    def _rows(self, x: Tensor) -> Tensor:
        return x.float() if self._is_widened else x


def _threads(num_operations: int, scratch_size: int) -> tuple[int, Tensor]:
    """Return the number of threads, and memory in which each of them packs up to ``scratch_size`` numbers."""
    num_threads = torch.get_num_threads() if num_operations > _ALONE else 1
    return num_threads, torch.empty(num_threads * scratch_size, dtype=torch.float32)


def multiply(x_NK: Tensor, weight_KM: Tensor) -> Tensor:
    """Return ``x @ weight``."""
    found = _multiply(x_NK, weight_KM, None, 1.0)
    return x_NK @ weight_KM if found is None else found


def add_multiplied(out_NM: Tensor, x_NK: Tensor, weight_KM: Tensor, scale: float = 1.0) -> None:
    """Add ``scale * x @ weight`` to ``out``."""
    if _multiply(x_NK, weight_KM, out_NM, scale) is None:
        out_NM.addmm_(x_NK, weight_KM, alpha=scale)


def _multiply(x_NK: Tensor, weight_KM: Tensor, out_NM: Tensor | None, scale: float) -> Tensor | None:
    """Multiply with a weight that is stored row by row, or column by column; ``None`` if torch has to."""
    functions = functions_for(x_NK)
    if functions is None:
        return None
    if weight_KM.stride(1) == 1:
        return functions.multiply_transposed(x_NK, weight_KM, out_NM, scale)
    return functions.multiply(x_NK, LinearParts([weight_KM.t()], [None]), out_NM, scale)


def functions_for(x: Tensor) -> Matmul | None:
    """Return the functions for products of tensors like ``x``, or ``None`` if torch has to multiply them."""
    found = find(x.device.type, x.dtype)
    return None if isinstance(found, str) else found


@functools.cache
def find(device_type: str, dtype: torch.dtype) -> Matmul | str:
    """Return the functions for a device and dtype, or why there are none."""
    library = load(dtype) if device_type == "cpu" else "they are for CPUs"
    if isinstance(library, str):
        return library
    functions = Matmul(library)
    with torch.no_grad():
        if not all(_are_right(functions, dtype)):
            return "compiled functions give other results"
        if _is_torch_faster(functions, 16):
            return "torch is faster"
        functions.max_rows = FEW_ROWS if _is_torch_faster(functions, 1024) else math.inf
    return functions


def describe(device_type: str, dtype: torch.dtype) -> str:
    """Return what multiplies matrices, compiled functions or torch, and why."""
    found = find(device_type, dtype)
    if isinstance(found, str):
        return f"products: torch ({found})"
    rows = "" if found.max_rows == math.inf else f" of up to {found.max_rows} rows, others by torch, which is faster"
    return f"products: compiled by {found.compiler}{rows}"


def _are_right(functions: Matmul, dtype: torch.dtype) -> Iterator[bool]:
    """Compare each function with torch, for few rows and for many, with columns that do not fill a vector."""

    def probe(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=numbers).to(dtype)

    def is_close(found: Tensor | None, expected: Tensor) -> bool:
        if found is None or not found.isfinite().all():
            return False
        return bool((found.double() - expected).abs().max() <= 16 * torch.finfo(dtype).eps * expected.abs().max())

    numbers = torch.Generator().manual_seed(0)
    first, second, bias, other = probe(69, 96), probe(32, 96), probe(1, 69)[0], probe(66, 69)
    weights, parts = torch.cat([first, second]).double(), LinearParts([first, second], [bias, None])
    for num_rows in (1, 7, 29):
        x, d_y, d_x, gradient = (
            probe(num_rows, 96),
            probe(num_rows, 80)[:, 3:69],
            probe(num_rows, 69),
            torch.ones(66, 96),
        )
        y = x.double() @ weights.t()
        y[:, :69] += bias
        yield is_close(functions.multiply(x, parts), y)
        twice = functions.multiply(x, LinearParts([second], [None]), y[:, 69:].to(dtype), 0.5)
        yield is_close(twice, y[:, 69:].to(dtype) + 0.5 * y[:, 69:])
        expected = d_x + 0.5 * (x[:, :66].double() @ other.double())
        yield is_close(functions.multiply_transposed(x[:, :66], other, d_x, 0.5), expected)
        expected = 1 + 2 * (d_y.t().double() @ x.double())
        yield functions.add_gradient(gradient, d_y, x, 2.0) and is_close(gradient, expected)


def _is_torch_faster(functions: Matmul, num_rows: int) -> bool:
    """Return whether torch multiplies so many rows in much less time, with one thread."""
    x, weight = (torch.ones(rows, 512, dtype=functions.dtype) for rows in (num_rows, 512))
    parts, num_threads = LinearParts([weight], [None]), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = [
            (_seconds(lambda: functions.multiply(x, parts)), _seconds(lambda: F.linear(x, weight))) for _ in range(9)
        ]
    finally:
        torch.set_num_threads(num_threads)
    ours, theirs = (min(times) for times in zip(*rounds, strict=True))  # other processes disturb the rest
    return theirs < _MUCH_FASTER * ours


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
