"""Packed attention, forward and backward, against the formula written out for each sequence alone."""

import pytest
import torch

from lorimer.engine.model.attention import Joined, Shape, _PackedAttention, attend_rows, group_sequences

pytestmark = pytest.mark.usefixtures("rows")

H, K, D = 6, 3, 16


def reference(q_HTD, k_KTD, v_KTD, lengths, shape):
    parts, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        q = q_HTD[:, rows]
        k, v = (x[:, rows].repeat_interleave(H // K, 0) for x in (k_KTD, v_KTD))
        scores = q @ k.transpose(1, 2) * shape.scale
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        i = torch.arange(length)
        hidden = i[None] > i[:, None]
        if shape.window:
            hidden = hidden | (i[:, None] - i[None] >= shape.window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if shape.sinks is not None:
            scores = torch.cat([scores, shape.sinks[:, None, None].expand(-1, length, 1)], -1)
        parts.append((scores.softmax(-1)[..., :length] @ v).transpose(0, 1))
        start += length
    return torch.cat(parts)


SHAPES = {
    "plain": Shape(0.25),
    "window": Shape(0.25, window=4),
    "wide-window-softcap": Shape(0.3, window=150, softcap=2.0),
    "sinks": Shape(0.2, sinks=torch.linspace(-1, 1, H)),
    "window-sinks": Shape(0.2, window=6, sinks=torch.linspace(-1, 1, H)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", [[5, 7, 3, 300, 7, 130], [1], [64, 60, 3], [128, 129, 1]], ids=str)
def test_values_and_gradients_equal_the_formula(lengths, shape):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, D, generator=generator).transpose(0, 1).requires_grad_() for heads in (H, K, K)
    )
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    ours = _PackedAttention.apply(q, k, v, group_sequences(lengths, starts), shape)
    theirs = reference(q, k, v, lengths, shape)
    assert (ours - theirs).abs().max() < 1e-5
    d_out = torch.randn(ours.shape, generator=generator)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), d_out), torch.autograd.grad(theirs, (q, k, v), d_out), strict=True
    ):
        assert (a - b).abs().max() < 1e-5


def test_rows_that_continue_a_sequence_see_what_came_before():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(K, H // K, 200, D, generator=generator)
    k, v = torch.randn(2, K, 200, D, generator=generator)
    for shape in (Shape(0.25), Shape(0.25, window=7)):
        whole = attend_rows(q, Joined(k), Joined(v), 0, shape)
        tail = attend_rows(q[:, :, 150:], Joined(k), Joined(v), 150, shape)
        assert (whole[:, :, 150:] - tail).abs().max() < 1e-6


def test_grouping_covers_every_sequence_once_and_wastes_little():
    lengths = [30, 31, 29, 300, 8, 7, 8, 1]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    seen = []
    for group in group_sequences(lengths, starts):
        if group.index is None:
            seen += range(group.start, group.start + group.length)
        else:
            kept = group.index if group.kept is None else group.index[group.kept]
            assert len(kept) >= 0.8 * len(group.index)
            seen += kept.tolist()
    assert sorted(seen) == list(range(sum(lengths)))
    assert len(group_sequences(lengths, starts)) < len(lengths)
