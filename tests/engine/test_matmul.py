"""Compiled products against float64, of any shapes and strides, on other CPUs too; rows owe nothing to each other."""

import ctypes
import platform
import shutil
import subprocess

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorimer.engine.model.linear import FrozenMatrix, JoinedMatrix
from lorimer.engine.native import library, matmul
from lorimer.engine.native.matmul import LinearParts, Matmul, functions_for
from tests.engine.reference import DEVICE

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="compiled functions are for CPUs"),
]

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SEEDS = st.integers(0, 2**31)
ROWS = st.one_of(st.integers(1, 40), st.integers(750, 800))
COLUMNS = st.lists(st.integers(1, 70), min_size=1, max_size=3)
MANY = settings(max_examples=60, deadline=None)


def functions(dtype):
    found = functions_for(torch.empty(0, dtype=dtype))
    assert found is not None, "there is a compiler"
    return found


def random(seed, rows, columns, dtype):
    """Rows that stand apart, as those of a part of a wider tensor do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns + 6, generator=generator).to(dtype)[:, 2 : columns + 2]


def assert_close(found, expected, dtype, terms):
    """Allow for one rounding to the dtype, and for those of a sum in float32 whose terms have these absolute values."""
    assert found is not None and found.shape == expected.shape and found.dtype == dtype
    eps = torch.finfo(dtype).eps
    difference, allowed = (found.double() - expected).abs(), eps * expected.abs() + 1e-6 * (terms + 1)
    assert bool((difference <= allowed).all()), (difference / allowed).max()


@MANY
@given(DTYPES, SEEDS, ROWS, COLUMNS, st.integers(1, 600))
@example(torch.bfloat16, 0, 8, [32], 16)
@example(torch.bfloat16, 0, 9, [33, 1], 3)
def test_linear_layers_side_by_side(dtype, seed, num_rows, columns, half):
    size = 2 * half
    weights = [random(seed + i, num, size, dtype).contiguous() for i, num in enumerate(columns)]
    biases = [random(seed - i, 1, num, dtype)[0].clone() if i % 2 else None for i, num in enumerate(columns)]
    x = random(seed + 9, num_rows, size, dtype)
    y = functions(dtype).multiply(x, LinearParts(weights, biases))
    offsets = torch.cat([torch.zeros(len(w)) if b is None else b.float() for w, b in zip(weights, biases, strict=True)])
    joined = torch.cat(weights).double().t()
    assert_close(y, x.double() @ joined + offsets, dtype, x.double().abs() @ joined.abs())
    each = [functions(dtype).multiply(x, LinearParts([w], [b])) for w, b in zip(weights, biases, strict=True)]
    assert torch.equal(torch.cat(each, 1), y)
    out = random(seed + 8, num_rows, columns[0], dtype)
    expected = out.double() + 0.5 * (x.double() @ weights[0].double().t())
    assert functions(dtype).multiply(x, LinearParts(weights[:1], [None]), out, 0.5) is out
    assert_close(out, expected, dtype, x.double().abs() @ weights[0].double().abs().t())


@MANY
@given(DTYPES, SEEDS, ROWS, st.integers(1, 600), st.integers(1, 80), st.booleans())
@example(torch.bfloat16, 0, 3, 1100, 33, True)
@example(torch.float32, 0, 770, 513, 31, True)
def test_gradients_of_inputs(dtype, seed, num_rows, half, num_columns, is_added):
    size = 2 * half
    x, weight = random(seed, num_rows, size, dtype), random(seed + 1, size, num_columns, dtype)
    out = random(seed + 2, num_rows, num_columns, dtype) if is_added else None
    around = None if out is None else out.storage_offset() and out._base.clone()
    scale = 0.5 if is_added else 1.0
    expected = scale * (x.double() @ weight.double()) + (0 if out is None else out.double())
    found = functions(dtype).multiply_transposed(x, weight, out, scale)
    assert_close(found, expected, dtype, x.double().abs() @ weight.double().abs())
    if out is not None:
        assert found is out
        assert torch.equal(out._base[:, :2], around[:, :2]) and torch.equal(out._base[:, -4:], around[:, -4:])


@MANY
@given(DTYPES, SEEDS, st.one_of(st.integers(1, 70), st.integers(1000, 1100)), *[st.integers(1, 110)] * 2, st.booleans())
@example(torch.bfloat16, 0, 1025, 97, 33, False)
def test_gradients_of_weights(dtype, seed, num_rows, num_left, num_right, is_turned):
    left, right = random(seed, num_rows, num_left, dtype), random(seed + 1, num_rows, num_right, dtype)
    gradient = random(seed + 2, num_left, num_right, torch.float32)
    gradient = gradient.t().contiguous().t() if is_turned else gradient
    expected = gradient.double() + 0.5 * (left.double().t() @ right.double())
    assert functions(dtype).add_gradient(gradient, left, right, 0.5)
    assert_close(gradient, expected, torch.float32, left.double().abs().t() @ right.double().abs())


@MANY
@given(DTYPES, SEEDS, st.integers(2, 100), st.integers(1, 100))
def test_a_row_that_is_added_to_does_not_depend_on_others(dtype, seed, num_rows, num_columns):
    x, weight = random(seed, num_rows, 64, dtype), random(seed, num_columns, 64, dtype).contiguous()
    parts, run, before = LinearParts([weight], [None]), functions(dtype), random(seed + 1, num_rows, num_columns, dtype)

    def added(rows):
        return (
            run.multiply(x[rows], parts, before[rows].clone(), 0.3),
            run.multiply_transposed(x[rows], weight.t().contiguous(), before[rows].clone(), 0.3),
        )

    for whole, part in zip(added(slice(None)), added(slice(0, 1)), strict=True):
        assert torch.equal(part, whole[:1])


@MANY
@given(DTYPES, SEEDS, st.integers(2, 100), st.integers(1, 100))
def test_a_row_does_not_depend_on_others_or_on_threads(dtype, seed, num_rows, num_columns):
    x, weight = random(seed, num_rows, 64, dtype), random(seed, num_columns, 64, dtype).contiguous()
    parts, run, num_threads = LinearParts([weight], [None]), functions(dtype), torch.get_num_threads()
    y, d_x = run.multiply(x, parts), run.multiply_transposed(x, weight.t().contiguous(), None, 1.0)
    for rows in (slice(0, 1), slice(num_rows // 2, num_rows)):
        assert torch.equal(run.multiply(x[rows], parts), y[rows])
    gradients = torch.zeros(2, 64, 64)
    try:
        for gradient, count in zip(gradients, (1, 3), strict=True):
            torch.set_num_threads(count)
            big = x.repeat(30, 1)
            assert torch.equal(run.multiply(big, parts), y.repeat(30, 1))
            assert torch.equal(run.multiply_transposed(big, weight.t().contiguous(), None, 1.0), d_x.repeat(30, 1))
            assert run.add_gradient(gradient, big, big, 1.0)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 20])
def test_numbers_that_are_not_finite_stay_so_and_alone(num_rows, dtype):
    x, weight = torch.ones(num_rows, 32, dtype=dtype), torch.ones(40, 32, dtype=dtype)
    weight[33, 5] = float("nan")
    y = functions(dtype).multiply(x, LinearParts([weight], [None]))
    assert (~y.isfinite()).sum(0).tolist() == [num_rows * (i == 33) for i in range(40)]
    x[0, 3] = float("inf")
    d_x = functions(dtype).multiply_transposed(x, weight[:32].clone(), None, 1.0)
    assert d_x.isfinite().all(1).tolist() == [False] + [True] * (num_rows - 1)


def test_what_would_be_misread_is_left_to_torch():
    run, weight, x = functions(torch.float32), torch.ones(8, 32), torch.ones(4, 32)
    parts = LinearParts([weight], [None])
    assert run.multiply(x, parts) is not None
    others = [x.bfloat16(), x.double(), torch.ones(4, 64)[:, ::2], torch.ones(4, 16), x[:0], x.clone().requires_grad_()]
    assert [run.multiply(other, parts) for other in others] == [None] * len(others)
    for weights in ([weight.bfloat16()], [weight.t().contiguous().t()], [weight, weight.double()]):
        assert run.multiply(x[:, : weights[0].shape[1]], LinearParts(weights, [None] * len(weights))) is None
    assert run.multiply_transposed(x, torch.ones(8, 32).t(), None, 1.0) is None
    assert not run.add_gradient(torch.ones(32, 32, dtype=torch.float64), x, x, 1.0)
    # Shapes that do not fit are an error of torch, not memory that is read beyond a tensor.
    assert run.multiply(x, parts, torch.ones(3, 8)) is None
    assert run.multiply_transposed(x, torch.ones(31, 8), None, 1.0) is None
    assert run.multiply_transposed(x, torch.ones(32, 8), torch.ones(4, 7), 1.0) is None
    assert not run.add_gradient(torch.ones(32, 32), x, x[:3], 1.0)
    assert not run.add_gradient(torch.ones(31, 32), x, x, 1.0)
    if functions(torch.bfloat16)._is_paired:  # pairs of bfloat16 have to begin at even numbers
        narrow = torch.ones(4, 65, dtype=torch.bfloat16)
        assert functions(torch.bfloat16).multiply_transposed(narrow[:, 1:33], narrow.new_ones(32, 8), None, 1.0) is None
        assert functions(torch.bfloat16).multiply_transposed(narrow[:, :3], narrow.new_ones(3, 8), None, 1.0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 24, 32])
@pytest.mark.parametrize("is_turned", [False, True])
def test_weights_in_either_order_are_multiplied_by_whoever_can(is_turned, size, dtype):
    x, weight, out = (random(seed, *shape, dtype) for seed, shape in enumerate([(5, size), (size, 20), (5, 20)]))
    weight = weight.t().contiguous().t() if is_turned else weight
    expected = x.double() @ weight.double()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(matmul.multiply(x, weight).double(), expected, atol=tolerance, rtol=tolerance)
    expected = out.double() + 0.5 * expected
    matmul.add_multiplied(out, x, weight, 0.5)
    assert torch.allclose(out.double(), expected, atol=2 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("has_functions", [True, False])
def test_a_matrix_follows_the_weight_of_its_layer(has_functions, monkeypatch):
    """A full run and sharding replace weights; layers that are joined need no copy of theirs."""
    if not has_functions:
        monkeypatch.setattr(matmul, "find", lambda *_: "a test has none")
    layers, x = [torch.nn.Linear(32, num, bias=num > 8).requires_grad_(False) for num in (8, 20)], torch.randn(3, 32)
    matrices = [FrozenMatrix.of(layer) for layer in layers]
    joined = JoinedMatrix(matrices)
    for _ in range(2):
        assert torch.allclose(joined.multiply(x), torch.cat([layer(x) for layer in layers], 1), atol=1e-5)
        assert torch.equal(joined.bias, torch.cat([torch.zeros(8), layers[1].bias]))
        assert torch.allclose(matrices[1].multiply_transposed(x[:, :20]), x[:, :20] @ layers[1].weight, atol=1e-5)
        layers[1].weight.data = torch.randn(20, 32)
        layers[1].bias = torch.nn.Parameter(torch.randn(20), requires_grad=False)
    assert JoinedMatrix([matrices[0]]).bias is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have no such levels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_older_cpus_have_functions_too(level, dtype, tmp_path):
    flags = {"x86-64-v3": {"avx2", "fma"}, "x86-64-v4": {"avx512f", "avx512bw", "avx512vl"}}[level]
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        if not flags <= set(next(line for line in lines if line.startswith("flags")).split()):
            pytest.skip(f"this CPU has not all of {', '.join(sorted(flags))}")
    path, source = tmp_path / "matmul.so", library.FOLDER / "matmul.c"
    options = [*library._FLAGS, f"-march={level}", "-fopenmp", *library._DTYPES[dtype]]
    subprocess.run(["cc", *options, "-o", path, source], check=True)
    assert all(matmul._are_right(Matmul(library.Library(ctypes.CDLL(str(path)), level, dtype)), dtype))


@pytest.mark.parametrize("what", ["multiply", "multiply_transposed", "add_gradient"])
def test_functions_that_compute_something_else_are_not_used(what, monkeypatch):
    own = getattr(Matmul, what)

    def wrong(self, *args):
        found = own(self, *args)
        (found if isinstance(found, torch.Tensor) else args[0]).mul_(1.1)
        return found

    monkeypatch.setattr(Matmul, what, wrong)
    assert matmul.find.__wrapped__("cpu", torch.float32) == "compiled functions give other results"


def test_torch_multiplies_where_it_is_much_faster(monkeypatch):
    assert matmul.find.__wrapped__("cuda", torch.float32) == "they are for CPUs"
    monkeypatch.setattr(matmul, "_is_torch_faster", lambda functions, num_rows: True)
    assert matmul.find.__wrapped__("cpu", torch.float32) == "torch is faster"
    monkeypatch.setattr(matmul, "_is_torch_faster", lambda functions, num_rows: num_rows > 64)
    found = matmul.find.__wrapped__("cpu", torch.float32)
    weight = torch.ones(8, 32)
    parts = LinearParts([weight], [None])
    assert found.multiply(torch.ones(64, 32), parts) is not None and found.multiply(torch.ones(65, 32), parts) is None
    monkeypatch.setattr(matmul, "find", lambda *_: found)
    assert matmul.describe("cpu", torch.float32).endswith(" of up to 64 rows, others by torch, which is faster")
    monkeypatch.undo()
    seconds = iter([2.0, 1.0] * 9 + [1.4, 1.0] * 9)
    monkeypatch.setattr(matmul, "_seconds", lambda work: next(seconds))
    assert [matmul._is_torch_faster(found, 64) for _ in range(2)] == [True, False]


def test_what_has_no_numbers_or_other_sizes_is_left_to_torch():
    run, ones = functions(torch.float32), torch.ones
    weights = [ones(0, 4)], [ones(8, 4), ones(8, 2)]
    assert all(run.multiply(ones(3, 4), LinearParts(some, [None] * len(some))) is None for some in weights)
    for size, num_columns in ((4, 0), (0, 40)):
        assert run.multiply_transposed(ones(3, size), ones(size, num_columns), None, 1.0) is None
    assert not run.add_gradient(ones(0, 4), ones(3, 0), ones(3, 4), 1.0)
