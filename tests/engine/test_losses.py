"""Every loss against its formula written with torch operations and differentiated by autograd."""

import math
import subprocess
import sys

import pytest
import torch

from lorimer.engine.training.losses import LOSSES, MetricSums, active_positions, evaluate, find_loss
from lorimer.errors import InvalidInput, Unsupported

CLIPS = ("clip_low_threshold", "clip_high_threshold")


def literal(name, logprobs, inputs, config):
    """The definitions as published, with ``detach`` where they stop the gradient."""
    if name == "cross_entropy":
        return -(inputs["weights"] * logprobs).sum()
    q, advantages = inputs["logprobs"], inputs["advantages"]
    low, high = (torch.as_tensor(inputs.get(key, config.get(key, 0.0)), dtype=logprobs.dtype) for key in CLIPS)
    ratio = torch.exp(logprobs - q)
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "cispo":
        return -(torch.clamp(ratio, low, high).detach() * logprobs * advantages).sum()
    if name == "dro":
        return -(logprobs * advantages - 0.5 * config["beta"] * (logprobs - q) ** 2).sum()
    if name == "gspo":
        is_masked = inputs["sequence_ratio_mask"].bool()
        mean = (logprobs.detach() - q)[is_masked].mean() if is_masked.any() else torch.zeros((), dtype=q.dtype)
        ratio = torch.exp(mean) * torch.exp(logprobs - logprobs.detach())
    return -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages).sum()


def make_inputs(name, length, dtype=torch.float64, *, spread=1.0):
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    logprobs = -normal(length).abs() * 2
    if name == "cross_entropy":
        return logprobs, {"weights": normal(length)}
    inputs = {"logprobs": logprobs + spread * normal(length), "advantages": normal(length)}
    inputs["advantages"][::4] = 0
    inputs["logprobs"][1::5] = logprobs[1::5]
    if name == "gspo":
        inputs["sequence_ratio_mask"] = (torch.arange(length) >= length // 3).to(dtype)
    return logprobs, inputs


def check_against_literal(name, logprobs, inputs, config=None, *, tolerance=1e-11):
    loss = LOSSES[name]
    merged = {**loss.config, **(config or {})}
    leaf = logprobs.clone().requires_grad_()
    expected = literal(name, leaf, inputs, merged)
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    value, gradient, metrics = evaluate(loss, logprobs, inputs, config or {})
    assert value.shape == () and value.dtype == torch.float64
    assert gradient.shape == logprobs.shape and gradient.dtype == logprobs.dtype
    torch.testing.assert_close(value, expected.detach().double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance)
    return metrics.finalise()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("length", [1, 2, 37, 1000])
def test_value_and_gradient_equal_the_published_formula(name, length):
    logprobs, inputs = make_inputs(name, length)
    metrics = check_against_literal(name, logprobs, inputs)
    assert metrics["tokens:sum"] == length
    assert all(key.count(":") == 1 for key in metrics)


@pytest.mark.parametrize("name", LOSSES)
def test_float32_agrees_with_float64(name):
    logprobs, inputs = make_inputs(name, 501, torch.float32)
    check_against_literal(name, logprobs, inputs, tolerance=1e-4)


@pytest.mark.parametrize("spread", [0.0, 1e-4, 30.0], ids=["ties", "near-ties", "extreme"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_ratios_on_and_far_from_the_bounds(name, spread):
    logprobs, inputs = make_inputs(name, 400, spread=spread)
    check_against_literal(name, logprobs, inputs)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("low, high", [(1.0, 1.0), (0.0, 1.0), (1.0, 3.0), (0.5, 0.5)])
def test_ratio_exactly_on_a_bound_passes_the_gradient(name, low, high):
    logprobs, inputs = make_inputs(name, 60, spread=0.0)
    check_against_literal(name, logprobs, inputs, {CLIPS[0]: low, CLIPS[1]: high})


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("given", [CLIPS, CLIPS[:1], CLIPS[1:]], ids=["both", "low", "high"])
def test_clip_bounds_by_position_replace_the_config(name, given):
    logprobs, inputs = make_inputs(name, 90)
    inputs[CLIPS[0]] = torch.linspace(0.0, 1.0, 90, dtype=torch.float64)
    inputs[CLIPS[1]] = torch.linspace(3.0, 1.0, 90, dtype=torch.float64)
    inputs = {key: value for key, value in inputs.items() if key not in CLIPS or key in given}
    check_against_literal(name, logprobs, inputs, {CLIPS[0]: 0.1, CLIPS[1]: 2.9})


@pytest.mark.parametrize("beta", [0.0, 0.05, 7.0])
def test_dro_beta(beta):
    logprobs, inputs = make_inputs("dro", 50)
    check_against_literal("dro", logprobs, inputs, {"beta": beta})


def test_cross_entropy_of_several_targets_with_negative_weights():
    generator = torch.Generator().manual_seed(1)
    logprobs = -torch.rand(20, 7, generator=generator, dtype=torch.float64) * 9
    weights = torch.randn(20, 7, generator=generator, dtype=torch.float64)
    weights[3] = 0
    weights[:, 2] = 0
    metrics = check_against_literal("cross_entropy", logprobs, {"weights": weights})
    assert metrics["tokens:sum"] == 20
    assert metrics["weight:sum"] == pytest.approx(weights.sum().item())
    is_active = active_positions(LOSSES["cross_entropy"], {"weights": weights.numpy()}, {})
    assert is_active.tolist() == [row != 3 for row in range(20)]


def test_defaults_are_the_documented_ones():
    assert {name: dict(loss.config) for name, loss in LOSSES.items()} == {
        "cross_entropy": {},
        "importance_sampling": {},
        "ppo": {CLIPS[0]: 0.8, CLIPS[1]: 1.2},
        "cispo": {CLIPS[0]: 0.0, CLIPS[1]: 4.0},
        "dro": {"beta": 0.05},
        "gspo": {CLIPS[0]: 1 - 3e-4, CLIPS[1]: 1 + 4e-4},
    }


@pytest.mark.parametrize(
    "name, expected",
    [
        ("cross_entropy", 2 * 0.5 + 1 * 2.0),
        ("importance_sampling", -(math.exp(0.5) * 2 - math.exp(-1))),
        ("ppo", -(1.2 * 2 - 0.8)),
        ("cispo", -(math.exp(0.5) * 2 * -0.5 + math.exp(-1) * 2.0)),
        ("dro", -((-1.0 - 0.025 * 0.25) + (2.0 - 0.025))),
        ("gspo", -(math.exp(-0.25) * 2 - (1 - 3e-4))),
    ],
)
def test_two_positions_by_hand(name, expected):
    """l = (-0.5, -2), q = (-1, -1), A = (2, -1), w = (2, 1); the ratios are e^0.5 and e^-1, that of both e^-0.25."""
    inputs = {
        "weights": torch.tensor([2.0, 1.0]),
        "logprobs": torch.tensor([-1.0, -1.0]),
        "advantages": torch.tensor([2.0, -1.0]),
        "sequence_ratio_mask": torch.tensor([1.0, 1.0]),
    }
    value, _, _ = evaluate(LOSSES[name], torch.tensor([-0.5, -2.0]), inputs, {})
    assert value.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.is_token_local])
def test_slices_of_token_local_losses_add_up(name):
    logprobs, inputs = make_inputs(name, 100)
    value, gradient, metrics = evaluate(LOSSES[name], logprobs, inputs, {})
    parts = [
        evaluate(LOSSES[name], logprobs[a:b], {key: tensor[a:b] for key, tensor in inputs.items()}, {})
        for a, b in [(0, 1), (1, 60), (60, 100)]
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), value)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)
    assert (parts[0][2] + parts[1][2] + parts[2][2]).finalise() == pytest.approx(metrics.finalise())


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("cross_entropy", "dro")])
def test_zero_advantage_silences_an_infinite_ratio(name):
    logprobs = torch.tensor([-1.0, -1.0])
    inputs = {
        "logprobs": torch.tensor([-500.0, -1.5]),
        "advantages": torch.tensor([0.0, 1.0]),
        "sequence_ratio_mask": torch.tensor([0.0, 1.0]),
    }
    value, gradient, metrics = evaluate(LOSSES[name], logprobs, inputs, {})
    assert math.isfinite(value.item()) and gradient.isfinite().all() and gradient[0] == 0
    assert metrics.finalise()["ratio:mean"] == pytest.approx(math.exp(0.5))


def test_overflowing_ratio_is_shown_and_metrics_stay_finite():
    inputs = {"logprobs": torch.tensor([-2000.0]), "advantages": torch.tensor([1.0])}
    value, gradient, _ = evaluate(LOSSES["importance_sampling"], torch.tensor([-1.0]), inputs, {})
    assert value.item() == -math.inf and gradient.item() == -math.inf
    value, gradient, metrics = evaluate(LOSSES["ppo"], torch.tensor([-1.0]), inputs, {})
    assert value.item() == pytest.approx(-1.2) and gradient.item() == 0
    assert all(math.isfinite(metric) for metric in metrics.finalise().values())


def test_zero_weight_silences_an_infinite_logprob():
    value, gradient, _ = evaluate(
        LOSSES["cross_entropy"], torch.tensor([-math.inf, -2.0]), {"weights": torch.tensor([0.0, 3.0])}, {}
    )
    assert value.item() == 6 and gradient.tolist() == [0, -3]


def test_gspo_without_masked_position_has_ratio_one():
    logprobs, inputs = make_inputs("gspo", 30)
    inputs["sequence_ratio_mask"] = torch.zeros(30, dtype=torch.float64)
    metrics = check_against_literal("gspo", logprobs, inputs)
    assert metrics["ratio:mean"] == 1 and metrics["loss:sum"] == pytest.approx(-inputs["advantages"].sum().item())


def test_metrics_are_over_positions_with_an_advantage():
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    inputs = {
        "logprobs": torch.tensor([-2.0, -0.5, -1.0, -9.0]),
        "advantages": torch.tensor([1.0, 1.0, -2.0, 0.0]),
    }
    _, _, metrics = evaluate(LOSSES["ppo"], logprobs, inputs, {})
    ratios = [math.exp(1.0), math.exp(-0.5), 1.0]
    assert metrics.finalise() == pytest.approx(
        {
            "loss:sum": -(1.2 + ratios[1] - 2.0),
            "tokens:sum": 4,
            "ratio:mean": sum(ratios) / 3,
            "clip_fraction:mean": 1 / 3,
            "kl_sampler:mean": (-1.0 + 0.5) / 3,
            "kl_sampler_v2:mean": (1.0 + 0.25) / 6,
        },
        rel=1e-6,
    )


def test_clip_fraction_of_cispo_leaves_out_positions_without_advantage():
    inputs = {"logprobs": torch.tensor([-9.0, -9.0, -1.0]), "advantages": torch.tensor([0.0, -1.0, 1.0])}
    _, _, metrics = evaluate(LOSSES["cispo"], -torch.ones(3), inputs, {})
    assert metrics.finalise()["clip_fraction:mean"] == 0.5


def test_mean_over_no_position_is_left_out():
    inputs = {"logprobs": torch.zeros(3), "advantages": torch.zeros(3)}
    _, _, metrics = evaluate(LOSSES["ppo"], -torch.ones(3), inputs, {})
    assert isinstance(metrics, MetricSums)
    assert metrics.finalise() == {"loss:sum": 0, "tokens:sum": 3}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_positions_called_inactive_have_no_gradient(name, beta):
    logprobs, inputs = make_inputs(name, 80)
    if name == "cross_entropy":
        inputs["weights"][::3] = 0
    config = {"beta": beta} if name == "dro" else {}
    is_active = active_positions(LOSSES[name], {key: value.numpy() for key, value in inputs.items()}, config)
    _, gradient, _ = evaluate(LOSSES[name], logprobs, inputs, config)
    assert is_active.dtype == bool and is_active.shape == (80,)
    assert (gradient[~is_active] == 0).all()
    assert is_active.all() == (name == "dro" and beta > 0)


def test_the_sum_is_kept_in_float64():
    weights = torch.full((100_000,), 1.0)
    logprobs = torch.full((100_000,), -0.1)
    value, _, _ = evaluate(LOSSES["cross_entropy"], logprobs, {"weights": weights}, {})
    assert value.item() == pytest.approx(100_000 * torch.tensor(0.1).item(), rel=1e-12)


def test_logprobs_that_require_gradients_build_no_graph():
    logprobs, inputs = make_inputs("ppo", 10)
    value, gradient, _ = evaluate(LOSSES["ppo"], logprobs.requires_grad_(), inputs, {})
    assert not value.requires_grad and not gradient.requires_grad


def test_losses_that_do_not_exist_are_refused_by_name():
    assert find_loss("ppo") is LOSSES["ppo"]
    with pytest.raises(Unsupported, match=r"'stable_reinforce' is not available: its formula is not published"):
        find_loss("stable_reinforce")
    with pytest.raises(InvalidInput, match=r"'dpo' is not known; accepted are cross_entropy, .*gspo, custom"):
        find_loss("dpo")


def test_the_table_loads_without_torch():
    program = "import sys, lorimer.engine.training.losses; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
