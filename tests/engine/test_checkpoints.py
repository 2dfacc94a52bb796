"""A run on disk: PEFT reads what we write, we read what PEFT writes, and nothing damaged or foreign gets in."""

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lorimer.engine.adapters import checkpoints
from lorimer.engine.adapters.adapters import Adapter, create_adapter, flatten, name_factors, snapshot
from lorimer.engine.adapters.lora import LoraTarget, find_targets
from lorimer.engine.messages import LoraConfig, OptimizerConfig
from lorimer.engine.training import optim
from lorimer.errors import CheckpointError
from lorimer.models.debug import tiny_model

# PEFT 0.21 looks for the patterns of parameters among modules only, and says so though it applies them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match any targeted module"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
]

TOKENS = torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(5))

MODELS = ["llama", "qwen3-tied", "phi3", "qwen3_moe", "gpt_oss", "mixtral", "qwen2_moe"]


def make_model(name: str) -> Any:
    """A tiny model; qwen2_moe adds shared experts, a one-output gate and a dense layer beside the routed experts."""
    if name == "qwen3-tied":
        return tiny_model("qwen3", tie_word_embeddings=True)
    if name != "qwen2_moe":
        return tiny_model(name)
    config = AutoConfig.for_model(
        "qwen2_moe",
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]


def randomize(adapter: Adapter, seed: int = 7) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    for tensor in flatten(adapter.weights):
        tensor.copy_(0.07 * torch.randn(tensor.shape, generator=generator))
    return adapter


def make_adapter(targets: list[LoraTarget], **config: Any) -> Adapter:
    return randomize(create_adapter(targets, LoraConfig(**({"rank": 3, "seed": 1} | config)), OptimizerConfig()))


def add_random_gradient(adapter: Adapter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    adapter.add_gradient({name: (draw(a), draw(b)) for name, (a, b) in adapter.weights.items()})


def merge(model: nn.Module, adapter: Adapter, targets: list[LoraTarget]) -> Any:
    """The reference: a copy of the model with ``scale * B @ A`` added to every target's rows."""
    merged: Any = copy.deepcopy(model)
    head = merged.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        for target in targets:
            if target.name not in adapter.weights:
                continue
            a, b = adapter.weights[target.name]
            module = merged.get_submodule(target.module)
            if target.num_experts:
                fused = module.gate_up_proj if hasattr(module, "gate_up_proj") else module.up_proj
                weight = module.down_proj if target.name.endswith(":down") else fused
                weight = weight.transpose(1, 2) if module.is_transposed else weight
                weight[:, target.rows] += adapter.scale * b @ a
            else:
                module.weight[target.rows] += adapter.scale * b @ a
    return merged


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def assert_same_state(left: Adapter, right: Adapter) -> None:
    assert left.step == right.step
    assert left.moments.keys() == right.moments.keys()
    kinds = [(left.moments[kind], right.moments[kind]) for kind in left.moments]
    for mine, other in [(name_factors(left.weights), name_factors(right.weights)), *kinds]:
        assert list(mine) == list(other)
        assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture(scope="module")
def phi3() -> Any:
    return make_model("phi3")


@pytest.mark.parametrize(
    "groups",
    [{}, {"train_mlp": False, "train_unembed": False}, {"train_attn": False, "train_unembed": False}],
    ids=["all", "attn", "mlp"],
)
def test_peft_gives_the_logits_of_the_adapter_we_saved(model: Any, groups: dict[str, bool], tmp_path: Path) -> None:
    targets = find_targets(model)
    adapter = make_adapter(targets, **groups)
    directory = str(tmp_path / "saved")
    checkpoints.save(adapter, targets, directory, base_model="tiny", weights_only=True)

    expected = logits(merge(model, adapter, targets))
    assert (expected - logits(model)).abs().max() > 0.05
    loaded = PeftModel.from_pretrained(copy.deepcopy(model), directory)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)


def test_peft_gives_the_logits_of_an_rslora_adapter(model: Any, tmp_path: Path) -> None:
    targets = find_targets(model)
    adapter = make_adapter(targets, use_rslora=True)
    assert adapter.scale == pytest.approx(32 / math.sqrt(3))
    checkpoints.save(adapter, targets, str(tmp_path / "saved"), base_model="tiny", weights_only=False)
    settings = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert settings["use_rslora"] is True
    loaded = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "saved"))
    torch.testing.assert_close(logits(loaded), logits(merge(model, adapter, targets)), rtol=1e-4, atol=1e-4)

    again = make_adapter(targets, seed=2, use_rslora=True)
    checkpoints.load(again, targets, str(tmp_path / "saved"), optimizer=True)
    assert_same_state(again, adapter)
    with pytest.raises(CheckpointError, match="has use_rslora=True, the run has use_rslora=False"):
        checkpoints.load_weights(str(tmp_path / "saved"), targets, LoraConfig(rank=3))


def test_manifest_without_newer_fields_is_read(phi3: Any, tmp_path: Path) -> None:
    """Its checksum is that of the fields it was written with."""
    targets = find_targets(phi3)
    checkpoints.save(make_adapter(targets), targets, str(tmp_path / "c"), base_model="tiny", weights_only=True)
    manifest = (tmp_path / "c" / "lorimer.json").read_text()
    assert "use_rslora" not in manifest
    assert checkpoints.read_config(str(tmp_path / "c")).use_rslora is msgspec.UNSET


def test_pairs_of_different_ranks_are_read_as_pairs_of_the_highest(tmp_path: Path) -> None:
    """As PEFT's EVA makes them; the logits are those of PEFT, and training leaves the added zeros alone."""
    model = make_model("llama")
    targets = find_targets(model)
    modules = sorted({target.module.rsplit(".", 1)[-1] for target in targets})
    patterns = {"q_proj": 2, "layers.0.self_attn.v_proj": 7, "down_proj": 8, "lm_head": 3}
    settings = PeftConfig(
        r=4,
        lora_alpha=20,
        rank_pattern=patterns,
        alpha_pattern={"q_proj": 5, "up_proj": 40},
        target_modules=modules,
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(copy.deepcopy(model), settings).eval()
    for key, parameter in theirs.named_parameters():
        if "lora_" in key:
            nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)

    config = checkpoints.read_config(str(tmp_path / "theirs"))
    assert config == LoraConfig(rank=8)
    adapter = create_adapter(targets, config, OptimizerConfig())
    checkpoints.load(adapter, targets, str(tmp_path / "theirs"), optimizer=False)
    torch.testing.assert_close(logits(merge(model, adapter, targets)), logits(theirs), rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckpointError, match="the saved adapter has rank 8, the run has rank 4"):
        checkpoints.load_weights(str(tmp_path / "theirs"), targets, LoraConfig(rank=4))
    checkpoints.save(adapter, targets, str(tmp_path / "ours"), base_model="tiny", weights_only=True)
    reloaded = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "ours"))
    torch.testing.assert_close(logits(reloaded), logits(theirs), rtol=1e-4, atol=1e-4)


def test_we_read_back_what_peft_saves_of_our_adapter(model: Any, tmp_path: Path) -> None:
    targets = find_targets(model)
    adapter = make_adapter(targets)
    checkpoints.save(adapter, targets, str(tmp_path / "ours"), base_model="tiny", weights_only=True)
    theirs = str(tmp_path / "theirs")
    PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "ours")).save_pretrained(
        theirs, save_embedding_layers=False
    )

    other = make_adapter(targets, seed=2)
    checkpoints.load(other, targets, theirs, optimizer=False)
    assert_same_state(other, adapter)
    assert checkpoints.read_config(theirs) == LoraConfig(rank=3)


@pytest.mark.parametrize("rslora", [False, True], ids=["alpha", "rslora"])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_an_adapter_made_by_peft_gives_the_same_logits_here(name: str, rslora: bool, tmp_path: Path) -> None:
    model = make_model(name)
    targets = find_targets(model)
    modules = sorted({target.module.rsplit(".", 1)[-1] for target in targets})
    settings = PeftConfig(r=4, lora_alpha=20, use_rslora=rslora, target_modules=modules, task_type="CAUSAL_LM")
    theirs = get_peft_model(copy.deepcopy(model), settings).eval()
    for key, parameter in theirs.named_parameters():
        if "lora_" in key:
            nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)

    config = checkpoints.read_config(str(tmp_path / "theirs"))
    assert config == LoraConfig(rank=4, use_rslora=True if rslora else msgspec.UNSET)
    adapter = create_adapter(targets, config, OptimizerConfig())
    checkpoints.load(adapter, targets, str(tmp_path / "theirs"), optimizer=False)
    torch.testing.assert_close(logits(merge(model, adapter, targets)), logits(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"r": 5}, "rank 9, the run has rank 3"),  # that of the fused weights, by rank_pattern
        ({"rank_pattern": {}}, "rank 3, its tensors have rank 9"),
        ({"r": 0}, "r=0"),
        ({"lora_alpha": 1e308}, "not finite"),
        ({"alpha_pattern": {"(a*)*": 1}}, "alpha_pattern has"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_expressed_are_refused(
    phi3: Any, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    targets = find_targets(phi3)
    directory = save_as_peft(make_adapter(targets), targets, tmp_path)
    settings = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(settings | change))
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load_weights(str(directory), targets, LoraConfig(rank=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("base_model.model.lm_head.lora_B.weight"), "lacks '.*lm_head.lora_B.weight'"),
        (lambda t: [t.pop(f"base_model.model.lm_head.lora_{x}.weight") for x in "AB"], "only the run: 'lm_head'"),
        (lambda t: t.update({"base_model.model.extra.lora_A.weight": torch.zeros(1)}), "only the saved one: 'extra'"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(1)}), "not a LoRA factor"),
        (lambda t: t["base_model.model.lm_head.lora_A.weight"].fill_(math.nan), "not finite"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 9)}), r"\(3, 9\) and \(.*, 3\)"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 32).int()}), "int32"),
    ],
    ids=["half", "missing", "unexpected", "not-lora", "nan", "shape", "dtype"],
)
def test_tensors_that_do_not_fit_are_refused(phi3: Any, change: Any, message: str, tmp_path: Path) -> None:
    targets = find_targets(phi3)
    directory = save_as_peft(make_adapter(targets), targets, tmp_path)
    tensors = load_file(directory / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")
    adapter = make_adapter(targets, seed=2)
    before = copy.deepcopy(adapter)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(adapter, targets, str(directory), optimizer=False)
    assert_same_state(adapter, before)


def test_experts_that_share_nothing_are_refused(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    targets = find_targets(model)
    directory = save_as_peft(make_adapter(targets), targets, tmp_path)
    tensors = load_file(directory / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"][0, 0] += 1
    save_file(tensors, directory / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"each expert of 'model.layers.1.mlp.experts.gate_up_proj' has its own"):
        checkpoints.load_weights(str(directory), targets, LoraConfig(rank=3))


def save_as_peft(adapter: Adapter, targets: list[LoraTarget], root: Path) -> Path:
    """Save without our manifest, as PEFT would."""
    checkpoints.save(adapter, targets, str(root / "saved"), base_model="tiny", weights_only=True)
    (root / "saved" / "lorimer.json").unlink()
    return root / "saved"


def test_save_load_continue_equals_uninterrupted(phi3: Any, tmp_path: Path) -> None:
    targets = find_targets(phi3)
    straight = make_adapter(targets)
    for step in range(4):
        add_random_gradient(straight, step)
        if step == 2:  # saved between a gradient and its step
            add_random_gradient(straight, 100)
            written = checkpoints.save(straight, targets, str(tmp_path / "c"), base_model="tiny", weights_only=False)
            resumed = make_adapter(targets, seed=99)
            checkpoints.load(resumed, targets, str(tmp_path / "c"), optimizer=True)
            assert_same_state(resumed, straight)
            assert written == sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
        optim.apply(straight, {"learning_rate": 0.01, "grad_clip_norm": 1.0})
    optim.apply(resumed, {"learning_rate": 0.01, "grad_clip_norm": 1.0})
    add_random_gradient(resumed, 3)
    optim.apply(resumed, {"learning_rate": 0.01, "grad_clip_norm": 1.0})
    assert_same_state(resumed, straight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_loading_weights_only_resets_the_optimizer(phi3: Any, tmp_path: Path) -> None:
    targets = find_targets(phi3)
    saved = make_adapter(targets)
    checkpoints.save(saved, targets, str(tmp_path / "c"), base_model="tiny", weights_only=True)
    run = make_adapter(targets, seed=3)
    add_random_gradient(run, 0)
    optim.apply(run, {})
    add_random_gradient(run, 1)
    checkpoints.load(run, targets, str(tmp_path / "c"), optimizer=False)
    assert_same_state(run, saved)
    assert run.grads is None
    assert checkpoints.read_config(str(tmp_path / "c")) == saved.config
    with pytest.raises(CheckpointError, match="weights only"):
        checkpoints.load(run, targets, str(tmp_path / "c"), optimizer=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rank": 4}, "rank=3, the run has rank=4"),
        ({"train_mlp": False}, "train_mlp=True, the run has train_mlp=False"),
    ],
    ids=["rank", "groups"],
)
def test_another_kind_of_run_is_refused(phi3: Any, config: Any, message: str, tmp_path: Path) -> None:
    targets = find_targets(phi3)
    checkpoints.save(make_adapter(targets), targets, str(tmp_path / "c"), base_model="tiny", weights_only=False)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(make_adapter(targets, **config), targets, str(tmp_path / "c"), optimizer=True)


def test_another_base_model_is_refused(phi3: Any, tmp_path: Path) -> None:
    targets = find_targets(phi3)
    checkpoints.save(make_adapter(targets), targets, str(tmp_path / "c"), base_model="tiny", weights_only=False)
    wider = find_targets(tiny_model("phi3", hidden_size=64))
    with pytest.raises(CheckpointError, match=r"the saved factors are .* the run's weight needs"):
        checkpoints.load(make_adapter(wider), wider, str(tmp_path / "c"), optimizer=True)


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "adapter_model.safetensors", "training_state.safetensors", "lorimer.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_damage_is_found(phi3: Any, name: str, damage: str, tmp_path: Path) -> None:
    targets = find_targets(phi3)
    saved = make_adapter(targets)
    add_random_gradient(saved, 0)
    optim.apply(saved, {})
    checkpoints.save(saved, targets, str(tmp_path / "c"), base_model="tiny", weights_only=False)
    path = tmp_path / "c" / name
    data = bytearray(path.read_bytes())
    match damage:
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "flipped":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        case "empty":
            path.write_bytes(b"")
        case "missing":
            path.unlink()
    run = make_adapter(targets, seed=4)
    before = copy.deepcopy(run)
    with pytest.raises(
        CheckpointError, match="weights only" if (name, damage) == ("lorimer.json", "missing") else name
    ):
        checkpoints.load(run, targets, str(tmp_path / "c"), optimizer=True)
    assert_same_state(run, before)


def test_a_changed_manifest_is_found(phi3: Any, tmp_path: Path) -> None:
    targets = find_targets(phi3)
    checkpoints.save(make_adapter(targets), targets, str(tmp_path / "c"), base_model="tiny", weights_only=True)
    path = tmp_path / "c" / "lorimer.json"
    path.write_text(path.read_text().replace('"step": 0', '"step": 8'))
    with pytest.raises(CheckpointError, match=r"lorimer.json' is damaged"):
        checkpoints.read_config(str(tmp_path / "c"))


def test_a_newer_format_is_refused_by_its_number(phi3: Any, tmp_path: Path) -> None:
    targets = find_targets(phi3)
    checkpoints.save(make_adapter(targets), targets, str(tmp_path / "c"), base_model="tiny", weights_only=True)
    path = tmp_path / "c" / "lorimer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2, "news": True}))
    with pytest.raises(CheckpointError, match="format 2, this version of Lorimer reads 1"):
        checkpoints.read_config(str(tmp_path / "c"))


def test_absent_directory_is_named(phi3: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        checkpoints.load_weights(str(tmp_path / "nowhere"), find_targets(phi3), LoraConfig())


def test_existing_files_are_never_overwritten(phi3: Any, tmp_path: Path) -> None:
    targets = find_targets(phi3)
    adapter = make_adapter(targets)
    empty = tmp_path / "empty"
    empty.mkdir()
    checkpoints.save(adapter, targets, str(empty), base_model="tiny", weights_only=True)
    before = (empty / "lorimer.json").read_bytes()
    with pytest.raises(CheckpointError, match="already exists"):
        checkpoints.save(make_adapter(targets, seed=5), targets, str(empty), base_model="tiny", weights_only=True)
    assert (empty / "lorimer.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_failing_disk_leaves_nothing(phi3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = find_targets(phi3)
    fsync, calls = os.fsync, []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoints.save(make_adapter(targets), targets, str(tmp_path / "c"), base_model="tiny", weights_only=False)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_place_is_named(phi3: Any, tmp_path: Path) -> None:
    targets = find_targets(phi3)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot save to '.*file/c'"):
        checkpoints.save(
            make_adapter(targets), targets, str(tmp_path / "file" / "c"), base_model="t", weights_only=True
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["weights", "exp_avg", "exp_avg_sq"])
def test_numbers_that_are_not_finite_are_neither_saved_nor_published_nor_loaded(tmp_path, where, bad):
    targets = [LoraTarget("a", "a", "attn", 33, 17)]
    adapter = create_adapter(targets, LoraConfig(rank=4, seed=1), OptimizerConfig())
    optim.apply(adapter, {})
    tensors = name_factors(adapter.weights) if where == "weights" else adapter.moments[where]
    tensors["a/B"][2, 3] = bad
    with pytest.raises(CheckpointError, match=f"not saved: its {where} hold numbers that are not finite"):
        checkpoints.save(adapter, targets, str(tmp_path / "run"), base_model="m", weights_only=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=f"not published: its {where} hold numbers that are not finite"):
        snapshot(adapter)
    with pytest.MonkeyPatch.context() as patch:  # as a version without the check wrote it
        patch.setattr(Adapter, "check_finite", lambda self, verb: None)
        checkpoints.save(adapter, targets, str(tmp_path / "run"), base_model="m", weights_only=False)
    fresh = create_adapter(targets, LoraConfig(rank=4, seed=2), OptimizerConfig())
    before = copy.deepcopy(fresh)
    with pytest.raises(CheckpointError, match="not finite"):
        checkpoints.load(fresh, targets, str(tmp_path / "run"), optimizer=True)
    assert all(torch.equal(x, y) for x, y in zip(flatten(fresh.weights), flatten(before.weights), strict=True))
    assert (fresh.moments, fresh.step) == ({}, 0)
