"""Tensors: conversions against the official ones and torch, and what is refused."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lorimer.types import TensorData, TopkLogprobs
from lorimer.types.tensor_json import tensor_from_json, tensor_to_json

SPARSE = np.array([[0, 0, 0, 7], [0, 0, 0, 0], [5, 0, 0, 0]])


ARRAYS = {
    "float32": np.array([1.5, -2.0], np.float32),
    "float64": np.array([1.5, -2.0]),
    "float16": np.array([1.5, -2.0], np.float16),
    "int64": np.array([[1, 2], [3, 4]]),
    "int32": np.array([1, 2, 3], np.int32),
    "uint8": np.array([1, 255], np.uint8),
    "scalar": np.array(3.5),
    "empty": np.empty((0, 4)),
    "not contiguous": np.arange(12).reshape(3, 4).T,
    "three dimensions": np.zeros((2, 3, 4)),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_array_comes_back(array):
    tensor = TensorData.from_numpy(array)
    assert tensor.shape == list(array.shape)
    assert tensor.dtype == ("float32" if array.dtype.kind == "f" else "int64")
    np.testing.assert_array_equal(tensor.to_numpy(), array)
    assert tensor.tolist() == array.tolist()
    assert tensor.data == array.ravel().tolist()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
)
def test_torch_tensor_is_read_as_officially(dtype):
    tensor = torch.tensor([[1, 2, 3], [4, 5, 6]]).to(dtype)
    ours, official = TensorData.from_torch(tensor), tinker.TensorData.from_torch(tensor)
    assert (ours.dtype, ours.shape, ours.data) == (official.dtype, official.shape, official.data)
    assert torch.equal(ours.to_torch(), official.to_torch())


def test_torch_tensor_with_gradient_is_read():
    assert TensorData.from_torch(torch.ones(2, requires_grad=True)).data == [1.0, 1.0]


@pytest.mark.parametrize("pad_value", [0, -1, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_sparse_is_as_officially(dtype, pad_value):
    dense = torch.tensor(SPARSE).to(dtype) if not pad_value else torch.full((5, 8), pad_value, dtype=dtype)
    dense[1, 2] = 3
    ours = TensorData.from_torch_sparse(dense, pad_value)
    official = tinker.TensorData.from_torch_sparse(dense, pad_value)
    assert ours.sparse_crow_indices == official.sparse_crow_indices is not None
    assert ours.sparse_col_indices == official.sparse_col_indices
    assert (ours.dtype, ours.shape, ours.data) == (official.dtype, official.shape, official.data)
    assert torch.equal(ours.to_torch(pad_value), dense)
    assert ours.tolist(pad_value) == dense.tolist()


def test_sparse_that_saves_nothing_is_dense():
    assert TensorData.from_torch_sparse(torch.ones(4, 4)).csr is None
    assert TensorData.from_torch_sparse(torch.zeros(100)).csr is None


@settings(deadline=None)
@given(hnp.arrays(np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8), elements=st.integers(0, 2)))
def test_sparse_comes_back(array):
    tensor = TensorData.from_numpy_sparse(array)
    np.testing.assert_array_equal(tensor.to_numpy(), array)
    assert tensor.dense_shape == array.shape
    np.testing.assert_array_equal(tensor_from_json(tensor_to_json(tensor)).to_numpy(), array)


def csr(values, shape, crow, columns) -> TensorData:
    return TensorData(values, "float32", shape, crow, columns)


WRONG = {
    "too few values": (lambda: TensorData([1, 2, 3], "float32", [2, 2]), "takes 4 values, but there are 3"),
    "a huge shape": (lambda: TensorData([1], "float32", [2**40, 2**40]), "but there are 1"),
    "a negative size": (lambda: TensorData([1, 2], "float32", [-1, -2]), "negative size"),
    "another dtype": (lambda: TensorData([1], "float64"), "'float64' is not one of"),
    "text": (lambda: TensorData(["a"], "float32"), "cannot be read as numbers"),
    "ragged": (lambda: TensorData([[1], [1, 2]], "float32"), "cannot be read as numbers"),
    "a huge integer": (lambda: TensorData([2**64], "int64"), "cannot be read as numbers"),
    "complex": (lambda: TensorData.from_numpy(np.array([1j])), "complex128"),
    "booleans": (lambda: TensorData.from_torch(torch.tensor([True])), "torch.bool"),
    "only rows": (lambda: csr([1], [1, 1], [0, 1], None), "both"),
    "only columns": (lambda: csr([1], [1, 1], None, [0]), "both"),
    "sparse without shape": (lambda: csr([1], None, [0, 1], [0]), "two sizes"),
    "sparse with one size": (lambda: csr([1], [1], [0, 1], [0]), "two sizes"),
    "sparse with a negative size": (lambda: csr([], [1, -1], [0, 0], []), "two sizes"),
    "sparse with 3 rows of 2": (lambda: csr([1], [2, 1], [0, 1, 1, 1], [0]), "2 rows take 3"),
    "sparse with huge rows": (lambda: csr([1], [2**60, 1], [0, 1], [0]), "sparse_crow_indices has 2"),
    "rows from 1": (lambda: csr([1], [1, 1], [1, 1], [0]), "does not rise from 0 to 1"),
    "rows past the values": (lambda: csr([1], [1, 1], [0, 2], [0]), "does not rise from 0 to 1"),
    "rows that fall": (lambda: csr([1, 2], [3, 2], [0, 2, 1, 2], [0, 1]), "does not rise"),
    "a column too far": (lambda: csr([1], [1, 3], [0, 1], [3]), "outside 0 to 2"),
    "a negative column": (lambda: csr([1], [1, 3], [0, 1], [-1]), "outside 0 to 2"),
    "columns for other values": (lambda: csr([1, 2], [1, 3], [0, 2], [1]), "1 entries for 2 values"),
    "a cell twice": (lambda: csr([1, 2], [1, 3], [0, 2], [1, 1]), "does not rise within a row"),
    "columns that fall": (lambda: csr([1, 2], [1, 3], [0, 2], [2, 1]), "does not rise within a row"),
    "two-dimensional columns": (lambda: csr([1], [1, 1], [0, 1], [[0]]), "one-dimensional"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_wrong_tensor_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_columns_may_fall_from_one_row_to_the_next():
    tensor = csr([1, 2, 3], [4, 3], [0, 0, 2, 2, 3], [0, 2, 1])
    assert tensor.tolist() == [[0, 0, 0], [1, 0, 2], [0, 0, 0], [0, 3, 0]]


def test_dtype_must_be_given():
    with pytest.raises(TypeError, match="dtype"):
        TensorData([1])


@pytest.mark.parametrize("pad_value", [True, 1.5, None])
def test_pad_value_must_be_an_integer(pad_value):
    with pytest.raises(TypeError, match="pad_value"):
        TensorData.from_numpy_sparse(SPARSE).to_numpy(pad_value)


def test_values_of_bytes_can_be_written():
    tensor = TensorData(np.frombuffer(bytes(8), "<f4"), "float32")
    tensor.to_torch()[0] = 1.0
    assert tensor.data == [1.0, 0.0]


def test_repr_is_short():
    assert repr(TensorData(np.zeros(10_000), "float32")) == "TensorData(dtype='float32', shape=[10000])"
    assert "sparse with 2 values" in repr(TensorData.from_numpy_sparse(np.pad(SPARSE, 4)))


def test_tensors_work_without_torch():
    code = """
import sys, numpy as np
sys.modules["torch"] = None
from lorimer.types import Datum, ModelInput, TensorData
tensor = TensorData.from_numpy_sparse(np.eye(8))
assert tensor.csr and tensor.tolist() == np.eye(8).tolist()
datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": np.ones(2)})
try:
    tensor.to_torch()
except ImportError as error:
    print(error)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "TensorData.to_torch needs PyTorch (pip install torch)" in run.stdout


def test_torch_is_loaded_for_who_asks_for_a_torch_tensor():
    code = """
import sys
from lorimer.types import TensorData
tensor = TensorData([1.0, 2.0], "float32")
assert "torch" not in sys.modules
assert tensor.to_torch().sum().item() == 3.0
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 0, run.stderr


# ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────

WRONG_JSON = {
    "no object": ([1], "not a list"),
    "null": (None, "not null"),
    "an unknown key": ({"data": [1], "dtype": "int64", "stride": 1}, "'stride'"),
    "another dtype": ({"data": [1], "dtype": "bfloat16"}, "'bfloat16'"),
    "no dtype": ({"data": [1]}, "dtype is None"),
    "a list as dtype": ({"data": [1], "dtype": ["int64"]}, "dtype is"),
    "no data": ({"dtype": "int64"}, "data is null"),
    "text": ({"data": [1, "2"], "dtype": "float32"}, r"data: .*str.*\[1\]"),
    "null among numbers": ({"data": [None], "dtype": "float32"}, "a list of numbers"),
    "booleans": ({"data": [True], "dtype": "int64"}, "bool"),
    "fractions as integers": ({"data": [1.5], "dtype": "int64"}, "a list of integers"),
    "nested lists": ({"data": [[1]], "dtype": "int64"}, "array"),
    "more than 64 bits": ({"data": [2**70], "dtype": "int64"}, "64 bits"),
    "three dimensions": ({"data": [], "dtype": "int64", "shape": [0, 0, 0]}, "3 dimensions"),
    "a shape of fractions": ({"data": [1], "dtype": "int64", "shape": [1.0]}, "shape: .*float"),
    "a shape of another size": ({"data": [1], "dtype": "int64", "shape": [2]}, "takes 2 values"),
    "rows without columns": ({"data": [1], "dtype": "int64", "shape": [1, 1], "sparse_crow_indices": [0, 1]}, "both"),
}


@pytest.mark.parametrize(("value", "message"), WRONG_JSON.values(), ids=WRONG_JSON)
def test_wrong_json_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        tensor_from_json(value)


def test_json_may_leave_out_the_shape_and_spell_out_nulls():
    nulls = {"shape": None, "sparse_crow_indices": None, "sparse_col_indices": None}
    tensor = tensor_from_json({"data": [1, 2.5], "dtype": "float32", **nulls})
    assert tensor.dense_shape == (2,)
    assert tensor.data == [1.0, 2.5]


def test_numbers_beyond_float32_become_infinite_without_a_warning():
    assert tensor_from_json({"data": [1e300], "dtype": "float32"}).data == [np.inf]


def test_json_of_a_dense_tensor_has_three_keys():
    assert tensor_to_json(TensorData([1, 2], "int64")) == {"data": [1, 2], "dtype": "int64", "shape": [2]}


# ── top-k ─────────────────────────────────────────────────────────────────────────────────────────────


def test_topk_lists_are_as_officially():
    from tinker.types.topk_logprobs import TopkLogprobs as OfficialTopk
    from tinker.types.topk_logprobs import topk_to_lists

    random = np.random.default_rng(0)
    token_ids = random.integers(0, 3, (50, 4)).astype(np.int32)
    logprobs = random.choice(np.array([-0.5, -99999.0], np.float32), (50, 4))
    ours = TopkLogprobs(token_ids, logprobs).to_lists()
    expected = topk_to_lists(OfficialTopk(token_ids, logprobs))
    assert ours == expected
    assert None in ours
    assert any(row and len(row) < 4 for row in ours)
    assert TopkLogprobs(np.empty((0, 4)), np.empty((0, 4))).to_lists() == []
