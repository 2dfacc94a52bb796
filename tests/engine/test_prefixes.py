"""Sequences with common beginnings: the trie, attention along it, and training on it against training without it."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorimer.engine.adapters.adapters import FACTORS
from lorimer.engine.messages import Datum
from lorimer.engine.model.attention import Shape, _PackedAttention, group_sequences
from lorimer.engine.model.base_model import BaseModel, register_implementations
from lorimer.engine.model.device import Device
from lorimer.engine.training.batch import cut_by_budget
from lorimer.engine.training.custom_loss import CustomLoss
from lorimer.engine.training.prefixes import MIN_SHARED, Forest
from lorimer.engine.training.trainer import Trainer, TrainItem
from lorimer.models.debug import tiny_model
from tests.engine.operations import register_gather
from tests.engine.reference import DENSE, MOE, checked, make_adapter, make_datum, open_pair, relative_error

H, K, D = 6, 3, 8
SHAPES = {
    "plain": Shape(0.25),
    "window": Shape(0.25, window=4),
    "softcap": Shape(0.3, window=9, softcap=2.0),
    "sinks": Shape(0.2, window=150, sinks=torch.linspace(-1, 1, H)),
}

sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8)


def forest_of(*runs, min_shared=1):
    forest = Forest(min_shared)
    for run in runs:
        forest.add([np.array(tokens, np.int64) for tokens in run])
    return forest


@given(runs=st.lists(sequences, min_size=1, max_size=3), min_shared=st.integers(1, 4), budget=st.integers(1, 30))
@settings(deadline=None)
def test_passes_hold_every_sequence_once_and_every_shared_token_once(runs, min_shared, budget):
    forest = forest_of(*runs, min_shared=min_shared)
    flat = [tokens for run in runs for tokens in run]
    owner = [number for number, run in enumerate(runs) for _ in run]
    passes = cut_by_budget(forest, forest.trees, budget)
    assert sorted(i for members in passes for i in members) == list(range(len(flat)))
    for members in passes:
        layout = forest.lay_out(members)
        axis = np.full(layout.num_tokens, -1)
        for node in layout.nodes:
            axis[node.start : node.stop] = flat[node.sequence][node.position : node.position + node.stop - node.start]
            holders = [i for i in members if slice(node.start, node.stop) in layout.pieces[i]]
            assert node.sequence == holders[0] and node.num_sequences == len(holders)
            for i in holders:
                before = layout.pieces[i][: layout.pieces[i].index(slice(node.start, node.stop))]
                assert list(node.past) == before and sum(p.stop - p.start for p in before) == node.position
        for i in members:
            assert axis[layout.rows(i)].tolist() == flat[i]
        assert layout.num_tokens == forest.size(members)
        longest = max(len(flat[i]) for i in members)
        assert layout.num_tokens <= (budget if longest <= budget else longest + budget)
        if min_shared == 1:
            prefixes = {(owner[i], *flat[i][: n + 1]) for i in members for n in range(len(flat[i]))}
            assert layout.num_tokens == len(prefixes)
    assert [owner[tree[0]] for tree in forest.trees] == sorted(owner[tree[0]] for tree in forest.trees)


def test_short_common_pieces_are_not_shared():
    common = list(range(MIN_SHARED))
    assert forest_of([[*common, 50], [*common, 60]], min_shared=MIN_SHARED).trees == [[0, 1]]
    assert forest_of([[*common[1:], 50], [*common[1:], 60]], min_shared=MIN_SHARED).trees == [[0], [1]]


def test_a_tree_is_cut_only_if_it_does_not_fit():
    run = [[9], *([*range(20), 50 + i] for i in range(4)), *([*range(30, 50), 50 + i] for i in range(4))]
    forest = forest_of(run, min_shared=4)
    assert cut_by_budget(forest, forest.trees, 30) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert cut_by_budget(forest, forest.trees, 22) == [[0], [1, 2], [3, 4], [5, 6], [7, 8]]
    # A prefix longer than the budget is computed once for as many others as the budget has room for.
    assert cut_by_budget(forest, forest.trees, 2) == [[0], [1, 2, 3], [4], [5, 6, 7], [8]]


@given(run=sequences, min_shared=st.integers(1, 4), name=st.sampled_from(sorted(SHAPES)))
@settings(deadline=None, max_examples=150)
def test_attention_along_a_trie_equals_a_dense_mask(run, min_shared, name):
    check_attention(forest_of(run, min_shared=min_shared), SHAPES[name])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_over_long_branches_equals_a_dense_mask(shape):
    """More rows than a block of queries, and siblings that are computed together with padding."""
    rng = np.random.default_rng(0)
    root, turn = rng.integers(0, 100, 140).tolist(), rng.integers(0, 100, 137).tolist()
    branches = [[*root, *turn, i, *rng.integers(0, 100, n)] for i, n in enumerate((60, 57, 60, 150, 1))]
    check_attention(forest_of([root, *branches, [*root, 7, *turn], [3, 4, 5]]), shape)


def check_attention(forest, shape):
    layout = forest.lay_out([i for tree in forest.trees for i in tree])
    size = layout.num_tokens
    position = torch.empty(size, dtype=torch.long)
    is_seen = torch.zeros(size, size, dtype=torch.bool)
    for i in layout.pieces:
        rows = torch.from_numpy(layout.rows(i))
        position[rows] = torch.arange(len(rows))
        is_seen[rows[:, None], rows] = True
    distance = position[:, None] - position
    is_seen &= (distance >= 0) & (distance < (shape.window or size))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, heads, D, generator=generator).transpose(0, 1).requires_grad_() for heads in (H, K, K))
    scores = q @ k.repeat_interleave(H // K, 0).transpose(1, 2) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    scores = scores.masked_fill(~is_seen, float("-inf"))
    if shape.sinks is not None:
        scores = torch.cat([scores, shape.sinks[:, None, None].expand(-1, size, 1)], -1)
    theirs = (scores.softmax(-1)[..., :size] @ v.repeat_interleave(H // K, 0)).transpose(0, 1)
    nodes = layout.nodes
    lengths, starts = [node.stop - node.start for node in nodes], [node.start for node in nodes]
    groups = group_sequences(lengths, starts, pasts=[node.past for node in nodes])
    ours = _PackedAttention.apply(q, k, v, groups, shape)
    assert (ours - theirs).abs().max() < 1e-5
    d_out = torch.randn(ours.shape, generator=generator)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), d_out) for x in (ours, theirs)), strict=True):
        assert (a - b).abs().max() < 2e-5


# ── training ──────────────────────────────────────────────────────────────────────────────────────────


def tree_data(loss_fn, vocab_size, seed=0, num_targets=0):
    """A prompt, two second turns with three answers each; a datum that ends inside, equal ones, and one apart.

    Targets, weights and everything else differ between datums, also where their tokens do not.
    """
    rng = np.random.default_rng(seed)
    prompt, *turns = (rng.integers(0, vocab_size, n) for n in (23, 17, 19))
    answers = [rng.integers(0, vocab_size, n) for n in (9, 4, 9, 21, 1, 8)]
    texts = [np.concatenate([prompt, turns[i % 2], answer]) for i, answer in enumerate(answers)]
    texts += [texts[0], texts[1][:31], prompt, prompt, np.concatenate([prompt, turns[0]]), answers[3]]
    data = [make_datum(loss_fn, len(text), 100 * seed + i, vocab_size, num_targets) for i, text in enumerate(texts)]
    return [Datum(tokens=text, loss_fn_inputs=d.loss_fn_inputs) for text, d in zip(texts, data, strict=True)]


def train(model, work, min_shared=8, budget=4096, custom=None):
    trainer = Trainer(model, budget)
    trainer.min_shared = min_shared
    trainer.custom_losses.update(custom or {})
    results = trainer.run(work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def assert_same(found, expected, num_computed=None):
    """Compare results and gradients, both as (results, adapters)."""
    for ours, theirs in zip(found[0], expected[0], strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        metrics, others = dict(ours.metrics), dict(theirs.metrics)
        metrics.pop("tokens_computed:sum")
        assert others.pop("tokens_computed:sum") == others["tokens:sum"]
        # A sum over positions may cancel to nearly nothing: it is compared with the number of its terms.
        assert metrics == pytest.approx(others, rel=1e-5, abs=1e-6 * others["tokens:sum"])
    if num_computed is not None:
        assert sum(result.metrics["tokens_computed:sum"] for result in found[0]) == num_computed
    for ours, theirs in zip(found[1], expected[1], strict=True):
        if theirs.grads is None:
            assert ours.grads is None
            continue
        for name, pair in theirs.grads.items():
            for factor, a, b in zip(FACTORS[: len(pair)], ours.grads[name], pair, strict=True):
                assert relative_error(a, b) < 1e-5, f"{name} {factor}"


def compare(model, operations, num_computed=None, budget=4096, custom=None, num_runs=1):
    """Train the same operations, dealt to the runs in turn, with shared prefixes and without."""
    outcomes = []
    for min_shared in (8, sys.maxsize):
        kinds = [{}, {"use_dora": True, "train_mlp": False}]  # there is no DoRA of experts
        adapters = [make_adapter(model, seed=i, rank=3 + i, **kinds[i % 2]) for i in range(num_runs)]
        work = [TrainItem(operation, adapters[i % num_runs]) for i, operation in enumerate(operations)]
        outcomes.append((train(model, work, min_shared, budget, custom), adapters))
    assert_same(outcomes[0], outcomes[1], num_computed)


UNIQUE = 23 + 17 + 19 + 9 + 4 + 9 + 21 + 1 + 8 + 21
"""Tokens of ``tree_data`` in one pass; its own of each answer, and the one apart. Datum 7 ends in a turn."""

LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
PAIRS = [*((name, "cross_entropy") for name in (*DENSE, *MOE)), *(("gemma2", name) for name in LOSSES)]


@pytest.mark.parametrize(("architecture", "loss_fn"), PAIRS)
def test_training_equals_training_without_sharing(architecture, loss_fn):
    model, _ = open_pair(architecture)
    operation = checked(tree_data(loss_fn, model.vocab_size), loss_fn, model.vocab_size)
    compare(model, [operation], UNIQUE)


def test_an_uploaded_loss_sees_each_datum_alone():
    model, _ = open_pair("llama")
    custom = {"picked": CustomLoss.parse([("logprobs", 1), ("index", 1)], register_gather("", "").graph)}
    data = tree_data("custom", model.vocab_size)
    for i, datum in enumerate(data):
        datum.loss_fn_inputs["index"] = np.array([0, i % 10, len(datum.tokens) - 1])
    operation = checked(data, "custom", model.vocab_size, config={"loss_id": "picked"}, custom=custom)
    compare(model, [operation], UNIQUE, custom=custom)


@pytest.mark.parametrize("num_targets", [1, 3])
def test_several_targets_at_a_shared_position(num_targets):
    model, _ = open_pair("qwen3")
    data = tree_data("cross_entropy", model.vocab_size, num_targets=num_targets)
    data += tree_data("cross_entropy", model.vocab_size)  # the same tokens with one target
    compare(model, [checked(data, "cross_entropy", model.vocab_size)], UNIQUE + 4 + 1)  # answers too short to share


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3_moe"])
def test_forward_only_shares_too(architecture):
    model, _ = open_pair(architecture)
    data = tree_data("ppo", model.vocab_size)
    compare(model, [checked(data, "ppo", model.vocab_size, forward_only=True)], UNIQUE)


def test_operations_of_a_run_share_and_runs_do_not():
    """Two runs, each with the same tokens in three operations of different losses."""
    model, _ = open_pair("gpt_oss")
    operations = [
        checked(tree_data(loss_fn, model.vocab_size)[i::2], loss_fn, model.vocab_size)
        for loss_fn, i in (("cross_entropy", 0), ("gspo", 1), ("ppo", 0))
        for _ in range(2)
    ]
    compare(model, operations, 2 * (UNIQUE + 1), num_runs=2)  # an answer is too short to share


@pytest.mark.parametrize("budget", [60, 90, 40])
def test_trees_that_are_cut_by_the_budget(budget):
    """The last budget is shorter than most sequences, so their passes compute activations twice."""
    model, _ = open_pair("gemma2")
    compare(model, [checked(tree_data("ppo", model.vocab_size), "ppo", model.vocab_size)], budget=budget)


def test_positions_without_weight_on_a_prefix_that_others_train():
    """The prefix has a weight in one datum, none in another, and a datum without any weight is not trained."""
    model, _ = open_pair("qwen2")
    data = tree_data("cross_entropy", model.vocab_size)
    for i, datum in enumerate(data):
        datum.loss_fn_inputs["weights"][: (5, 23, 40)[i % 3]] = 0
    compare(model, [checked(data, "cross_entropy", model.vocab_size)])


def test_an_operation_that_fails_leaves_the_others_of_its_trie():
    model, _ = open_pair("llama")
    good = checked(tree_data("importance_sampling", model.vocab_size), "importance_sampling", model.vocab_size)
    data = tree_data("importance_sampling", model.vocab_size)
    data[2].loss_fn_inputs["logprobs"][:] = -1e30
    broken = checked(data, "importance_sampling", model.vocab_size)
    adapter, alone = make_adapter(model), make_adapter(model)
    failure, result = Trainer(model, 4096).run([TrainItem(broken, adapter), TrainItem(good, adapter)])
    assert "not finite" in str(failure)
    expected = train(model, [TrainItem(good, alone)], sys.maxsize)
    assert_same(([result], [adapter]), (expected, [alone]))


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_a_bfloat16_base_shares_too(architecture):
    register_implementations()
    device = Device(torch.device("cpu"), torch.bfloat16, 1 << 30)
    model = BaseModel(tiny_model(architecture).to(torch.bfloat16), device)
    operation = checked(tree_data("cross_entropy", model.vocab_size), "cross_entropy", model.vocab_size)
    gradients, losses = [], []
    for min_shared in (8, sys.maxsize):
        adapter = make_adapter(model)
        (result,) = train(model, [TrainItem(operation, adapter)], min_shared)
        gradients.append(torch.cat([factor.flatten() for pair in adapter.grads.values() for factor in pair]))
        losses.append(np.concatenate(result.logprobs))
    assert abs(losses[0] - losses[1]).mean() < 0.02
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99


def test_the_same_batch_gives_the_same_bits_with_shared_prefixes():
    model, _ = open_pair("qwen3_moe")
    operation = checked(tree_data("ppo", model.vocab_size), "ppo", model.vocab_size)
    adapters = [make_adapter(model) for _ in range(2)]
    for adapter in adapters:
        train(model, [TrainItem(operation, adapter)])
    for name, pair in adapters[0].grads.items():
        assert all(torch.equal(a, b) for a, b in zip(pair, adapters[1].grads[name], strict=True))
