"""Tensors as protobuf: raw bytes with a dtype and a shape, dense or in compressed sparse rows."""

from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from lorimer.errors import InvalidInput
from lorimer.types import tinker_pb2 as pb
from lorimer.types.tensors import DTYPES, Array, TensorData, TensorDtype

MAX_DIMENSIONS = 2

_NUMPY: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: DTYPES["float32"],
    pb.DTYPE_INT64: DTYPES["int64"],
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}
_DTYPE: dict[int, TensorDtype] = {
    pb.DTYPE_FLOAT32: "float32",
    pb.DTYPE_INT64: "int64",
    pb.DTYPE_INT32: "int64",
    pb.DTYPE_BFLOAT16: "float32",
}
PROTOBUF_DTYPE: dict[TensorDtype, pb.DType] = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}


P = TypeVar("P", bound=Message)


def parse_message(kind: type[P], data: bytes) -> P:
    message: P = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidInput(f"the bytes are not a {kind.__name__} in protobuf") from None
    return message


def read_array(data: bytes, dtype: np.dtype[Any] | str, what: str) -> Array:
    """Return the bytes as a flat read-only array. Raise ``ValueError`` if they end within a number."""
    dtype = np.dtype(dtype)
    if len(data) % dtype.itemsize:
        raise ValueError(f"{what} has {len(data)} bytes, which is no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def numpy_dtype(dtype: int) -> np.dtype[Any]:
    """Return the NumPy dtype of a protobuf ``DType``."""
    if dtype not in _NUMPY:
        raise ValueError(f"dtype {dtype} is not one of FLOAT32, INT64, INT32, BFLOAT16 (1 to 4)")
    return _NUMPY[dtype]


def widen(values: Array, dtype: int) -> tuple[Array, TensorDtype]:
    """Convert the values to one of the two dtypes of tensors."""
    if dtype == pb.DTYPE_BFLOAT16:
        values = (values.astype("<u4") << np.uint32(16)).view("<f4")
    elif dtype == pb.DTYPE_INT32:
        values = values.astype("<i8")
    return values, _DTYPE[dtype]


def read_tensor(message: pb.Tensor) -> TensorData:
    """Read a tensor. Raise ``ValueError`` that says what is wrong. No shape means one dimension."""
    stored = numpy_dtype(message.dtype)
    if len(message.shape) > MAX_DIMENSIONS:
        shown, number = list(message.shape[:8]), len(message.shape)
        raise ValueError(f"shape {shown} has {number} dimensions; at most {MAX_DIMENSIONS} are accepted")
    shape = list(message.shape) or None
    if message.WhichOneof("encoding") == "sparse_csr":
        sparse = message.sparse_csr
        values, dtype = widen(read_array(sparse.values, stored, "values"), message.dtype)
        crow = read_array(sparse.crow_indices, "<i8", "crow_indices")
        return TensorData(values, dtype, shape, crow, read_array(sparse.col_indices, "<i8", "col_indices"))
    values, dtype = widen(read_array(message.dense, stored, "data"), message.dtype)
    return TensorData(values, dtype, shape)


def write_tensor(tensor: TensorData, message: pb.Tensor) -> None:
    message.dtype = PROTOBUF_DTYPE[tensor.dtype]
    message.shape.extend(tensor.dense_shape)
    if tensor.csr is None:
        message.dense = tensor.values.tobytes()
    else:
        message.sparse_csr.values = tensor.values.tobytes()
        message.sparse_csr.crow_indices = tensor.csr[0].tobytes()
        message.sparse_csr.col_indices = tensor.csr[1].tobytes()
