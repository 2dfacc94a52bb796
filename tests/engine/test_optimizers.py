"""Every optimiser against an independent reference, on weights of any shape; and what is saved of it."""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorimer.engine.adapters import checkpoints
from lorimer.engine.adapters.adapters import Adapter, create_adapter, flatten, name_factors, snapshot
from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.messages import LoraConfig, OptimizerConfig
from lorimer.engine.training import optim, quantized_moments
from lorimer.engine.training.optim import apply, check_state, state_bytes, take_step
from lorimer.engine.training.optimizers import OPTIMIZERS, average_weights, defaults
from lorimer.errors import CheckpointError, InvalidInput
from tests.engine.optimizer_references import TorchReference, dynamic_map, make_reference

NAMES = list(OPTIMIZERS)
WAYS = [*((name, torch.bfloat16) for name in NAMES), ("muon", torch.float32)]
"""Each optimiser with the products of bfloat16 numbers that a device chooses; only Muon has any."""
SHAPES = {
    "norm": (33,),
    "q_proj": (24, 40),
    "o_proj": (40, 24),
    "experts": (3, 12, 20),
    "embedding": (70, 60),
    "head": (4500,),
}
GROUPS = {
    "norm": frozenset({"norms"}),
    "q_proj": frozenset({"attn", "lora_A"}),
    "o_proj": frozenset({"attn", "lora_B"}),
    "experts": frozenset({"mlp"}),
    "embedding": frozenset({"embed"}),
    "head": frozenset({"unembed"}),
}


def numbers(seed: int, size: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def fields_of(name: str, step: int) -> dict[str, Any]:
    """Return every field of a step, each with another value than in the step before."""
    values: dict[str, Any] = {
        "learning_rate": 0.02 / (1 + step),
        "beta1": 0.9 - 0.02 * (step % 5),
        "beta2": 0.95 + 0.004 * (step % 7),
        "eps": 10.0 ** -(3 + step % 6),
        "weight_decay": 0.1 * (step % 3),
        "momentum": 0.8 + 0.03 * (step % 5),
        "dampening": 0.0 if step % 2 else 0.1,
        "nesterov": bool(step % 2),
        "beta2_decay": -0.8 + 0.05 * (step % 4),
        "eps1": 10.0 ** -(5 + step % 4),
        "eps2": 10.0 ** -(2 + step % 3),
        "d": 0.7 + 0.2 * (step % 4),
        "ns_coefficients": [3.4445, -4.775, 2.0315] if step % 3 else [3.0, -4.0, 2.0],
        "ns_steps": 4 + step % 3,
        "adjust_lr_fn": "original" if step % 3 else "match_rms_adamw",
        "r": 0.5 * (step % 3),
        "weight_lr_power": 1.0 + step % 2,
    }
    own = defaults(name).keys() - {"grad_clip_norm", "lr_multipliers"}
    return {key: values[key.removeprefix("adamw_")] for key in own}


def multipliers_of(given: Mapping[str, float]) -> dict[str, float]:
    return {name: math.prod(given.get(group, 1.0) for group in groups) for name, groups in GROUPS.items()}


@pytest.mark.parametrize(("name", "product_dtype"), WAYS)
def test_twenty_steps_equal_the_reference(name: str, product_dtype: torch.dtype) -> None:
    """Every field changes from step to step; weights have one to three dimensions and different learning rates."""
    weights = numbers(0)
    reference = make_reference(name, weights, GROUPS)
    state: dict[str, dict[str, Tensor]] = {}
    for step in range(20):
        fields = fields_of(name, step)
        given = {} if step % 4 == 0 else {"attn": 0.5, "lora_B": 4.0, "norms": 0.0 if step % 5 == 0 else 2.0}
        grads = None if step == 11 else numbers(100 + step, size=1e-4 if step == 13 else 1.0)
        used = {key: torch.zeros(shape) for key, shape in SHAPES.items()} if grads is None else copy.deepcopy(grads)
        before = copy.deepcopy(reference.weights)
        reference.step(used, fields, multipliers_of(given))
        params = fields | {"lr_multipliers": given}
        outcome = take_step(
            OptimizerConfig(type=name), weights, grads, state, step, params, GROUPS, product_dtype=product_dtype
        )
        assert outcome.is_applied
        assert outcome.metrics["optimizer_step"] == step + 1
        moved = torch.nn.utils.get_total_norm([reference.weights[key] - before[key] for key in SHAPES])
        assert outcome.metrics["update_norm"] == pytest.approx(moved.item(), rel=1e-2 if name == "muon" else 1e-3)
        assert outcome.metrics["optimizer_state_bytes"] == state_bytes(state)
    tolerance = 2e-5 if name in ("adamw8bit", "schedule_free_adamw") else 2e-6
    for key, expected in reference.weights.items():
        # A sum in another order may be rounded to another bfloat16 number, which the iterations of a step magnify.
        is_order_free = product_dtype is torch.bfloat16 or key not in state["momentum_buffer"]
        limit = tolerance if is_order_free else 2e-4
        torch.testing.assert_close(weights[key], expected, rtol=1e-5, atol=limit)
    if isinstance(reference, TorchReference):
        _compare_states(reference, state)


def _compare_states(reference: TorchReference, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    for kind, tensors in state.items():
        for key, mine in tensors.items():
            parameters = reference.matrices.get(key) or [reference.parameters[key]]
            theirs = [reference.optimizers[key].state[parameter][kind] for parameter in parameters]
            torch.testing.assert_close(mine, torch.stack(theirs).reshape(mine.shape), rtol=1e-5, atol=1e-6)


PACKAGES = {
    "lion": ("lion_pytorch", "Lion"),
    "schedule_free_adamw": ("schedulefree", "AdamWScheduleFree"),
    "adamw8bit": ("torchao.optim", "AdamW8bit"),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_twenty_steps_equal_the_package_that_defines_the_optimizer(name: str) -> None:
    """Runs where the package is installed; betas stay, because these packages do not expect them to change."""
    module, kind = PACKAGES[name]
    optimizer_class = getattr(pytest.importorskip(module), kind)
    weights = {"big": torch.randn(64, 128, generator=torch.Generator().manual_seed(1)), "small": torch.randn(31)}
    parameters = {key: torch.nn.Parameter(tensor.clone()) for key, tensor in weights.items()}
    optimizer = optimizer_class(parameters.values(), betas=(0.9, 0.97), **({} if name == "lion" else {"eps": 1e-8}))
    if name == "schedule_free_adamw":
        optimizer.train()
    state: dict[str, dict[str, Tensor]] = {}
    for step in range(20):
        fields = {"learning_rate": 0.01 / (1 + step % 5), "weight_decay": 0.1 * (step % 3), "beta1": 0.9, "beta2": 0.97}
        if name != "lion":
            fields["eps"] = 1e-8
        grads = {
            key: torch.randn(one.shape, generator=torch.Generator().manual_seed(step)) for key, one in weights.items()
        }
        for key, parameter in parameters.items():
            parameter.grad = grads[key].clone()
        rate = fields["learning_rate"]
        lr = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0].update(weight_decay=fields["weight_decay"])
        optimizer.param_groups[0]["lr"] = lr.fill_(rate) if isinstance(lr, Tensor) else rate
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        take_step(OptimizerConfig(type=name), weights, grads, state, step, fields, {})
    for key, parameter in parameters.items():
        torch.testing.assert_close(weights[key], parameter.detach(), rtol=1e-5, atol=1e-5)
    if name == "schedule_free_adamw":
        optimizer.eval()
        averaged = average_weights(name, weights, state)
        assert averaged is not None
        for key, parameter in parameters.items():
            torch.testing.assert_close(averaged[key], parameter.detach(), rtol=1e-5, atol=1e-5)


def test_samplers_of_schedule_free_get_the_average() -> None:
    """Also where beta1, which mixes average and weights, changes from step to step."""
    weights = numbers(0)
    reference: Any = make_reference("schedule_free_adamw", weights, GROUPS)
    state: dict[str, dict[str, Tensor]] = {}
    assert average_weights("schedule_free_adamw", weights, state) is None
    for step in range(8):
        fields, grads = fields_of("schedule_free_adamw", step), numbers(step)
        reference.step(grads, fields, multipliers_of({}))
        take_step(OptimizerConfig(type="schedule_free_adamw"), weights, grads, state, step, fields, GROUPS)
        averaged = average_weights("schedule_free_adamw", weights, state)
        assert averaged is not None
        for key in SHAPES:
            expected = torch.from_numpy(reference.state[key]["x"]).float()
            torch.testing.assert_close(averaged[key], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(averaged["norm"], weights["norm"], atol=1e-4)


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_dynamic_map_is_the_published_one(is_signed: bool) -> None:
    ours = quantized_moments._map(is_signed, torch.device("cpu"))
    assert len(ours) == 256
    torch.testing.assert_close(ours.double(), torch.from_numpy(dynamic_map(is_signed)), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("name", "product_dtype"), WAYS)
def test_large_weights_in_parts_equal_whole_ones(
    name: str, product_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with parts that begin and end anywhere, and chunks of several weights."""
    shapes = {"big": (37, 300), "vector": (5001,), "small": (3, 5), "wide": (2, 9000)}

    def steps(chunk_bytes: int) -> tuple[list[Tensor], list[float]]:
        monkeypatch.setattr(optim, "_CHUNK_BYTES", chunk_bytes)
        random = torch.Generator().manual_seed(5)
        weights = {key: torch.randn(shape, generator=random) for key, shape in shapes.items()}
        state: dict[str, dict[str, Tensor]] = {}
        moves = []
        for step in range(3):
            before = {key: tensor.clone() for key, tensor in weights.items()}
            grads = {key: torch.randn(shape, generator=random) for key, shape in shapes.items()}
            params = {"learning_rate": 0.01}
            outcome = take_step(
                OptimizerConfig(type=name), weights, grads, state, step, params, {}, product_dtype=product_dtype
            )
            moved = torch.cat([(weights[key] - before[key]).double().flatten() for key in shapes]).norm()
            assert outcome.metrics["update_norm"] == pytest.approx(moved.item(), rel=1e-5)
            moves.append(outcome.metrics["update_norm"])
        return [*weights.values(), *(one for kind in state.values() for one in kind.values())], moves

    whole, moves = steps(1 << 30)
    for chunk_bytes in (4096, 20_000):
        parts, moves_in_parts = steps(chunk_bytes)
        assert moves_in_parts == pytest.approx(moves, rel=1e-5)
        for ours, expected in zip(parts, whole, strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes_of_moments_are_those_of_the_nearest_numbers(is_signed: bool) -> None:
    """Compared with a search among the borders, at the borders, next to them, around zero and anywhere."""
    values = quantized_moments._map(is_signed, torch.device("cpu"))
    borders = values[:-1] + (values[1:] - values[:-1]) * 0.5
    edges = [borders, *(torch.nextafter(borders, torch.tensor(to)) for to in (-2.0, 2.0)), values]
    random = torch.randn(200_000, generator=torch.Generator().manual_seed(3)).sinh().div(30).clamp(-1, 1)
    numbers = torch.cat([*edges, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38]), random])
    numbers = numbers if is_signed else numbers.abs()
    numbers = numbers[: len(numbers) // 255 * 255].view(-1, 255)
    blocks = torch.cat([torch.ones(len(numbers), 1), numbers], 1)  # so that each has the scale 1
    codes, scale = quantized_moments._quantize(blocks.flatten(), is_signed)
    assert torch.equal(scale, torch.ones(len(blocks)))
    expected = torch.bucketize(blocks.flatten(), borders, right=True)
    assert torch.equal(codes.long(), expected)
    assert set(codes.tolist()) == set(range(256))


BYTES_PER_NUMBER = {
    "adamw": 8.0,
    "adam": 8.0,
    "sgd": 0.0,
    "lion": 4.0,
    "adafactor": 4 * (512 + 256) / (512 * 256),
    "muon": 4.0,
    "adamw8bit": 2 + 2 * 4 / 256,
    "schedule_free_adamw": 8 + 24 / (512 * 256),
}


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_the_state_of_a_matrix(name: str) -> None:
    """The table in docs/optimizers.md has these numbers."""
    weights, state = {"w": torch.randn(512, 256)}, {}
    grads = {"w": torch.randn(512, 256)}
    outcome = take_step(OptimizerConfig(type=name), weights, grads, state, 0, {}, {"w": frozenset({"attn"})})
    assert outcome.metrics["optimizer_state_bytes"] == pytest.approx(BYTES_PER_NUMBER[name] * 512 * 256)


TARGETS = [
    LoraTarget("a", "a", "attn", 330, 170),
    LoraTarget("b:gate", "b", "mlp", 21, 9, 0, num_experts=3, shared="A"),
    LoraTarget("b:up", "b", "mlp", 21, 9, 9, num_experts=3, shared="A"),
    LoraTarget("b:down", "b", "mlp", 9, 21, 0, num_experts=3, shared="B"),
    LoraTarget("c", "c", "unembed", 33, 1010),
]


def make_run(name: str, seed: int = 1) -> Adapter:
    return create_adapter(TARGETS, LoraConfig(rank=25, seed=seed), OptimizerConfig(type=name))


def add_gradient(run: Adapter, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = {
        name: (size * torch.randn(a.shape, generator=generator), size * torch.randn(b.shape, generator=generator))
        for name, (a, b) in run.weights.items()
    }
    run.add_gradient(grads)


def everything(run: Adapter) -> dict[str, Tensor]:
    kinds = {"weights": name_factors(run.weights), **run.moments}
    return {f"{kind}/{name}": one.clone() for kind, tensors in kinds.items() for name, one in tensors.items()}


def assert_same(left: Adapter, right: Adapter) -> None:
    ours, theirs = everything(left), everything(right)
    assert left.step == right.step
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)


@pytest.mark.parametrize(("name", "product_dtype"), WAYS)
def test_a_run_saved_between_gradient_and_step_continues_to_the_bit(
    name: str, product_dtype: torch.dtype, tmp_path: Path
) -> None:
    straight = make_run(name)
    for step in range(5):
        add_gradient(straight, step)
        if step == 3:
            saved = str(tmp_path / "saved")
            checkpoints.save(straight, TARGETS, saved, base_model="tiny", weights_only=False)
            resumed = make_run(name, seed=7)
            checkpoints.load(resumed, TARGETS, saved, optimizer=True)
            assert_same(resumed, straight)
        apply(straight, fields_of(name, step), product_dtype)
    for step in (3, 4):
        if step == 4:
            add_gradient(resumed, 4)
        apply(resumed, fields_of(name, step), product_dtype)
    assert_same(resumed, straight)


@pytest.mark.parametrize("name", NAMES)
def test_samplers_and_saved_adapters_have_the_same_weights(name: str, tmp_path: Path) -> None:
    """Those of the average where there is one, whether the run was published, saved for sampling or saved whole."""
    run = make_run(name)
    for step in range(3):
        add_gradient(run, step)
        apply(run, fields_of(name, step))
    frozen = snapshot(run)
    is_averaged = name == "schedule_free_adamw"
    assert torch.equal(frozen.weights["a"][0], run.weights["a"][0]) is not is_averaged
    for weights_only in (True, False):
        directory = str(tmp_path / f"{weights_only}")
        checkpoints.save(run, TARGETS, directory, base_model="tiny", weights_only=weights_only)
        loaded = checkpoints.load_weights(directory, TARGETS, run.config)
        assert all(torch.equal(x, y) for x, y in zip(flatten(loaded), flatten(frozen.weights), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_of_other_shapes_is_refused(name: str) -> None:
    config, weights, state = OptimizerConfig(type=name), numbers(0), {}
    take_step(config, weights, numbers(1), state, 0, fields_of(name, 1), GROUPS)
    check_state(config, weights, state, 1, GROUPS)
    for kind in state:
        key = next(iter(state[kind]))
        damaged = {**state, kind: {**state[kind], key: torch.zeros(2, 2, 2, 2)}}
        with pytest.raises(CheckpointError, match=f"the saved state of '{key}' is .* where {name} has"):
            check_state(config, weights, damaged, 1, GROUPS)
    if name != "sgd":
        with pytest.raises(CheckpointError, match="the saved state of 'norm'"):
            check_state(config, weights, {}, 1, GROUPS)


def test_sgd_begins_its_momentum_when_it_is_first_asked_for() -> None:
    weights, state = {"w": torch.zeros(3)}, {}
    config = OptimizerConfig(type="sgd")
    take_step(config, weights, {"w": torch.ones(3)}, state, 0, {"momentum": 0.0}, {})
    assert state == {}
    take_step(config, weights, {"w": torch.ones(3)}, state, 1, {"momentum": 0.9, "dampening": 0.5}, {})
    assert torch.equal(state["momentum_buffer"]["w"], torch.ones(3))
    check_state(config, weights, state, 2, {})
    check_state(config, weights, {}, 2, {})


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("sgd", {"nesterov": True}, "sgd: nesterov needs a momentum above 0 and a dampening of 0"),
        ("sgd", {"nesterov": 1}, "nesterov is 1, but must be true or false"),
        ("sgd", {"beta1": 0.9}, "sgd has no parameter 'beta1'; it has learning_rate, momentum, dampening"),
        ("adafactor", {"beta2_decay": 0.1}, "beta2_decay is 0.1, but must be a finite number of at most 0"),
        ("muon", {"ns_steps": 100}, "ns_steps is 100, but must be an integer from 1 to 99"),
        ("muon", {"ns_steps": 2.5}, "ns_steps is 2.5"),
        ("muon", {"ns_coefficients": [1.0, 2.0]}, "ns_coefficients is .*, but must be three finite numbers"),
        ("muon", {"adjust_lr_fn": "max"}, "adjust_lr_fn is 'max', but must be 'original' or 'match_rms_adamw'"),
        ("muon", {"adamw_beta1": 1.0}, "adamw_beta1 is 1.0, but must be at least 0 and below 1"),
        ("schedule_free_adamw", {"beta1": 0.0}, "beta1 is 0.0, but must be at least 0.1 and below 1"),
        ("lion", {"eps": 1e-8}, "lion has no parameter 'eps'"),
        ("adamw", {"lr_multipliers": {"embed": 2.0}}, "lr_multipliers has 'embed'; the run trains weights of attn, "),
        ("adamw", {"lr_multipliers": {"attn": -1.0}}, "lr_multipliers is {'attn': -1.0}, but must be an object of"),
        ("adamw", {"learning_rate": 1e30, "lr_multipliers": {"attn": 1e30}}, "times its lr_multipliers is more than"),
    ],
)
def test_wrong_fields_are_refused_by_name(name: str, params: dict[str, Any], message: str) -> None:
    run = make_run(name)
    add_gradient(run, 0)
    before = everything(run)
    with pytest.raises(InvalidInput, match=message):
        apply(run, params)
    assert run.grads is not None
    assert all(torch.equal(before[key], tensor) for key, tensor in everything(run).items())


def test_lora_plus_multiplies_the_rate_of_b() -> None:
    """LoRA+ is the ratio of the learning rates of B and A; Adam's first step is that rate in each coordinate."""
    run = make_run("adamw")
    before = copy.deepcopy(run.weights)
    add_gradient(run, 0)
    apply(run, {"learning_rate": 0.01, "lr_multipliers": {"lora_B": 16.0, "unembed": 0.5}})
    for name, ratio in (("a", 1.0), ("b:up", 1.0), ("c", 0.5)):
        for index, rate in ((0, 0.01), (1, 0.16)):
            moved = (run.weights[name][index] - before[name][index]).abs()
            torch.testing.assert_close(moved, torch.full_like(moved, rate * ratio), rtol=1e-3, atol=1e-6)


SIZES = st.one_of(st.floats(0, 3e38), st.sampled_from([0.0, 1e-45, 1e-12, 1.0, 1e30, 3e38]))
BETAS = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.9, 1 - 1e-7, 1 - 1e-16]))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "learning_rate": SIZES,
    "beta1": BETAS,
    "beta2": BETAS,
    "momentum": BETAS,
    "dampening": st.floats(0, 1),
    "nesterov": st.booleans(),
    "eps": SIZES.filter(bool),
    "eps1": SIZES.filter(bool),
    "eps2": SIZES.filter(bool),
    "d": SIZES.filter(bool),
    "weight_decay": SIZES,
    "beta2_decay": st.floats(-3, 0),
    "ns_coefficients": st.lists(st.sampled_from([-1e30, -4.775, 0.0, 2.0315, 3.4445, 1e38]), min_size=3, max_size=3),
    "ns_steps": st.integers(1, 8),
    "adjust_lr_fn": st.sampled_from(["original", "match_rms_adamw"]),
    "r": st.floats(0, 10),
    "weight_lr_power": st.floats(0, 4),
    "grad_clip_norm": SIZES,
    "lr_multipliers": st.dictionaries(st.sampled_from(["attn", "lora_B"]), SIZES),
}


@pytest.mark.parametrize(("name", "product_dtype"), WAYS[1:])  # test_optim.py has adamw
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_whatever_is_asked_nothing_that_is_not_finite_is_kept(
    name: str, product_dtype: torch.dtype, data: st.DataObject
) -> None:
    """Also where a step is taken after others as extreme; one that is skipped or refused changes no bit."""
    optional = {key: FIELDS[key.removeprefix("adamw_")] for key in defaults(name)}
    sizes = st.none() | st.floats(width=32) | st.sampled_from([0.0, 1e-30, 1.0, 1e18, 1e19, 1e38])
    run = create_adapter(
        [LoraTarget("a", "a", "attn", 3, 4), LoraTarget("c", "c", "unembed", 3, 2050)],
        LoraConfig(rank=2, seed=1),
        OptimizerConfig(type=name),
    )
    for params, size in data.draw(
        st.lists(st.tuples(st.fixed_dictionaries({}, optional=optional), sizes), min_size=1, max_size=5)
    ):
        if size is not None:
            add_gradient(run, 0, size)
        before, step = everything(run), run.step
        try:
            metrics = apply(run, params, product_dtype)
        except InvalidInput:
            run.clear_gradient()
            metrics = {"skipped": 1.0}
        after = everything(run)
        assert all(math.isfinite(value) for value in metrics.values())
        assert all(tensor.isfinite().all() for tensor in after.values())
        assert run.step == step + (metrics["skipped"] == 0.0)
        if metrics["skipped"]:
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)
