"""The chunked head against full logits and autograd."""

import numpy as np
import pytest
import torch

from lorimer.engine.model.head import Head, Targets
from lorimer.engine.training.batch import AdapterSlice
from tests.engine.reference import make_adapter, on_device, open_pair

pytestmark = pytest.mark.usefixtures("rows")

ROWS = 50


@pytest.fixture(params=["llama", "gemma2"])
def parts(request, monkeypatch):
    """gemma2 caps its logits. The chunk is made so small that there are several."""
    monkeypatch.setattr("lorimer.engine.model.head.CHUNK_BYTES", 16 * 4 * 272)
    model, plain = open_pair(request.param)
    adapter = make_adapter(model)
    name = model.head_target.name
    weights = {name: adapter.weights[name]}
    grads = {name: tuple(torch.zeros_like(f) for f in weights[name])}
    x = on_device(torch.randn(ROWS, plain.config.hidden_size, generator=torch.Generator().manual_seed(0)))
    part = AdapterSlice(0, ROWS, weights, adapter.scale, grads)
    return Head(model), plain, part, x


def reference(plain, part, x):
    (a, b) = (f.cpu().clone().requires_grad_() for f in next(iter(part.weights.values())))
    x = x.cpu().clone().requires_grad_()
    logits = x @ plain.get_output_embeddings().weight.t() + part.scale * (x @ a.t() @ b.t())
    cap = getattr(plain.config, "final_logit_softcapping", None)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return logits.log_softmax(-1), x, a, b


def make_targets(counts):
    """So many targets of each row, and their gradients."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.arange(ROWS).repeat_interleave(torch.tensor(counts))
    ids = torch.randint(0, 272, (len(rows),), generator=generator)
    ids[1] = ids[0]  # the same target twice at one row, where rows have several
    targets = Targets(on_device(ids), on_device(rows), np.cumsum([0, *counts]))
    return targets, on_device(torch.randn(len(rows), generator=generator))


@pytest.mark.parametrize(
    "counts", [[1] * ROWS, [3] * ROWS, [1 + i % 4 for i in range(ROWS)]], ids=["one-target", "three-targets", "mixed"]
)
def test_logprobs_and_gradients_equal_full_logits(parts, counts):
    head, plain, part, x = parts
    targets, d_logprobs = make_targets(counts)
    logprobs, d_x = head.backpropagate(x, targets, part, lambda which, _: d_logprobs[which])
    all_logprobs, leaf, a, b = reference(plain, part, x)
    expected = all_logprobs[targets.rows_P.cpu(), targets.ids_P.cpu()]
    expected.backward(d_logprobs.cpu())
    assert torch.allclose(logprobs.cpu(), expected, atol=1e-4)
    assert torch.allclose(head.logprobs(x, targets, part).cpu(), expected, atol=1e-4)
    assert torch.allclose(d_x.cpu(), leaf.grad, atol=1e-4)
    d_a, d_b = next(iter(part.grads.values()))
    assert torch.allclose(d_a.cpu(), a.grad, atol=1e-3)
    assert torch.allclose(d_b.cpu(), b.grad, atol=1e-3)


def test_the_gradient_function_sees_every_target_once_in_chunks(parts):
    head, _, part, x = parts
    targets, _ = make_targets([1, 3] * (ROWS // 2))
    seen = []

    def gradient(which, logprobs):
        assert len(logprobs) == which.stop - which.start
        seen.append(which)
        return torch.zeros_like(logprobs)

    _, d_x = head.backpropagate(x, targets, part, gradient)
    assert [i for which in seen for i in range(which.start, which.stop)] == list(range(2 * ROWS))
    assert len(seen) == 4
    assert (d_x == 0).all()


def test_no_rows_give_no_logprobs(parts):
    head, _, part, x = parts
    nothing = on_device(torch.zeros(0, dtype=torch.long))
    assert head.logprobs(x[:0], Targets(nothing, nothing, np.zeros(1, np.int64)), part).shape == (0,)
