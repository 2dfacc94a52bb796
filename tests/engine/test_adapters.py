"""What a run owns, and that its snapshots are its own no longer."""

import torch

from lorimer.engine.adapters.adapters import Adapter, Pairs, create_adapter, flatten, snapshot
from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.messages import LoraConfig, OptimizerConfig
from lorimer.engine.training.optim import apply

TARGETS = [LoraTarget("a", "a", "attn", 6, 5), LoraTarget("b", "b", "mlp", 4, 3, num_experts=2, shared="A")]
SIZE = 2 * (6 + 5) + 2 * (4 + 2 * 3)


def make() -> Adapter:
    return create_adapter(TARGETS, LoraConfig(rank=2, seed=1), OptimizerConfig())


def ones(adapter: Adapter) -> Pairs:
    return {name: (torch.ones_like(a), torch.ones_like(b)) for name, (a, b) in adapter.weights.items()}


def test_sizes_and_scale() -> None:
    adapter = make()
    assert adapter.num_parameters == SIZE
    assert adapter.memory_bytes == 4 * SIZE
    assert adapter.scale == 16.0
    adapter.add_gradient(ones(adapter))
    assert adapter.memory_bytes == 2 * 4 * SIZE
    apply(adapter, {})
    assert adapter.memory_bytes == 3 * 4 * SIZE


def test_gradients_add_up_whatever_their_order() -> None:
    adapter = make()
    first = ones(adapter)
    adapter.add_gradient(first)
    assert adapter.grads is not None
    assert adapter.grads["a"][0] is first["a"][0]
    second = {name: (2 * a, 3 * b) for name, (a, b) in reversed(ones(adapter).items())}
    adapter.add_gradient(second)
    for a, b in adapter.grads.values():
        assert (a == 3).all()
        assert (b == 4).all()
    adapter.clear_gradient()
    assert adapter.grads is None


def test_a_snapshot_does_not_change() -> None:
    adapter = make()
    frozen = snapshot(adapter)
    before = [tensor.clone() for tensor in flatten(frozen.weights)]
    adapter.add_gradient(ones(adapter))
    apply(adapter, {"learning_rate": 0.1})
    assert (frozen.rank, frozen.scale, frozen.memory_bytes) == (2, 16.0, 4 * SIZE)
    assert all(torch.equal(x, y) for x, y in zip(flatten(frozen.weights), before, strict=True))
    assert not torch.equal(frozen.weights["a"][0], adapter.weights["a"][0])


def test_the_order_of_the_tensors_depends_on_names_only() -> None:
    """Ranks compare a hash of them, and one that has loaded the run holds its moments in another order."""
    adapter, loaded = make(), make()
    adapter.add_gradient(ones(adapter))
    apply(adapter, {})
    loaded.weights = dict(reversed(adapter.weights.items()))
    loaded.moments = {name: dict(reversed(pairs.items())) for name, pairs in reversed(adapter.moments.items())}
    assert list(map(id, loaded.tensors())) == list(map(id, adapter.tensors()))
