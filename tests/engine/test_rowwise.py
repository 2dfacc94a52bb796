"""Compiled functions of rows against torch in float64: values, gradients, and what rows owe to each other, nothing."""

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lorimer.engine.native import rowwise
from lorimer.engine.native.rowwise import Mask, functions_for
from tests.engine.reference import DEVICE

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="compiled functions are for CPUs"),
]

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SEEDS = st.integers(0, 2**31)
SCALES = st.sampled_from([1e-3, 1.0, 30.0])
MANY = settings(max_examples=80, deadline=None)


def functions(dtype):
    found = functions_for(torch.empty(0, dtype=dtype))
    assert found is not None, "there is a compiler"
    return found


def random(seed, *shape, dtype, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_close(found, expected, dtype, rounds=2):
    """Allow for rounding to the dtype a few times, relative to the largest number of each row."""
    assert found.shape == expected.shape
    eps = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 4e-6
    allowed = rounds * eps * expected.abs().amax(-1, keepdim=True) + 1e-30
    difference = (found.double() - expected).abs()
    assert bool((difference <= allowed).all()), (difference / allowed).max()


@MANY
@given(DTYPES, SEEDS, st.integers(1, 150), st.integers(1, 6), st.booleans(), SCALES)
def test_norms(dtype, seed, num_rows, parts, is_wide, scale):
    size = 16 * parts
    x, d_y = random(seed, num_rows, size, dtype=dtype, scale=scale), random(seed + 1, num_rows, size, dtype=dtype)
    weight = random(seed + 2, size, dtype=torch.float32 if is_wide else dtype)
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight)]
    y = F.rms_norm(leaves[0], (size,), leaves[1], 1e-6)
    d_x, d_weight = torch.autograd.grad(y, leaves, d_y.double())
    assert_close(functions(dtype).normalise(weight, 1e-6, x), y, dtype)
    found_x, found_weight = functions(dtype).normalise_gradient(weight, 1e-6, x, d_y, is_trained=True)
    assert_close(found_x, d_x, dtype)
    assert found_weight.dtype == torch.float32
    assert_close(found_weight, d_weight, torch.float32, rounds=8)
    alone, none = functions(dtype).normalise_gradient(weight, 1e-6, x[-1:], d_y[-1:], is_trained=False)
    assert none is None and torch.equal(alone, found_x[-1:])


@MANY
@given(DTYPES, SEEDS, st.integers(1, 40), st.integers(1, 40), SCALES)
def test_gated_activations(dtype, seed, num_rows, parts, scale):
    size = 16 * parts
    gate, up, d = (random(seed + i, num_rows, size, dtype=dtype, scale=scale) for i in range(3))
    leaves = [tensor.double().requires_grad_() for tensor in (gate, up)]
    product = F.silu(leaves[0]) * leaves[1]
    d_gate, d_up = torch.autograd.grad(product, leaves, d.double())
    found = functions(dtype).gate_apart(gate, up)
    assert_close(found, product, dtype)
    assert torch.equal(functions(dtype).gate(torch.cat([gate, up], 1)), found)
    d_found = d.clone()
    functions(dtype).gate_gradient(gate, up, d_found, found)
    assert_close(d_found, d_gate, dtype)
    assert_close(found, d_up, dtype)


@st.composite
def targets(draw):
    """Tokens of rows, several of a row and of the same token among them, and rows without any."""
    size, num_rows = draw(st.integers(1, 70)), draw(st.integers(1, 12))
    of_rows = [draw(st.lists(st.integers(0, size - 1), max_size=5)) for _ in range(num_rows)]
    return size, of_rows


@MANY
@given(DTYPES, SEEDS, targets(), SCALES, st.integers(0, 3))
def test_log_probabilities(dtype, seed, wanted, scale, first):
    """``firsts`` are numbers within all targets of a batch, of which the rows are a chunk."""
    size, of_rows = wanted
    logits = random(seed, len(of_rows), size, dtype=dtype, scale=scale)
    row = torch.tensor([n for n, ids in enumerate(of_rows) for _ in ids], dtype=torch.int64)
    ids = torch.tensor([i for ids in of_rows for i in ids], dtype=torch.int64)
    firsts = torch.tensor([0, *map(len, of_rows)]).cumsum(0).add(first).numpy()
    d_logprobs = random(seed + 1, len(ids), dtype=torch.float32)
    leaf = logits.double().requires_grad_()
    logprobs = leaf.log_softmax(-1)
    (d_logits,) = torch.autograd.grad(logprobs[row, ids], leaf, d_logprobs.double())
    largest, logs = functions(dtype).log_sums(logits)
    assert_close((logits.double() - largest[:, None]) - logs[:, None], logprobs, torch.float32)
    functions(dtype).log_softmax_gradient(logits, (largest, logs), firsts, ids, d_logprobs)
    # Terms of a sum may cancel: the allowance is relative to them.
    allowed = torch.zeros(len(of_rows)).index_add_(0, row, d_logprobs.abs())[:, None]
    assert bool(((logits - d_logits).abs() <= 2 * max(torch.finfo(dtype).eps, 4e-6) * allowed).all())


@MANY
@given(DTYPES, SEEDS, st.integers(1, 3), st.integers(1, 40), st.integers(0, 70), st.none() | st.integers(1, 60), SCALES)
def test_softmax_of_attention(dtype, seed, batch, cycle, first, window, scale):
    num_keys, group = first + cycle + seed % 2, 1 + seed % 3
    scores, d_p = (random(seed + i, batch, group * cycle, num_keys, dtype=dtype, scale=scale) for i in range(2))
    query, key = torch.arange(first, first + cycle).repeat(group)[:, None], torch.arange(num_keys)
    is_hidden = (key > query) | (query - key >= (window or num_keys))
    scores[:, is_hidden] = float("nan")  # what is not seen is not read
    leaf = scores.double().masked_fill(is_hidden, 0).requires_grad_()
    p = leaf.masked_fill(is_hidden, float("-inf")).softmax(-1)
    (d_scores,) = torch.autograd.grad(p, leaf, d_p.double())
    mask, found = Mask(cycle, first, window), scores.clone()
    functions(dtype).masked_softmax(found, mask)
    assert_close(found, p, dtype)
    functions(dtype).masked_softmax_gradient(scores, d_p, mask)
    assert torch.equal(scores, found)
    terms = (p * d_p.double().abs()).sum(-1, keepdim=True)
    allowed = 4 * max(torch.finfo(dtype).eps, 4e-6) * p * (terms + 2 * random(seed + 1, 1, dtype=dtype).abs().max())
    allowed = allowed + 4 * max(torch.finfo(dtype).eps, 4e-6) * d_scores.abs() + 1e-30
    assert bool(((d_p - d_scores).abs() <= allowed + 4e-6 * p * terms.amax()).all())


@MANY
@given(
    SEEDS, st.integers(1, 6), st.integers(1, 700), SCALES, st.sampled_from([0.5, 1.0, 3.0]), st.floats(0, 1 - 2**-53)
)
def test_draws(seed, num_rows, size, scale, temperature, number):
    logits = random(seed, num_rows, size, dtype=torch.float32, scale=scale)
    is_hidden = random(seed + 1, num_rows, size, dtype=torch.float32) > 0.5
    is_hidden[:, seed % size] = False
    logits[is_hidden] = float("-inf")
    temperatures, numbers = torch.full((num_rows,), temperature), np.full(num_rows, number)
    tokens, logprobs, largest, logs = functions(torch.bfloat16).draw(logits, temperatures, numbers)
    expected = (logits.double() / temperature).log_softmax(-1)
    chosen = expected.gather(1, tokens[:, None])[:, 0]
    assert bool(chosen.isfinite().all()), "what has no weight is never drawn"
    assert torch.allclose(logprobs.double(), chosen, atol=1e-5, rtol=1e-5)
    assert torch.equal((logits.gather(1, tokens[:, None])[:, 0] - largest) / temperature - logs, logprobs)
    after = expected.exp().cumsum(-1).gather(1, tokens[:, None])[:, 0]
    assert bool(((after - chosen.exp() - 1e-6 <= number) & (number <= after + 1e-6)).all())
    alone = functions(torch.float32).draw(logits[-1:], temperatures[-1:], numbers[-1:])
    assert int(alone[0]) == int(tokens[-1]) and torch.equal(alone[1], logprobs[-1:])


def test_draws_have_the_frequencies_of_their_probabilities():
    logits = torch.tensor([0.0, 2.0, -1.0, 0.5]).repeat(2, 1)
    numbers = (np.arange(4000) + 0.5) / 4000
    drawn = [functions(torch.float32).draw(logits[:1], torch.ones(1), numbers[i : i + 1])[0] for i in range(4000)]
    found = torch.cat(drawn).bincount(minlength=4) / 4000
    assert torch.allclose(found, logits[0].softmax(-1), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_not_finite_stay_so_in_their_row(dtype):
    bad = [False, True, False]
    for value in ("nan", "inf"):
        x = torch.ones(3, 48, dtype=dtype)
        x[1, 40] = float(value)
        found = functions(dtype)
        ones, sums = torch.ones(48, dtype=dtype), found.log_sums(x)
        probabilities = x.clone()[None]
        found.masked_softmax(probabilities, Mask(3, 45))
        d_x, _ = found.normalise_gradient(ones, 1e-6, x, torch.ones_like(x), is_trained=False)
        for rows in (found.normalise(ones, 1e-6, x), sums[1][:, None], probabilities[0], d_x):
            assert (~rows.isfinite()).any(1).tolist() == bad
        _, logprobs, *_ = found.draw(x.float(), torch.ones(3), np.full(3, 0.5))
        assert (~logprobs.isfinite()).tolist() == bad
        gate = found.gate_apart(x, torch.ones_like(x))
        assert (~gate.isfinite()).any(1).tolist() == bad


def test_many_threads_compute_what_one_does():
    x, d_y = (random(i, 3000, 64, dtype=torch.float32) for i in range(2))
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            d_x, d_weight = functions(torch.float32).normalise_gradient(torch.ones(64), 1e-6, x, d_y, is_trained=True)
            scores = x.clone()[None]
            functions(torch.float32).masked_softmax(scores, Mask(50, 10))
            results.append((d_x, d_weight, scores))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_mask_that_sees_more_keys_than_there_are_is_refused():
    with pytest.raises(ValueError, match="sees more than 8 keys"):
        functions(torch.float32).masked_softmax(torch.ones(1, 4, 8), Mask(4, 5))


def test_functions_that_compute_something_else_are_not_used(monkeypatch):
    """A compiler may be wrong: each function is compared with torch before the first use."""
    rowwise.find.cache_clear()
    names = ["normalise", "normalise_gradient", "gate", "gate_gradient", "log_sums", "log_softmax_gradient", "draw"]
    try:
        assert functions_for(torch.empty(0)) is not None
        for name in [*names, "masked_softmax", "masked_softmax_gradient"]:
            right, changed = getattr(rowwise.Rowwise, name), -1 if name == "gate_gradient" else 0

            def spoil(self, *args, right=right, changed=changed):
                made = right(self, *args)
                for tensor in (args[changed],) if made is None else made if isinstance(made, tuple) else (made,):
                    tensor.view(-1)[0] += 1
                return made

            with monkeypatch.context() as patch:
                patch.setattr(rowwise.Rowwise, name, spoil)
                rowwise.find.cache_clear()
                assert rowwise.find("cpu", torch.float32) == "compiled functions give other results", name
    finally:
        rowwise.find.cache_clear()
