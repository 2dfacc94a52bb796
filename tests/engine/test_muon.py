"""Muon's iteration with products in float32, against torch's in bfloat16 and against exact sums."""

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torch_orthogonalize

from lorimer.engine import messages
from lorimer.engine.adapters.adapters import name_factors
from lorimer.engine.engine import Engine
from lorimer.engine.training.muon import orthogonalize
from lorimer.engine.training.optim import take_step
from tests.engine.operations import make_operation, settings
from tests.engine.optimizer_references import newton_schulz

COEFFICIENTS = (3.4445, -4.775, 2.0315)
SHAPES = [(24, 40), (40, 24), (64, 64), (16, 576), (128, 320), (320, 128)]


def random_matrix(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("coefficients", "steps", "eps"), [(COEFFICIENTS, 5, 1e-7), ((3.0, -4.0, 2.0), 3, 1e-7), (COEFFICIENTS, 6, 100.0)]
)
def test_sums_of_two_products_are_those_of_torch_to_the_bit(shape, coefficients, steps, eps):
    """Blocks of two rows and columns, anywhere in the matrix: no sum has an order, so all roundings are torch's."""
    for seed in range(5):
        random, matrix = torch.Generator().manual_seed(seed), torch.zeros(shape)
        for start in range(0, min(shape), 2):
            matrix[start : start + 2, start : start + 2] = torch.randn(2, 2, generator=random)
        matrix = matrix[torch.randperm(shape[0], generator=random)][:, torch.randperm(shape[1], generator=random)]
        expected = torch_orthogonalize(matrix, coefficients, steps, eps)
        assert torch.equal(orthogonalize(matrix, coefficients, steps, eps), expected.float())


@pytest.mark.parametrize("shape", SHAPES)
def test_one_iteration_is_that_of_torch_but_for_single_roundings(shape):
    """The order of a sum decides how one in a thousand numbers is rounded."""
    for seed in range(5):
        matrix = random_matrix(shape, seed)
        ours = orthogonalize(matrix, COEFFICIENTS, 1, 1e-7)
        theirs = torch_orthogonalize(matrix, COEFFICIENTS, 1, 1e-7).float()
        assert (ours != theirs).float().mean() < 5e-3
        assert (ours - theirs).abs().max() < 0.05 * theirs.square().mean().sqrt()


@pytest.mark.parametrize("shape", SHAPES)
def test_paths_differ_by_less_than_bfloat16_does_from_exact_numbers(shape):
    """Five iterations magnify single roundings; the rounding that both paths have in common is larger."""
    ours_to_exact = theirs_to_exact = 0.0
    for seed in range(5):
        matrix = random_matrix(shape, seed)
        ours = orthogonalize(matrix, COEFFICIENTS, 5, 1e-7)
        theirs = torch_orthogonalize(matrix, COEFFICIENTS, 5, 1e-7).float()
        exact_sums = newton_schulz(matrix, COEFFICIENTS, 5, 1e-7, is_rounded=True)
        exact = newton_schulz(matrix, COEFFICIENTS, 5, 1e-7, is_rounded=False)
        assert torch.equal(ours, ours.bfloat16().float())
        assert distance(ours, theirs) < 0.015
        assert distance(ours, exact_sums) < 0.015
        ours_to_exact += distance(ours, exact) / 5
        theirs_to_exact += distance(theirs, exact) / 5
    assert 0.01 < theirs_to_exact < 0.02
    assert ours_to_exact == pytest.approx(theirs_to_exact, rel=0.1)


def test_the_momentum_is_not_changed_by_its_orthogonalisation():
    matrix = random_matrix((40, 24), 0).bfloat16().float()
    before = matrix.clone()
    orthogonalize(matrix, COEFFICIENTS, 5, 1e-7)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_multiplies_in_the_dtype_of_its_device(tmp_path, monkeypatch, method, dtype):
    """Its step is to the bit the one with this dtype, and not the one with the other."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engine = Engine(settings(tmp_path, method=method, dtype=dtype))
    kind = {"lora": messages.LoraConfig(rank=256, seed=0)} if method == "lora" else {"full": messages.FullConfig()}
    optimizer, params = messages.OptimizerConfig(type="muon"), {"learning_rate": 0.01}
    engine.create_run(messages.CreateRun(request_id="r", model_id="m", optimizer=optimizer, **kind))
    engine.train([make_operation("r", "m")])
    run = engine._run("m")
    named = name_factors if method == "lora" else dict
    weights, grads = clones(named(run.weights)), clones(named(run.grads))
    engine.optim_step(messages.OptimStep(request_id="r", model_id="m", params=params))
    is_same = {}
    for product_dtype in (torch.float32, torch.bfloat16):
        ours = clones(weights)
        take_step(optimizer, ours, clones(grads), {}, 0, params, run.groups, product_dtype=product_dtype)
        is_same[product_dtype] = all(torch.equal(ours[name], one) for name, one in named(run.weights).items())
    assert is_same == {one: one is engine.model.device.product_dtype for one in is_same}
