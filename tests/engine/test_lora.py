"""Which weights are trained, with what shapes, and from which first values."""

from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lorimer.engine.adapters.lora import LoraTarget, find_targets, init_adapter, shapes
from lorimer.engine.messages import LoraConfig
from lorimer.errors import InvalidInput, ModelRefused
from lorimer.models.debug import ARCHITECTURES, tiny_model


def meta_model(model_type: str, **config: Any) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))  # type: ignore[no-untyped-call]


def parameters_per_rank(targets: list[LoraTarget]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for target in targets:
        counts[target.group] = counts.get(target.group, 0) + sum(map(prod, shapes(target, 1)))
    return counts


LLAMA_1B = {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN_4B = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN_30B = {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}


@pytest.mark.parametrize(
    ("model_type", "config", "published"),
    [
        (
            "llama",
            {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256, **LLAMA_1B},
            {"attn": 212_992, "mlp": 491_520, "unembed": 130_304},
        ),
        (
            "llama",
            {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, **LLAMA_8B},
            {"attn": 851_968, "mlp": 1_769_472, "unembed": 132_352},
        ),
        (
            "qwen3",
            {"hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936, **QWEN_4B},
            {"attn": 737_280, "mlp": 1_327_104, "unembed": 154_496},
        ),
        (
            "qwen3_moe",
            {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "vocab_size": 151936, **QWEN_30B},
            {"attn": 835_584, "mlp": 14_450_688, "unembed": 153_984},
        ),
    ],
    ids=["Llama-3.2-1B", "Llama-3.1-8B", "Qwen3-4B", "Qwen3-30B-A3B"],
)
def test_parameters_per_rank_are_those_tinker_publishes(
    model_type: str, config: dict[str, Any], published: dict[str, int]
) -> None:
    assert parameters_per_rank(find_targets(meta_model(model_type, **config))) == published


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_targets_cover_exactly_the_projections_and_the_head(architecture: str) -> None:
    """Rows of the targets of each weight tile it, and only routers, norms and embeddings have none."""
    model: Any = tiny_model(architecture)
    rows: dict[tuple[str, str], list[int]] = {}
    for target in find_targets(model):
        parameter = "weight"
        if target.num_experts:
            parameter = "down_proj" if target.name.endswith(":down") else "gate_up_proj"
        rows.setdefault((target.module, parameter), []).extend(range(*target.rows.indices(10**6)))
    for (module, parameter), covered in rows.items():
        owner = model.get_submodule(module)
        weight = getattr(owner, parameter)
        height = weight.shape[-1] if getattr(owner, "is_transposed", False) else weight.shape[-2]
        assert sorted(covered) == list(range(height))
    covered_names = {f"{module}.{parameter}" for module, parameter in rows}
    left = [n for n, p in model.named_parameters(remove_duplicate=False) if p.dim() > 1 and n not in covered_names]
    left = [n for n in left if not n.endswith(("proj_bias", "embed_tokens.weight", "mlp.gate.weight", "router.weight"))]
    assert left == []


def test_fused_projections_are_split() -> None:
    targets = {target.name: target for target in find_targets(tiny_model("phi3"))}
    fused = "model.layers.0.self_attn.qkv_proj"
    parts = [targets[f"{fused}:{part}"] for part in "qkv"]
    assert [(part.row_offset, part.out_features) for part in parts] == [(0, 32), (32, 16), (48, 16)]
    assert {part.module for part in parts} == {fused}


def test_interleaved_experts_alternate_rows() -> None:
    targets = {target.name: target for target in find_targets(tiny_model("gpt_oss"))}
    gate, up = (targets[f"model.layers.0.mlp.experts:{part}"] for part in ("gate", "up"))
    assert [gate.row_offset, gate.row_step, up.row_offset, up.row_step] == [0, 2, 1, 2]
    assert shapes(gate, 3) == ((3, 32), (4, 48, 3))
    assert shapes(targets["model.layers.0.mlp.experts:down"], 3) == ((4, 3, 48), (32, 3))


def test_routers_and_single_gates_are_left_alone() -> None:
    targets = find_targets(meta_model("qwen2_moe", num_hidden_layers=1))
    assert not [target.name for target in targets if target.module.endswith(("gate", "router"))]
    assert "model.layers.0.mlp.shared_expert.gate_proj" in {target.name for target in targets}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("gpt2", "no nn.Linear of group 'attn'"), ("jetmoe", "does not use transformers' experts interface")],
)
def test_models_that_cannot_be_trained_are_refused(model_type: str, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        find_targets(meta_model(model_type))


TARGETS = [
    LoraTarget("layers.0.q", "layers.0.q", "attn", 16, 24),
    LoraTarget("layers.0.up", "layers.0.up", "mlp", 16, 40),
    LoraTarget("layers.0.experts:down", "layers.0.experts", "mlp", 8, 16, num_experts=3, shared="B"),
    LoraTarget("head", "head", "unembed", 16, 50),
]


def test_first_values() -> None:
    pairs = init_adapter(TARGETS, LoraConfig(rank=300, seed=3))
    for target in TARGETS:
        a, b = pairs[target.name]
        assert (a.shape, b.shape) == shapes(target, 300)
        assert a.dtype == b.dtype == torch.float32
        assert not b.any()
        bound = target.in_features**-0.5
        assert a.abs().max() <= bound
        torch.testing.assert_close(a.std(), torch.tensor(bound / 3**0.5), rtol=0.05, atol=0)
    assert not torch.equal(pairs["layers.0.q"][0], pairs["layers.0.up"][0])


def test_the_seed_decides_and_the_groups_do_not() -> None:
    everything = init_adapter(TARGETS, LoraConfig(rank=4, seed=3))
    only_mlp = init_adapter(TARGETS[::-1], LoraConfig(rank=4, seed=3, train_attn=False, train_unembed=False))
    assert sorted(only_mlp) == ["layers.0.experts:down", "layers.0.up"]
    assert all(torch.equal(only_mlp[name][0], everything[name][0]) for name in only_mlp)
    for other in (LoraConfig(rank=4, seed=4), LoraConfig(rank=4), LoraConfig(rank=4)):
        assert not torch.equal(init_adapter(TARGETS, other)["head"][0], everything["head"][0])


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(rank=0),
        LoraConfig(rank=513),
        LoraConfig(train_attn=False, train_mlp=False, train_unembed=False),
    ],
    ids=["rank-0", "rank-513", "nothing"],
)
def test_impossible_configurations_are_refused(config: LoraConfig) -> None:
    with pytest.raises(InvalidInput, match=r"rank|nothing to train"):
        init_adapter(TARGETS, config)
