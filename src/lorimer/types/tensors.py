"""Tensors on the wire: dense or compressed sparse rows (CSR), float32 or int64, backed by NumPy arrays.

A tensor is validated on construction: the number of values against the shape, and sparse indices against their bounds,
so that a declared size alone never allocates memory. torch is imported only for callers that use torch tensors. The
encoders convert tensors to bytes.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lorimer.types.extras import load_torch

TensorDtype = Literal["int64", "float32"]

DTYPES: dict[TensorDtype, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
"""The NumPy dtypes as on the wire: little-endian."""
PADDING_LOGPROB = -99999.0
"""Fills the cells of ``TopkLogprobs`` without a token, whose token id is 0."""

Array = NDArray[Any]
TorchTensor = Any
"""A ``torch.Tensor``; ``Any`` because torch is optional."""


@dataclass(frozen=True, eq=False, init=False, repr=False)
class TensorData:
    """A dense or sparse tensor. ``shape`` defaults to that of the values if dense; a sparse tensor needs two sizes.

    Cells that a sparse tensor does not list become the ``pad_value`` of the conversion.
    """

    dtype: TensorDtype
    shape: list[int] | None = None
    _numpy: Array = field(default_factory=lambda: np.empty(0))
    """The values: in their shape if dense, one-dimensional if sparse."""
    _csr: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """Row pointers and column indices of a sparse tensor."""

    def __init__(
        self,
        data: ArrayLike | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: ArrayLike | None = None,
        sparse_col_indices: ArrayLike | None = None,
    ) -> None:
        if dtype is None:
            raise TypeError("TensorData takes a dtype, 'float32' or 'int64'")
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of 'float32', 'int64'")
        values = _as_array([] if data is None else data, DTYPES[dtype])
        dims = None if shape is None else [int(size) for size in shape]
        csr = None
        if sparse_crow_indices is None and sparse_col_indices is None:
            values = _reshape(values, dims)
        else:
            csr = _check_csr(values, dims, sparse_crow_indices, sparse_col_indices)
        for name, value in (("dtype", dtype), ("shape", dims), ("_numpy", values), ("_csr", csr)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        sparse = "" if self._csr is None else f", sparse with {self._numpy.size} values"
        return f"TensorData(dtype={self.dtype!r}, shape={list(self.dense_shape)}{sparse})"

    @property
    def data(self) -> list[Any]:
        """The values as a flat list; only the listed ones if sparse."""
        values: list[Any] = self._numpy.ravel().tolist()
        return values

    @cached_property
    def sparse_crow_indices(self) -> list[int] | None:
        """The offset of each row among the values, and the end of the last row."""
        return None if self._csr is None else self._csr[0].tolist()

    @cached_property
    def sparse_col_indices(self) -> list[int] | None:
        """The column of each value."""
        return None if self._csr is None else self._csr[1].tolist()

    @property
    def values(self) -> Array:
        """The values without a copy: in their shape if dense, one-dimensional if sparse."""
        return self._numpy

    @property
    def csr(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Row pointers and column indices as arrays, or ``None`` if the tensor is dense."""
        return self._csr

    @property
    def dense_shape(self) -> tuple[int, ...]:
        return self._numpy.shape if self._csr is None else tuple(self.shape or ())

    @classmethod
    def from_numpy(cls, array: Array) -> Self:
        return cls(array, _dtype_of(array), array.shape)

    @classmethod
    def from_torch(cls, tensor: TorchTensor) -> Self:
        return cls.from_numpy(_numpy_of(tensor))

    @classmethod
    def from_torch_sparse(cls, tensor: TorchTensor, pad_value: int = 0) -> Self:
        """Convert to sparse, omitting cells equal to ``pad_value``, if that is smaller.

        Stay dense otherwise, or if not 2-D.
        """
        return cls.from_numpy_sparse(_numpy_of(tensor), pad_value)

    @classmethod
    def from_numpy_sparse(cls, array: Array, pad_value: int = 0) -> Self:
        """Like ``from_torch_sparse``, for a NumPy array."""
        pad_value = _check_pad_value(pad_value)
        if array.ndim != 2:
            return cls.from_numpy(array)
        rows, columns = np.nonzero(array != pad_value)
        if len(array) + 1 + 2 * len(rows) >= array.size:
            return cls.from_numpy(array)
        crow = np.zeros(len(array) + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=len(array)), out=crow[1:])
        return cls(array[rows, columns], _dtype_of(array), array.shape, crow, columns)

    def to_numpy(self, pad_value: int = 0) -> Array:
        """Return the dense array. A dense tensor returns its own array without a copy."""
        if self._csr is None:
            return self._numpy
        crow, columns = self._csr
        dense = np.full(self.dense_shape, _check_pad_value(pad_value), DTYPES[self.dtype])
        dense[np.repeat(np.arange(len(crow) - 1), np.diff(crow)), columns] = self._numpy
        return dense

    def to_torch(self, pad_value: int = 0) -> TorchTensor:
        """Like ``to_numpy``, as a torch tensor. A dense tensor shares its memory."""
        return load_torch("TensorData.to_torch").from_numpy(self.to_numpy(pad_value))

    def tolist(self, pad_value: int = 0) -> list[Any]:
        values: list[Any] = self.to_numpy(pad_value).tolist()
        return values


@dataclass(frozen=True, slots=True, eq=False)
class TopkLogprobs:
    """The k most likely tokens at each position; cells without a token hold token 0 and logprob -99999."""

    token_ids: Array
    """``int32[length, k]``"""
    logprobs: Array
    """``float32[length, k]``"""

    def to_lists(self) -> list[list[tuple[int, float]] | None]:
        """Return (token, logprob) pairs for each position, or ``None`` where there are none."""
        if not self.token_ids.size:
            return []
        is_token = (self.token_ids != 0) | (self.logprobs != PADDING_LOGPROB)
        width = self.token_ids.shape[1]
        lengths = width - np.argmax(is_token[:, ::-1], axis=1)
        lengths[~is_token[:, 0]] = 0
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), lengths.tolist(), strict=True)
        return [list(zip(ids[:n], logprobs[:n], strict=True)) if n else None for ids, logprobs, n in rows]


# ── checks ────────────────────────────────────────────────────────────────────────────────────────────


def _as_array(data: ArrayLike, dtype: np.dtype[Any]) -> Array:
    """Convert to a writable array: torch warns about read-only ones, and the bytes of a request are read-only."""
    try:
        array = np.asarray(data, dtype)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"data cannot be read as numbers of {dtype}") from None
    return array if array.flags.writeable else array.copy()


def _reshape(values: Array, shape: list[int] | None) -> Array:
    if shape is None or list(values.shape) == shape:
        return values
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape} has a negative size")
    if math.prod(shape) != values.size:
        raise ValueError(f"shape {shape} takes {math.prod(shape)} values, but there are {values.size}")
    return values.reshape(shape)


def _check_csr(
    values: Array, shape: list[int] | None, crow_indices: ArrayLike | None, col_indices: ArrayLike | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if crow_indices is None or col_indices is None:
        raise ValueError("a sparse tensor takes both sparse_crow_indices and sparse_col_indices")
    if shape is None or len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"shape {shape} is not that of a sparse tensor, which has two sizes of 0 or more")
    crow = _as_array(crow_indices, DTYPES["int64"])
    columns = _as_array(col_indices, DTYPES["int64"])
    if values.ndim != 1 or crow.ndim != 1 or columns.ndim != 1:
        raise ValueError("values and indices of a sparse tensor are one-dimensional")
    if len(crow) != shape[0] + 1:
        raise ValueError(f"sparse_crow_indices has {len(crow)} entries; {shape[0]} rows take {shape[0] + 1}")
    if len(columns) != len(values):
        raise ValueError(f"sparse_col_indices has {len(columns)} entries for {len(values)} values")
    if crow[0] != 0 or crow[-1] != len(values) or np.any(crow[1:] < crow[:-1]):
        raise ValueError(f"sparse_crow_indices does not rise from 0 to {len(values)}, the number of values")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise ValueError(f"sparse_col_indices has a column outside 0 to {shape[1] - 1}")
    _refuse_repeated(crow, columns)
    return crow, columns


def _refuse_repeated(crow: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
    """Refuse columns that do not increase within a row, as torch does: a cell listed twice would be ambiguous."""
    if len(columns) < 2:
        return
    rises = columns[1:] > columns[:-1]
    begins = crow[1:-1]
    rises[begins[(begins > 0) & (begins < len(columns))] - 1] = True
    if not rises.all():
        raise ValueError("sparse_col_indices does not rise within a row")


def _check_pad_value(pad_value: object) -> int:
    if isinstance(pad_value, bool) or not isinstance(pad_value, int | np.integer):
        raise TypeError(f"pad_value is {pad_value!r}; an integer is accepted")
    return int(pad_value)


def _dtype_of(array: Array) -> TensorDtype:
    if array.dtype.kind == "f":
        return "float32"
    if array.dtype.kind in "iu":
        return "int64"
    raise ValueError(f"an array of {array.dtype} cannot be sent; accepted are floating point numbers and integers")


# ── torch, if the caller has it ───────────────────────────────────────────────────────────────────────


def is_torch_tensor(value: object) -> bool:
    """Return whether ``value`` is a torch tensor; always false in a process that has not imported torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _numpy_of(tensor: TorchTensor) -> Array:
    torch = load_torch("TensorData.from_torch")
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    elif tensor.dtype == torch.bool:
        raise ValueError("a torch.bool tensor cannot be sent; accepted are floating point numbers and integers")
    array: Array = tensor.contiguous().numpy()
    return array
