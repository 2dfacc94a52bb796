"""Full fine-tuning against plain transformers with torch's autograd, one sequence at a time."""

import copy

import pytest
import torch

from lorimer.engine.full.full_run import apply_step, create_full_run
from lorimer.engine.messages import FullConfig, OptimizerConfig
from lorimer.engine.model.base_model import BaseModel, register_implementations
from lorimer.engine.model.device import Device
from lorimer.engine.training.trainer import Trainer, TrainItem
from lorimer.errors import InvalidInput
from lorimer.models.debug import tiny_model
from tests.engine.reference import DENSE, MOE, checked, literal_loss, make_datum, relative_error

CPU = Device(torch.device("cpu"), torch.float32, 1 << 30)
LENGTHS = (9, 17, 5, 12)
FLAGS = ("train_attn", "train_mlp", "train_unembed", "train_embed", "train_norms")


def open_pair(architecture, **overrides):
    """The engine's model, whose weights are trained, and an untouched copy of the same weights."""
    register_implementations()
    plain = tiny_model(architecture, **overrides)
    plain.config._attn_implementation = "eager"
    return BaseModel(copy.deepcopy(plain), CPU, name=architecture, trains_base=True), plain.eval()


def make_run(model, **flags):
    return create_full_run(model, FullConfig(**flags), OptimizerConfig())


def train(model, run, data, loss_fn="cross_entropy", budget=64, config=None):
    operation = checked(data, loss_fn, model.vocab_size, config=config)
    (result,) = Trainer(model, budget).run([TrainItem(operation, run)])
    if isinstance(result, Exception):
        raise result
    return result


def run_plain(plain, data, loss_fn="cross_entropy"):
    """Loss sum, log probabilities and the gradient of every parameter."""
    total, logprobs = 0.0, []
    plain.zero_grad()
    for datum in data:
        all_logprobs = plain(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0].float().log_softmax(-1)
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
        chosen = all_logprobs.gather(1, targets.view(len(datum.tokens), -1)).view(targets.shape)
        loss = literal_loss(loss_fn, chosen, datum)
        loss.backward()
        total += loss.item()
        logprobs.append(chosen.detach().numpy())
    return total, logprobs, {name: p.grad for name, p in plain.named_parameters()}


def make_data(model, lengths=LENGTHS, loss_fn="cross_entropy", first_seed=0):
    return [make_datum(loss_fn, n, first_seed + seed, model.vocab_size) for seed, n in enumerate(lengths)]


CASES = [
    *((name, {"tie_word_embeddings": is_tied}) for name in (*DENSE, *MOE) for is_tied in (False, True)),
]


@pytest.mark.parametrize(("architecture", "overrides"), CASES)
def test_loss_logprobs_and_gradients_equal_plain_transformers(architecture, overrides):
    model, plain = open_pair(architecture, **overrides)
    run, data = make_run(model), make_data(model)
    result = train(model, run, data)
    loss, logprobs, gradients = run_plain(plain, data)
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
    for ours, theirs in zip(result.logprobs, logprobs, strict=True):
        assert abs(ours - theirs).max() < 1e-5
    assert run.grads.keys() == gradients.keys()
    for name, expected in gradients.items():
        assert relative_error(run.grads[name], expected) < 1e-4, name


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_gradients_of_every_loss_equal_plain_transformers(loss_fn):
    model, plain = open_pair("gemma2")
    run, data = make_run(model), make_data(model, loss_fn=loss_fn)
    result = train(model, run, data, loss_fn)
    loss, _, gradients = run_plain(plain, data, loss_fn)
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    for name, expected in gradients.items():
        assert relative_error(run.grads[name], expected) < 1e-4, name


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_oss"])
def test_a_run_trains_the_groups_it_is_asked_to_and_no_others(architecture, flag):
    model, plain = open_pair(architecture, tie_word_embeddings=False)
    flags = {name: name == flag for name in FLAGS}
    run, data = make_run(model, **flags), make_data(model)
    train(model, run, data)
    _, _, gradients = run_plain(plain, data)
    words = {
        "train_attn": ("self_attn",),
        "train_mlp": ("mlp",),
        "train_unembed": ("lm_head",),
        "train_embed": ("embed_tokens",),
        "train_norms": ("norm",),
    }
    expected = {
        name
        for name in gradients
        if any(word in name for word in words[flag]) and (flag == "train_norms" or "norm" not in name)
    }
    assert run.grads.keys() == expected
    for name in expected:
        assert relative_error(run.grads[name], gradients[name]) < 1e-4, name


def test_flags_that_contradict_a_tied_head_are_refused():
    model, _ = open_pair("qwen2", tie_word_embeddings=True)
    with pytest.raises(InvalidInput, match="one tensor; accepted are both true or both false"):
        make_run(model, train_embed=False)
    with pytest.raises(InvalidInput, match="nothing to train"):
        make_run(model, **dict.fromkeys(FLAGS, False))
    assert "lm_head.weight" not in make_run(model).weights


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
def test_gradients_do_not_depend_on_passes_or_checkpointing(architecture):
    model, _ = open_pair(architecture)
    data = make_data(model)
    whole, cut, recomputed = (make_run(model) for _ in range(3))
    train(model, whole, data, budget=256)
    for datum in data:
        train(model, cut, [datum], budget=64)
    train(model, recomputed, data, budget=8)  # sequences beyond the budget are recomputed in the backward pass
    for name, expected in whole.grads.items():
        assert relative_error(cut.grads[name], expected) < 1e-4, name
        assert relative_error(recomputed.grads[name], expected) < 1e-4, name


def test_a_batch_that_fails_changes_nothing():
    model, _ = open_pair("llama")
    run, data = make_run(model), make_data(model)
    train(model, run, data[:1])
    before = {name: grad.clone() for name, grad in run.grads.items()}
    bad = make_datum("ppo", 12, 7, model.vocab_size)
    bad.loss_fn_inputs["logprobs"][:] = -1e30
    operations = [checked([*make_data(model, loss_fn="ppo"), bad], "ppo", model.vocab_size)]
    (failure,) = Trainer(model, 16).run([TrainItem(operation, run) for operation in operations])
    assert isinstance(failure, InvalidInput)
    for name, expected in before.items():
        assert torch.equal(run.grads[name], expected), name
    assert all(parameter.grad is None for parameter in model.transformer.parameters())


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gemma2", "qwen3_moe"])
def test_twenty_steps_equal_adamw_on_the_plain_model(architecture):
    model, plain = open_pair(architecture)
    run = make_run(model)
    fields = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    reference = torch.optim.AdamW(plain.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(20):
        data = make_data(model, first_seed=10 * step)
        ours = train(model, run, data).metrics["loss:sum"]
        metrics = apply_step(run, {**fields, "grad_clip_norm": 1.0})
        theirs, _, _ = run_plain(plain, data)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step()
        assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-5)  # terms of the sum cancel each other
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert run.step == 20
    for name, expected in plain.named_parameters():
        assert relative_error(run.weights[name], expected.detach()) < 2e-4, name
