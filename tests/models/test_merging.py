"""A merged model computes what PEFT computes with the base and the adapter, whatever way its weights are stored."""

import json

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from transformers import AutoTokenizer

from lorimer.errors import CheckpointError, InvalidInput, ModelRefused
from lorimer.models.export import merging
from lorimer.models.export.check import check_merged
from lorimer.models.export.export import export_merged
from lorimer.models.export.merging import LoadedAdapter, merge, stored_tensors
from tests.engine.adapters_on_disk import logits, make_adapter, make_base, peft_logits, plain_model

# PEFT 0.21 looks for the patterns of parameters among modules only, and says so though it applies them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match any targeted module"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
]

CASES = {
    "dense": ("llama", {}, {}),
    "tied, head trained": ("llama", {"tie_word_embeddings": True}, {}),
    "tied, head not trained": ("qwen2", {}, {"train_unembed": False}),
    "biases": ("qwen2", {"tie_word_embeddings": False}, {}),
    "fused": ("phi3", {}, {}),
    "fused, mlp only": ("phi3", {}, {"train_attn": False, "train_unembed": False}),
    "fused, rsLoRA": ("phi3", {}, {"use_rslora": True}),
    "fused, DoRA": ("phi3", {}, {"use_dora": True}),
    "biases, DoRA of a tied head": ("qwen2", {"tie_word_embeddings": True}, {"use_dora": True}),
    "soft-capped, DoRA with rsLoRA": ("gemma2", {}, {"use_dora": True, "use_rslora": True}),
    "experts not trained, DoRA": ("qwen3_moe", {}, {"use_dora": True, "train_mlp": False}),
    "experts, rsLoRA": ("qwen3_moe", {}, {"use_rslora": True}),
    "soft-capped and tied": ("gemma2", {}, {}),
    "experts stored one by one": ("qwen3_moe", {}, {}),
    "experts under other names": ("mixtral", {}, {}),
    "experts stacked, transposed, interleaved": ("gpt_oss", {}, {}),
}


def quiet(text, fraction):
    pass


def export(adapter, base, output, dtype="float32"):
    return export_merged(adapter, base, output, dtype, is_checked=True, progress=quiet)


@pytest.mark.parametrize(("architecture", "overrides", "flags"), CASES.values(), ids=CASES)
def test_merged_logits_are_those_of_peft(tmp_path, architecture, overrides, flags):
    base = make_base(tmp_path / "base", architecture, **overrides)
    adapter = make_adapter(base, tmp_path / "adapter", **flags)
    found = export(adapter, base, tmp_path / "merged")
    merged = logits(plain_model(tmp_path / "merged"))
    reference = peft_logits(base, adapter)
    assert (merged - reference).abs().max() < 2e-4
    assert (logits(plain_model(base)) - reference).abs().max() > 0.05
    assert found.comparison.difference < 2e-4 < 0.05 < found.comparison.effect
    assert stored_tensors(base).keys() <= stored_tensors(tmp_path / "merged").keys()


def test_head_is_untied_only_if_it_was_trained(tmp_path):
    base = make_base(tmp_path / "base", "llama", tie_word_embeddings=True)
    export(make_adapter(base, tmp_path / "with"), base, tmp_path / "untied")
    export(make_adapter(base, tmp_path / "without", train_unembed=False), base, tmp_path / "tied")
    for name, is_tied in (("untied", False), ("tied", True)):
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is is_tied
        assert ("lm_head.weight" in stored_tensors(tmp_path / name)) is not is_tied
    kept, own = (
        load_file(tmp_path / "untied" / "model.safetensors")[n] for n in ("model.embed_tokens.weight", "lm_head.weight")
    )
    assert torch.equal(kept, load_file(base / "model.safetensors")["model.embed_tokens.weight"])
    assert not torch.equal(kept, own)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_head_that_is_stored_beside_a_tied_embedding(tmp_path, factor):
    """transformers ties them if they are equal, and takes the stored head if they are not."""
    base = make_base(tmp_path / "base", "llama", tie_word_embeddings=True)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = factor * tensors["model.embed_tokens.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    found = export(make_adapter(base, tmp_path / "adapter"), base, tmp_path / "merged")
    assert found.comparison.difference < 2e-4
    head = load_file(tmp_path / "merged" / "model.safetensors")["lm_head.weight"]
    assert 0 < (head - tensors["lm_head.weight"]).abs().max() < tensors["lm_head.weight"].abs().max()


def test_shards_and_dtypes(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base", "qwen3_moe")
    adapter = make_adapter(base, tmp_path / "adapter")
    monkeypatch.setattr(merging, "_SHARD_BYTES", 40_000)
    fractions = []
    found = export_merged(
        adapter, base, tmp_path / "merged", "bfloat16", is_checked=True, progress=lambda text, f: fractions.append(f)
    )
    files = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert len(files) == 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert sum((tmp_path / "merged" / name).stat().st_size for name in files) > index["metadata"]["total_size"]
    assert {each.dtype for each in stored_tensors(tmp_path / "merged").values()} == {"BF16"}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    assert found.comparison.unrounded < 2e-4 < 1e-3 < found.comparison.difference < 0.5
    known = [fraction for fraction in fractions if fraction is not None]
    assert known == sorted(known)
    assert known[-1] == 1.0
    assert logits(plain_model(tmp_path / "merged")).shape[0] == 29


def test_sharded_base_is_read(tmp_path):
    base = make_base(tmp_path / "whole", "llama")
    plain_model(base).save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    adapter = make_adapter(base, tmp_path / "adapter")
    export(adapter, tmp_path / "sharded", tmp_path / "merged")
    assert (logits(plain_model(tmp_path / "merged")) - peft_logits(base, adapter)).abs().max() < 2e-4


def test_tokenizer_template_and_generation_settings_come_along(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    (base / "LICENSE").write_text("terms")
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (base / "pytorch_model.bin").write_bytes(b"not ours to copy")
    export(make_adapter(base, tmp_path / "adapter"), base, tmp_path / "merged")
    assert not (tmp_path / "merged" / "pytorch_model.bin").exists()
    assert (tmp_path / "merged" / "LICENSE").read_text() == "terms"
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    ours, theirs = (AutoTokenizer.from_pretrained(place) for place in (tmp_path / "merged", base))
    message = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(message, tokenize=False) == theirs.apply_chat_template(message, tokenize=False)


def test_wrong_merge_is_refused_and_nothing_is_written(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(base, tmp_path / "adapter")
    right = LoadedAdapter.change
    monkeypatch.setattr(LoadedAdapter, "change", lambda self, weight: 1.05 * right(self, weight))
    with pytest.raises(CheckpointError, match="differs from its base with the adapter by 0"):
        export(adapter, base, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    export_merged(adapter, base, tmp_path / "merged", "float32", is_checked=False, progress=quiet)
    assert (tmp_path / "merged" / "config.json").is_file()


def test_weight_that_is_written_wrong_is_found(tmp_path):
    base = make_base(tmp_path / "base", "mixtral")
    adapter = make_adapter(base, tmp_path / "adapter")
    export_merged(adapter, base, tmp_path / "merged", "bfloat16", is_checked=False, progress=quiet)
    loaded, file = LoadedAdapter(adapter, base), tmp_path / "merged" / "model.safetensors"
    assert check_merged(loaded, base, tmp_path / "merged", {torch.bfloat16}, quiet).unrounded < 2e-4
    tensors = load_file(file)
    name = next(name for name in tensors if "experts.2.w3" in name)
    tensors[name][1] *= 1.02
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.experts\.gate_up_proj' is off by"):
        check_merged(loaded, base, tmp_path / "merged", {torch.bfloat16}, quiet)


def test_every_change_must_find_its_weight(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(base, tmp_path / "adapter")
    tensors = load_file(base / "model.safetensors")
    tensors["elsewhere.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelRefused, match=r"'model.layers.1.mlp.up_proj.weight'.*stored under other names"):
        merge(LoadedAdapter(adapter, base), base, tmp_path / "out", "auto", quiet)


def test_quantised_base_and_numbers_beyond_float16_are_refused(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(base, tmp_path / "adapter")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' has numbers beyond"):
        export(adapter, base, tmp_path / "merged", "float16")
    settings = json.loads((base / "config.json").read_text())
    loaded = LoadedAdapter(adapter, base)
    (base / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ModelRefused, match="quantised \\('mxfp4'\\)"):
        merge(loaded, base, tmp_path / "out", "auto", quiet)


def test_adapter_of_another_model_is_refused(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    other = make_base(tmp_path / "other", "llama", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match="train different modules"):
        export(make_adapter(base, tmp_path / "adapter"), other, tmp_path / "merged")


def test_check_says_when_memory_is_short(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base", "llama")
    loaded = LoadedAdapter(make_adapter(base, tmp_path / "adapter"), base)
    monkeypatch.setattr("lorimer.models.export.check.free_bytes", lambda device: 1000)
    with pytest.raises(InvalidInput, match="--no-check"):
        check_merged(loaded, base, base, {torch.float32}, quiet)


def test_one_shard_is_in_memory(tmp_path, monkeypatch):
    """Tensors are read when their shard is written, not before."""
    base = make_base(tmp_path / "base", "llama")
    adapter = LoadedAdapter(make_adapter(base, tmp_path / "adapter"), base)
    monkeypatch.setattr(merging, "_SHARD_BYTES", 30_000)
    held, most = 0, 0
    save = merging.save_file

    def saving(tensors, path, metadata):
        nonlocal held, most
        held = sum(tensor.nbytes for tensor in tensors.values())
        most = max(most, held)
        save(tensors, path, metadata=metadata)

    monkeypatch.setattr(merging, "save_file", saving)
    (tmp_path / "out").mkdir()
    merge(adapter, base, tmp_path / "out", "auto", quiet)
    largest = max(each.num_bytes("auto") for each in stored_tensors(base).values())
    assert most <= max(30_000, largest)
    with safe_open(tmp_path / "out" / "model-00001-of-00005.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
