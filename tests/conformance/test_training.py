"""TrainingClient: what forward, forward_backward, the losses and the optimiser compute, against other arithmetic."""

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.conformance.coverage import covers
from tests.conformance.samples import (
    MODEL,
    RANK,
    VOCAB_SIZE,
    batch,
    current_logprobs,
    datum,
    datum_of,
    download,
    flat_logprobs,
    logprobs,
    prompt_of,
    step,
    tokens_of,
    weighted_sum,
)

DATA = batch()


# ── forward and backward ──────────────────────────────────────────────────────────────────────────────


@covers("TrainingClient.forward", "TrainingClient.forward_backward")
def test_forward_gives_what_forward_backward_gives(trainer):
    without = trainer.forward(DATA, "cross_entropy").result()
    with_gradient = trainer.forward_backward(DATA, "cross_entropy").result()
    np.testing.assert_allclose(flat_logprobs(without), flat_logprobs(with_gradient), atol=1e-5)
    for output in (without, with_gradient):
        assert output.metrics["loss:sum"] == pytest.approx(weighted_sum(DATA, output), rel=1e-5)
        assert [one.shape for one in logprobs(output)] == [(8,), (13,), (4,)]


@covers("TrainingClient.forward_async", "TrainingClient.forward_backward_async", "TrainingClient.optim_step_async")
async def test_async_twins_do_the_same(trainer, service):
    other = service.create_lora_training_client(MODEL, rank=RANK, seed=7)
    result = await (await trainer.forward_backward_async(DATA, "cross_entropy"))
    await (await trainer.optim_step_async(types.AdamParams(learning_rate=1e-2)))
    step(other, DATA)
    after = await (await trainer.forward_async(DATA, "cross_entropy"))
    assert after.metrics["loss:sum"] != pytest.approx(result.metrics["loss:sum"])
    np.testing.assert_allclose(flat_logprobs(after), current_logprobs(other, DATA), atol=1e-5)


def test_logprobs_are_those_of_the_plain_model(trainer):
    """A fresh adapter changes nothing, so that the base model alone gives the same."""
    model = AutoModelForCausalLM.from_pretrained(trainer.get_info().model_data.tokenizer_id, dtype=torch.float32)
    for item, found in zip(DATA, logprobs(trainer.forward(DATA, "cross_entropy").result()), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([item.model_input.to_ints()])).logits[0]
        targets = item.loss_fn_inputs["target_tokens"].to_torch()
        expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-4)


def test_forward_leaves_no_gradient(trainer):
    before = current_logprobs(trainer, DATA)
    trainer.forward(DATA, "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=0.1)).result()
    np.testing.assert_array_equal(current_logprobs(trainer, DATA), before)


def test_gradients_add_up_until_the_step(service):
    together, apart = (service.create_lora_training_client(MODEL, rank=RANK, seed=7) for _ in range(2))
    whole = step(together, DATA)
    futures = [apart.forward_backward([item], "cross_entropy") for item in DATA]
    apart.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    parts = [future.result().metrics["loss:sum"] for future in futures]
    assert sum(parts) == pytest.approx(whole.metrics["loss:sum"], rel=1e-5)
    np.testing.assert_allclose(current_logprobs(apart, DATA), current_logprobs(together, DATA), atol=1e-5)


def test_chunks_of_a_large_call_are_one_call(service):
    """1100 datums are two requests, of which the second arrives first."""
    many = [datum(tokens_of(4, seed)) for seed in range(1100)]
    whole, parts = (service.create_lora_training_client(MODEL, rank=RANK, seed=7) for _ in range(2))
    result = whole.forward_backward(many, "cross_entropy").result()
    halves = [parts.forward_backward(half, "cross_entropy").result() for half in (many[:300], many[300:])]
    assert len(result.loss_fn_outputs) == 1100
    np.testing.assert_allclose(
        flat_logprobs(result), np.concatenate([flat_logprobs(half) for half in halves]), atol=1e-5
    )
    assert result.metrics["loss:sum"] == pytest.approx(sum(half.metrics["loss:sum"] for half in halves), rel=1e-5)
    for trainer in (whole, parts):
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    np.testing.assert_allclose(current_logprobs(whole, DATA), current_logprobs(parts, DATA), atol=1e-4)


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_several_targets_of_a_position(trainer, form):
    tokens, rng = tokens_of(40, 3), np.random.default_rng(4)
    targets, weights = torch.zeros(39, 6, dtype=torch.int64), torch.zeros(39, 6)
    cells = [(row, column) for row in range(39) for column in range(6 if form == "dense" else 1)]
    for row, column in cells:
        targets[row, column] = int(rng.integers(3, VOCAB_SIZE))
        weights[row, column] = float(rng.normal())
    several = datum_of(tokens[:-1], target_tokens=targets, weights=weights)
    assert (several.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None) == (form == "sparse")
    found = trainer.forward_backward([several], "cross_entropy").result()
    (shown,) = logprobs(found)
    assert shown.shape == (39, 6)
    for column in range(6 if form == "dense" else 1):
        one = datum_of(tokens[:-1], target_tokens=targets[:, column], weights=[0.0] * 39)
        np.testing.assert_allclose(shown[:, column], current_logprobs(trainer, [one]), atol=1e-5)
    assert found.metrics["loss:sum"] == pytest.approx(float(-(weights.numpy() * shown).sum()), rel=1e-4)


def test_spans_of_provenance_are_accepted(trainer, service):
    sampler = service.create_sampling_client(base_model=MODEL)
    prompt = tokens_of(4, 8)
    sequence = sampler.sample(prompt_of(prompt), 1, types.SamplingParams(max_tokens=3, stop=[])).result().sequences[0]
    tokens = prompt + sequence.tokens
    spans = [
        types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=4),
        types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=2),
    ]
    targets = [
        types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=3),
        types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=3),
    ]
    plain = datum(tokens)
    marked = plain.with_provenance(model_input=spans, loss_fn_inputs=targets)
    results = [current_logprobs(trainer, [one]) for one in (plain, marked)]
    np.testing.assert_array_equal(*results)


# ── losses ────────────────────────────────────────────────────────────────────────────────────────────


def policy_batch(trainer):
    """Datums with advantages, sampled by a policy that is not quite the present one."""
    rng, found = np.random.default_rng(5), []
    for item, now in zip(DATA, logprobs(trainer.forward(DATA, "cross_entropy").result()), strict=True):
        targets = item.loss_fn_inputs["target_tokens"]
        before = (now + rng.normal(0, 0.4, now.shape)).astype(np.float32)
        advantages = rng.normal(size=now.shape).astype(np.float32)
        tokens = item.model_input.to_ints()
        found.append(datum_of(tokens, target_tokens=targets, logprobs=before, advantages=advantages))
    return found


def expected_policy_loss(loss_fn, data, now, low, high, beta):
    total = 0.0
    for item, p in zip(data, now, strict=True):
        q, a = (item.loss_fn_inputs[name].to_numpy().astype(np.float64) for name in ("logprobs", "advantages"))
        ratio = np.exp(p - q)
        clipped = np.clip(ratio, low, high)
        total -= {
            "importance_sampling": lambda a=a, ratio=ratio: (ratio * a).sum(),
            "ppo": lambda a=a, ratio=ratio, clipped=clipped: np.minimum(ratio * a, clipped * a).sum(),
            "cispo": lambda a=a, p=p, clipped=clipped: (clipped * p * a).sum(),
            "dro": lambda a=a, p=p, q=q: (p * a - 0.5 * beta * (p - q) ** 2).sum(),
        }[loss_fn]()
    return total


@pytest.mark.parametrize(
    ("loss_fn", "config", "low", "high", "beta"),
    [
        ("importance_sampling", None, 0, 0, 0),
        ("ppo", None, 0.8, 1.2, 0),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, 0.9, 1.05, 0),
        ("cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}, 0.7, 1.3, 0),
        ("dro", {"beta": 0.3}, 0, 0, 0.3),
    ],
    ids=["importance_sampling", "ppo", "ppo-bounds", "cispo", "dro"],
)
def test_policy_losses_are_their_formulas(trainer, loss_fn, config, low, high, beta):
    data = policy_batch(trainer)
    output = trainer.forward_backward(data, loss_fn, config).result()
    expected = expected_policy_loss(loss_fn, data, logprobs(output), low, high, beta)
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


def test_gspo_uses_one_ratio_for_a_sequence(trainer):
    bounds = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    data = policy_batch(trainer)
    for item in data:
        item.loss_fn_inputs["sequence_ratio_mask"] = types.TensorData.from_numpy(
            np.ones(item.model_input.length, np.float32)
        )
    output = trainer.forward_backward(data, "gspo", bounds).result()
    expected = 0.0
    for item, p in zip(data, logprobs(output), strict=True):
        q, a = (item.loss_fn_inputs[name].to_numpy().astype(np.float64) for name in ("logprobs", "advantages"))
        ratio = np.exp((p - q).mean())
        expected -= np.minimum(ratio * a, np.clip(ratio, 0.5, 2.0) * a).sum()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


# ── custom losses ─────────────────────────────────────────────────────────────────────────────────────


def squared(logprobs, weights):
    """Not linear in the logprobs, so that a wrong gradient shows."""
    terms = weights * (logprobs + 1.0).square()
    return terms.sum(), {"custom/terms:mean": terms.mean(), "custom/count:sum": torch.ones_like(terms).sum()}


def squared_of_all(data, logprobs_list):
    pairs = [
        squared(one, item.loss_fn_inputs["weights"].to_torch()) for item, one in zip(data, logprobs_list, strict=True)
    ]
    return sum(loss for loss, _ in pairs), {"seen": float(len(pairs))}


def linearised(trainer):
    """The cross_entropy that has the same gradient at the present weights: w = -dloss/dlogprob."""
    found = []
    for item, now in zip(DATA, logprobs(trainer.forward(DATA, "cross_entropy").result()), strict=True):
        weights = (-2 * item.loss_fn_inputs["weights"].to_numpy() * (now + 1)).astype(np.float32)
        targets = item.loss_fn_inputs["target_tokens"]
        found.append(datum_of(item.model_input.to_ints(), target_tokens=targets, weights=weights))
    return found


def expected_squared(trainer):
    now = logprobs(trainer.forward(DATA, "cross_entropy").result())
    return sum(
        float((item.loss_fn_inputs["weights"].to_numpy() * (one + 1) ** 2).sum())
        for item, one in zip(DATA, now, strict=True)
    )


@covers(
    "TrainingClient.forward_backward_custom",
    "TrainingClient.forward_backward_custom_async",
    "ServiceClient.create_custom_loss",
)
@pytest.mark.parametrize("way", ["callable", "callable-async", "uploaded", "uploaded-async"])
async def test_custom_loss_has_the_gradient_of_its_linear_form(alice, service, trainer, way):
    loss = squared_of_all
    if way.startswith("uploaded"):
        service = alice.service()  # a session takes each loss once
        trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=7)
        loss = service.create_custom_loss(squared, {"logprobs": 1, "weights": 1}).result()
        assert loss.loss_id is not None
    expected = expected_squared(trainer)
    by_hand = service.create_lora_training_client(MODEL, rank=RANK, seed=7)
    step(by_hand, linearised(by_hand))
    if way.endswith("async"):
        output = await (await trainer.forward_backward_custom_async(DATA, loss))
    else:
        output = trainer.forward_backward_custom(DATA, loss).result()
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    if way.startswith("uploaded"):
        assert output.metrics["custom/count:sum"] == 25
    else:
        assert output.metrics["seen"] == 3
    np.testing.assert_allclose(current_logprobs(trainer, DATA), current_logprobs(by_hand, DATA), atol=1e-4)


def test_uploaded_loss_that_reaches_out_is_refused(service):
    def reads_addresses(logprobs):
        return logprobs.sum() + logprobs.data_ptr(), {}

    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="data_ptr"):
        service.create_custom_loss(reads_addresses, {"logprobs": 1}).result()


# ── the optimiser ─────────────────────────────────────────────────────────────────────────────────────


@covers("TrainingClient.save_weights_external")
@pytest.mark.filterwarnings("ignore")
def test_training_equals_peft_with_adamw(trainer, rest, tmp_path):
    """The exported adapter, trained on by PEFT and torch's AdamW, gives what the server's training gives."""
    params = {"learning_rate": 5e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1}
    directory = download(rest, trainer.save_weights_external("start").result().path, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(trainer.get_info().model_data.tokenizer_id, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(directory), is_trainable=True)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=5e-3,
        betas=(0.8, 0.9),
        eps=1e-8,
        weight_decay=0.1,
    )
    for clip in (0.0, 0.0, 0.5):
        output = step(trainer, DATA, **params, grad_clip_norm=clip)
        loss = sum(peft_loss(model, item) for item in DATA)
        assert output.metrics["loss:sum"] == pytest.approx(float(loss), rel=1e-3)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    final = float(sum(peft_loss(model, item) for item in DATA).detach())
    assert trainer.forward(DATA, "cross_entropy").result().metrics["loss:sum"] == pytest.approx(final, rel=1e-3)


def peft_loss(model, item):
    logits = model(torch.tensor([item.model_input.to_ints()])).logits[0]
    targets, weights = (item.loss_fn_inputs[name].to_torch() for name in ("target_tokens", "weights"))
    return -(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0] * weights).sum()


@covers("TrainingClient.optim_step")
def test_optim_step_takes_its_old_name_too(trainer):
    trainer.forward_backward(DATA, "cross_entropy").result()
    before = current_logprobs(trainer, DATA)
    assert trainer.optim_step(adam_params=types.AdamParams(learning_rate=1e-2)).result().metrics is not None
    assert np.abs(current_logprobs(trainer, DATA) - before).max() > 1e-3


def test_parameters_of_another_optimizer_are_refused_by_name(trainer):
    with pytest.raises(tinker.BadRequestError, match="dimuon"):
        trainer.optim_step(types.DimuonParams(learning_rate=0.1)).result()
    step(trainer, DATA)


# ── refusals; the run goes on after each ──────────────────────────────────────────────────────────────


def bad(**inputs):
    return [datum_of([5, 6, 7], **inputs)]


ONES = [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("data", "loss_fn", "config", "named"),
    [
        (bad(target_tokens=[6, 7, 9999], weights=ONES), "cross_entropy", None, "9999"),
        ([datum([5, 6, 9999, 7])], "cross_entropy", None, "9999"),
        (bad(target_tokens=[6, 7], weights=[1.0, 1.0]), "cross_entropy", None, "target_tokens"),
        (bad(target_tokens=[6, 7, 8], weights=[1.0, float("nan"), 1.0]), "cross_entropy", None, "weights"),
        (bad(target_tokens=[6, 7, 8]), "importance_sampling", None, "logprobs"),
        (bad(target_tokens=[6, 7, 8], weights=ONES), "nonsense", None, "nonsense"),
        (bad(target_tokens=[6, 7, 8], weights=ONES), "stable_reinforce", None, "stable_reinforce"),
        (bad(target_tokens=[6, 7, 8], weights=ONES), "cross_entropy", {"beta": 1.0}, "beta"),
        ([datum(tokens_of(600, 1))], "cross_entropy", None, "512"),
    ],
    ids=["target", "token", "length", "nan", "missing", "loss", "stable", "config", "context"],
)
def test_bad_data_is_refused_by_name_and_the_run_goes_on(trainer, data, loss_fn, config, named):
    """By the server or, with the same exception, by an SDK that looks at the data itself."""
    before = current_logprobs(trainer, DATA)
    under_way = trainer.forward(DATA, "cross_entropy")
    with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match=named) as refused:
        trainer.forward_backward(data, loss_fn, config).result()
    if isinstance(refused.value, tinker.RequestFailedError):
        assert refused.value.category == types.RequestErrorCategory.User
    np.testing.assert_array_equal(flat_logprobs(under_way.result()), before)
    np.testing.assert_array_equal(current_logprobs(trainer, DATA), before)
    step(trainer, DATA)
    assert np.abs(current_logprobs(trainer, DATA) - before).max() > 1e-3


def test_images_are_refused_by_name(trainer):
    picture = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=3)
    inputs = bad(target_tokens=[1, 2, 3], weights=ONES)[0].loss_fn_inputs
    item = types.Datum(model_input=types.ModelInput(chunks=[picture]), loss_fn_inputs=inputs)
    with pytest.raises(tinker.BadRequestError, match="image"):
        trainer.forward_backward([item], "cross_entropy").result()


# ── what is known of a run ────────────────────────────────────────────────────────────────────────────


@covers("TrainingClient.get_info", "TrainingClient.get_info_async")
async def test_info_names_model_and_rank(trainer):
    info = trainer.get_info()
    assert (info.model_id, info.model_name, info.is_lora, info.lora_rank) == (trainer.model_id, MODEL, True, RANK)
    assert info.optimizer_config.type == "adamw"
    assert (info.model_data.arch, info.model_data.model_name) == ("Qwen3ForCausalLM", MODEL)
    assert await trainer.get_info_async() == info


@covers("TrainingClient.get_tokenizer")
def test_tokenizer_comes_from_the_servers_model(trainer):
    tokenizer = trainer.get_tokenizer()
    tokens = tokenizer.encode("the lorimer makes bits")
    assert max(tokens) < VOCAB_SIZE
    assert tokenizer.decode(tokens) == "the lorimer makes bits"
