"""AdamW is torch's, and a step that cannot be taken changes nothing."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorimer.engine.adapters.adapters import Adapter, create_adapter, flatten, name_factors
from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.messages import LoraConfig, OptimizerConfig
from lorimer.engine.training.optim import apply, check_optimizer
from lorimer.errors import InvalidInput, Unsupported

TARGETS = [
    LoraTarget("a", "a", "attn", 33, 17),
    LoraTarget("b", "b", "mlp", 21, 9, num_experts=3, shared="A"),
    LoraTarget("c", "c", "unembed", 33, 101),
]


def make() -> Adapter:
    return create_adapter(TARGETS, LoraConfig(rank=5, seed=1), OptimizerConfig())


def add_gradient(adapter: Adapter, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        name: tuple(size * torch.randn(tensor.shape, generator=generator) for tensor in pair)
        for name, pair in adapter.weights.items()
    }
    adapter.add_gradient(pairs)  # type: ignore[arg-type]


def state(adapter: Adapter) -> list[torch.Tensor]:
    """Weights and moments, copied."""
    kinds = [name_factors(adapter.weights), *adapter.moments.values()]
    return [tensor.clone() for tensors in kinds for tensor in tensors.values()]


def test_twenty_steps_equal_torch() -> None:
    """Every field changes from step to step; one step has no gradient, another a vanishing one."""
    adapter = make()
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in flatten(adapter.weights)]
    torch_adamw = torch.optim.AdamW(parameters)
    for step in range(20):
        fields = {
            "learning_rate": 0.02 / (1 + step),
            "beta1": 0.9 - 0.02 * (step % 5),
            "beta2": 0.95 + 0.004 * (step % 7),
            "eps": 10.0 ** -(3 + step % 9),
            "weight_decay": 0.1 * (step % 3),
            "grad_clip_norm": 3.0 * (step % 4),
        }
        if step != 11:
            add_gradient(adapter, step, size=1e-9 if step == 13 else 1.0)
        grads = flatten(adapter.grads) if adapter.grads else [torch.zeros_like(p) for p in parameters]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.clone()
        norm = torch.nn.utils.get_total_norm(grads)
        if fields["grad_clip_norm"]:
            torch.nn.utils.clip_grad_norm_(parameters, fields["grad_clip_norm"])
        torch_adamw.param_groups[0].update(
            lr=fields["learning_rate"],
            betas=(fields["beta1"], fields["beta2"]),
            eps=fields["eps"],
            weight_decay=fields["weight_decay"],
        )
        before = [parameter.detach().clone() for parameter in parameters]
        torch_adamw.step()
        metrics = apply(adapter, fields)
        assert metrics["skipped"] == 0.0
        assert metrics["optimizer_step"] == step + 1
        moved = torch.nn.utils.get_total_norm([p - b for p, b in zip(parameters, before, strict=True)])
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert metrics["update_norm"] == pytest.approx(moved.item(), rel=1e-4)
        assert metrics["param_norm"] == pytest.approx(torch.nn.utils.get_total_norm(parameters).item(), rel=1e-5)
        assert adapter.grads is None
    for mine, theirs in zip(flatten(adapter.weights), parameters, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-6)
    for name, tensors in adapter.moments.items():
        for mine, parameter in zip(tensors.values(), parameters, strict=True):
            torch.testing.assert_close(mine, torch_adamw.state[parameter][name], rtol=1e-6, atol=1e-6)


def test_defaults_are_tinkers() -> None:
    adapter, explicit = make(), make()
    fields = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0, "grad_clip_norm": 0}
    for run, params in ((adapter, {}), (explicit, fields)):
        add_gradient(run, 0)
        apply(run, params)
    assert all(torch.equal(x, y) for x, y in zip(state(adapter), state(explicit), strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30], ids=["nan", "inf", "square-overflows"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, steps: int) -> None:
    adapter, undisturbed = make(), make()
    for step in range(steps):
        for run in (adapter, undisturbed):
            add_gradient(run, step)
            apply(run, {})
    add_gradient(adapter, 50)
    assert adapter.grads is not None
    adapter.grads["b"][1][1, 2, 3] = bad
    before = state(adapter)
    metrics = apply(adapter, {"grad_clip_norm": 1.0})
    assert metrics["skipped"] == 1.0
    assert metrics["optimizer_step"] == adapter.step == steps
    assert metrics["update_norm"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert adapter.grads is None
    assert all(torch.equal(x, y) for x, y in zip(before, state(adapter), strict=True))
    for run in (adapter, undisturbed):
        add_gradient(run, 60)
        assert apply(run, {})["skipped"] == 0.0
    assert all(torch.equal(x, y) for x, y in zip(state(adapter), state(undisturbed), strict=True))


@pytest.mark.parametrize(
    "params",
    [
        {"learning_rate": 3e38},
        {"learning_rate": 1e30},
        {"learning_rate": 1e30, "weight_decay": 1e30},
    ],
    ids=["3e38", "1e30", "decay"],
)
def test_a_result_that_is_not_finite_is_not_kept(params: dict[str, float]) -> None:
    adapter = make()
    add_gradient(adapter, 0)
    apply(adapter, {})
    before = state(adapter)
    add_gradient(adapter, 1)
    metrics = apply(adapter, params)
    assert metrics["skipped"] == 1.0
    assert adapter.step == 1
    assert all(torch.equal(x, y) for x, y in zip(before, state(adapter), strict=True))


SIZES = st.one_of(st.floats(0, allow_nan=False, allow_infinity=False), st.sampled_from([0.0, 1e-45, 1e-12, 1.0, 3e38]))
BETAS = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.9, 1 - 1e-7, 1 - 1e-16]))
STEPS = st.fixed_dictionaries(
    {},
    optional={
        "learning_rate": SIZES,
        "beta1": BETAS,
        "beta2": BETAS,
        "eps": SIZES.filter(bool),
        "weight_decay": SIZES,
        "grad_clip_norm": SIZES,
    },
)
GRADIENTS = st.none() | st.floats(width=32) | st.sampled_from([0.0, 1e-30, 1.0, 1e18, 1e19, 1e38])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(STEPS, GRADIENTS), min_size=1, max_size=6))
def test_whatever_is_asked_nothing_that_is_not_finite_is_kept(
    steps: list[tuple[dict[str, float], float | None]],
) -> None:
    """Also where a step is taken after others as extreme; one that is skipped or refused changes no bit."""
    adapter = create_adapter([LoraTarget("a", "a", "attn", 3, 4)], LoraConfig(rank=2, seed=1), OptimizerConfig())
    for params, size in steps:
        if size is not None:
            add_gradient(adapter, 0, size)
        before, step = state(adapter), adapter.step
        try:
            metrics = apply(adapter, params)
        except InvalidInput as error:
            assert any(f"{name} is {value!r}" in str(error) for name, value in params.items() if value > 3e38)
            adapter.clear_gradient()
            metrics = {"skipped": 1.0}
        assert all(math.isfinite(value) for value in metrics.values())
        assert all(tensor.isfinite().all() for tensor in state(adapter))
        assert adapter.step == step + (metrics["skipped"] == 0.0)
        if metrics["skipped"]:
            assert all(torch.equal(x, y) for x, y in zip(before, state(adapter), strict=True))


@pytest.mark.parametrize("gradient", [None, 0.0, 1.0], ids=["none", "zero", "some"])
@pytest.mark.parametrize("field", ["learning_rate", "eps", "weight_decay"])
def test_a_field_that_float32_cannot_hold_is_refused_by_name(field: str, gradient: float | None) -> None:
    adapter = make()
    if gradient is not None:
        add_gradient(adapter, 0, gradient)
    before = state(adapter)
    with pytest.raises(InvalidInput, match=rf"{field} is 1e\+39, but must be a finite number .* at most 3.403e\+38"):
        apply(adapter, {field: 1e39})
    assert all(torch.equal(x, y) for x, y in zip(before, state(adapter), strict=True))


def test_a_vanishing_eps_is_guarded() -> None:
    """An eps that is zero in float32 makes 0 / 0 where gradients vanish."""
    adapter = make()
    before = state(adapter)
    assert apply(adapter, {"eps": 1e-60})["skipped"] == 1.0
    assert adapter.moments == {}
    assert all(torch.equal(x, y) for x, y in zip(before, state(adapter), strict=True))


def test_no_gradient_is_a_zero_gradient() -> None:
    adapter = make()
    before = state(adapter)
    metrics = apply(adapter, {})
    assert (metrics["grad_norm"], metrics["update_norm"], metrics["skipped"], metrics["optimizer_step"]) == (0, 0, 0, 1)
    weights = flatten(adapter.weights)
    assert all(torch.equal(x, y) for x, y in zip(before, weights, strict=True))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0, but must be a finite number of at least 0"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast', but must be a finite number of at least 0"),
        ({"learning_rate": True}, "learning_rate is True, but must be a finite number of at least 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"beta1": 1.0}, "beta1 is 1.0, but must be at least 0 and below 1"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
        ({"eps": 0.0}, "eps is 0.0, but must be a finite number above 0"),
        ({"weight_decay": math.inf}, "weight_decay is inf"),
        ({"grad_clip_norm": -1.0}, "grad_clip_norm is -1.0"),
        ({"momentum": 0.9, "lr": 1.0}, "no parameter 'lr', 'momentum'; it has learning_rate, beta1"),
        ({"eps": "x"}, "eps is 'x'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_parameters_are_named_and_nothing_happens(params: dict[str, Any], message: str) -> None:
    adapter = make()
    add_gradient(adapter, 0)
    before = copy.deepcopy(adapter)
    with pytest.raises(InvalidInput, match=message):
        apply(adapter, params)
    assert adapter.grads is not None
    assert before.grads is not None
    assert adapter.step == 0
    assert all(torch.equal(x, y) for x, y in zip(flatten(adapter.grads), flatten(before.grads), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(state(adapter), state(before), strict=True))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(type="dimuon", version=1), "'dimuon' is not supported: its update formula is not published"),
        (OptimizerConfig(type="rprop"), "'rprop' is not known; known are 'adamw', 'adam', 'sgd'"),
        (OptimizerConfig(version=2), "'adamw' has no versions"),
    ],
    ids=["dimuon", "unknown", "version"],
)
def test_other_optimizers_are_refused_by_name(config: OptimizerConfig, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        check_optimizer(config)


def test_adamw_is_accepted() -> None:
    check_optimizer(OptimizerConfig())
