"""The chunked head against full logits and autograd."""

import pytest
import torch

from lorimer.engine.model.head import Head
from lorimer.engine.training.batch import AdapterSlice
from tests.engine.reference import make_adapter, open_pair

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
    x = torch.randn(ROWS, plain.config.hidden_size, generator=torch.Generator().manual_seed(0))
    part = AdapterSlice(0, ROWS, weights, adapter.scale, grads)
    return Head(model), plain, part, x


def reference(plain, part, x):
    (a, b) = (f.clone().requires_grad_() for f in next(iter(part.weights.values())))
    x = x.clone().requires_grad_()
    logits = x @ plain.get_output_embeddings().weight.t() + part.scale * (x @ a.t() @ b.t())
    cap = getattr(plain.config, "final_logit_softcapping", None)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return logits.log_softmax(-1), x, a, b


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 3)], ids=["one-target", "three-targets"])
def test_logprobs_and_gradients_equal_full_logits(parts, shape):
    head, plain, part, x = parts
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 272, shape, generator=generator)
    d_logprobs = torch.randn(shape, generator=generator)
    logprobs, d_x = head.backpropagate(x, targets, part, lambda rows, _: d_logprobs[rows])
    all_logprobs, leaf, a, b = reference(plain, part, x)
    expected = all_logprobs.gather(1, targets.view(ROWS, -1)).view(shape)
    expected.backward(d_logprobs)
    assert torch.allclose(logprobs, expected, atol=1e-4)
    assert torch.allclose(head.logprobs(x, targets, part), expected, atol=1e-4)
    assert torch.allclose(d_x, leaf.grad, atol=1e-4)
    d_a, d_b = next(iter(part.grads.values()))
    assert torch.allclose(d_a, a.grad, atol=1e-3)
    assert torch.allclose(d_b, b.grad, atol=1e-3)


def test_the_gradient_function_sees_every_row_once_in_chunks(parts):
    head, _, part, x = parts
    seen = []

    def gradient(rows, logprobs):
        assert len(logprobs) == rows.stop - rows.start
        seen.append(rows)
        return torch.zeros_like(logprobs)

    _, d_x = head.backpropagate(x, torch.zeros(ROWS, dtype=torch.long), part, gradient)
    assert [i for rows in seen for i in range(rows.start, rows.stop)] == list(range(ROWS))
    assert len(seen) == 4
    assert (d_x == 0).all()


def test_no_rows_give_no_logprobs(parts):
    head, _, part, x = parts
    assert head.logprobs(x[:0], torch.zeros(0, dtype=torch.long), part).shape == (0,)
