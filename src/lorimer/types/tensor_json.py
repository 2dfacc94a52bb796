"""The JSON form of tensors: a flat list of numbers, dtype and shape, plus two index lists if sparse."""

from typing import Any

import msgspec
import numpy as np

from lorimer.types.tensors import DTYPES, Array, TensorData

_KEYS = {"data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices"}
MAX_DIMENSIONS = 2


def tensor_from_json(value: object) -> TensorData:
    """Parse a tensor. Raise ``ValueError`` that says what is wrong."""
    if isinstance(value, TensorData):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"a tensor is an object with data, dtype and shape, not {_kind(value)}")
    if unknown := value.keys() - _KEYS:
        raise ValueError(f"unknown key {min(unknown)!r}; accepted are {', '.join(sorted(_KEYS))}")
    dtype = value.get("dtype")
    if dtype not in ("float32", "int64"):
        raise ValueError(f"dtype is {dtype!r}; accepted are 'float32' and 'int64'")
    shape = value.get("shape")
    sizes = None if shape is None else _integers(shape, "shape").tolist()
    if sizes is not None and len(sizes) > MAX_DIMENSIONS:
        raise ValueError(f"shape {sizes} has {len(sizes)} dimensions; at most {MAX_DIMENSIONS} are accepted")
    data = value.get("data")
    crow, columns = value.get("sparse_crow_indices"), value.get("sparse_col_indices")
    return TensorData(
        _integers(data, "data") if dtype == "int64" else _floats(data, "data"),
        dtype,
        sizes,
        None if crow is None else _integers(crow, "sparse_crow_indices"),
        None if columns is None else _integers(columns, "sparse_col_indices"),
    )


def tensor_to_json(tensor: TensorData) -> dict[str, Any]:
    """Return the JSON of a tensor.

    A dense one has only data, dtype and shape, as releases up to 0.16 refuse other keys.
    """
    values: dict[str, Any] = {"data": tensor.data, "dtype": tensor.dtype, "shape": list(tensor.dense_shape)}
    if tensor.csr is not None:
        values["sparse_crow_indices"] = tensor.sparse_crow_indices
        values["sparse_col_indices"] = tensor.sparse_col_indices
    return values


def _integers(values: object, name: str) -> Array:
    return _numbers(values, name, list[int], "integers", DTYPES["int64"])


def _floats(values: object, name: str) -> Array:
    return _numbers(values, name, list[float], "numbers", DTYPES["float32"])


def _numbers(values: object, name: str, kind: Any, word: str, dtype: np.dtype[Any]) -> Array:
    if not isinstance(values, list):
        raise ValueError(f"{name} is {_kind(values)}; a list of {word} is accepted")
    try:
        with np.errstate(over="ignore"):  # infinities are refused where the tensor is used
            return np.array(msgspec.convert(values, kind), dtype)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}; a list of {word} is accepted") from None
    except OverflowError:
        raise ValueError(f"{name} has an integer of more than 64 bits") from None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
