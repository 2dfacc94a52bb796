"""Quantised base models, loaded from directories: they train and sample exactly as the rounded weights would."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lorimer.engine.adapters.adapters import snapshot
from lorimer.engine.model.base_model import load_model
from lorimer.engine.model.quantization import FORMATS, QuantizedWeight
from lorimer.engine.training.trainer import TrainItem
from lorimer.errors import ModelRefused
from lorimer.models.debug import make_debug_model, tiny_model
from lorimer.models.description import describe_model
from tests.engine.debug_vision import make_debug_vision_model
from tests.engine.quantized import WIDE, open_quantized, projections
from tests.engine.reference import (
    DENSE,
    DEVICE,
    MOE,
    checked,
    make_adapter,
    make_datum,
    reference_of,
    run_reference,
)
from tests.engine.test_sampling import finish, make_sampler, prompt_of, request, trainer_logprobs
from tests.engine.test_training import LENGTHS, assert_same_gradients, eight_runs, run
from tests.memory import peak_of_second_call

PAIRS = [
    *((name, FORMATS[i % 3]) for i, name in enumerate((*DENSE, *MOE))),
    *((name, kind) for name in ("qwen3", "gpt_oss") for kind in FORMATS),
]


def quantized_weights(model):
    return [module for module in model.transformer.modules() if isinstance(module, QuantizedWeight)]


@pytest.mark.parametrize(("architecture", "kind"), sorted(set(PAIRS)))
def test_loss_logprobs_and_gradients_are_those_of_the_rounded_weights(architecture, kind, tmp_path):
    model, plain = open_quantized(tmp_path, architecture, kind)
    adapter = make_adapter(model)
    data = [make_datum("cross_entropy", n, seed, model.vocab_size) for seed, n in enumerate(LENGTHS)]
    (result,) = run(model, [TrainItem(checked(data, "cross_entropy", model.vocab_size), adapter)])
    reference = reference_of(plain, model, adapter, architecture)
    loss, logprobs, gradients = run_reference(reference, data, "cross_entropy")
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    for ours, theirs in zip(result.logprobs, logprobs, strict=True):
        assert abs(ours - theirs).max() < 1e-4
    assert_same_gradients(adapter.grads, gradients, 1e-4)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gpt_oss"])
@pytest.mark.parametrize("kind", FORMATS)
def test_sampled_and_prompt_logprobs_are_the_trainers(architecture, kind, tmp_path):
    model, _ = open_quantized(tmp_path, architecture, kind)
    adapter = make_adapter(model, rank=8)
    adapters = {"mine": snapshot(adapter), "other": snapshot(make_adapter(model, rank=3, seed=9))}
    sampler, prompt = make_sampler(model), prompt_of(37)
    crowd = [request(f"c{i}", prompt_of(5 + 5 * i), ("other", None, "mine")[i], max_tokens=9) for i in range(3)]
    first = finish(sampler, *crowd, request("r", prompt, "mine", 2, prompt_logprobs=True), adapters=adapters)["r"]
    # Alone, with the prompt in the prefix cache.
    long = finish(sampler, request("r", prompt, "mine", 2, max_tokens=32), adapters=adapters)["r"]
    assert long.prompt_cache_hit_tokens == 32
    for result in (first, long):
        for sequence in result.sequences:
            expected = trainer_logprobs(model, np.concatenate([prompt, sequence.tokens]), adapter)
            assert abs(sequence.logprobs - expected[len(prompt) - 1 :]).max() < 1e-4
    assert abs(first.prompt_logprobs[1:] - expected[: len(prompt) - 1]).max() < 1e-4


@pytest.mark.parametrize(("architecture", "kind"), [("qwen3", "nf4"), ("mixtral", "int8")])
def test_every_run_of_a_mixed_batch_gets_what_it_gets_alone(architecture, kind, tmp_path):
    model, _ = open_quantized(tmp_path, architecture, kind)
    alone = [(run(model, [work])[0], work.adapter.grads) for work in eight_runs(model)]
    # Of a budget of 8, every datum is longer or fills it: activations are computed again.
    for budget in (64, 8):
        batch = eight_runs(model)
        for result, work, (expected, gradients) in zip(run(model, batch, budget), batch, alone, strict=True):
            found, wanted = (
                # The use of experts is that of a whole pass.
                {name: value for name, value in one.metrics.items() if not name.startswith("e_")}
                for one in (result, expected)
            )
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
            assert_same_gradients(work.adapter.grads, gradients, 1e-5)


@pytest.mark.parametrize("kind", FORMATS)
def test_passes_in_bfloat16_compute_with_the_same_codes(kind, tmp_path):
    data = [make_datum("cross_entropy", n, n, 200) for n in LENGTHS]
    gradients, losses, codes = [], [], []
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = open_quantized(tmp_path, "qwen3_moe", kind, replace(DEVICE, dtype=dtype))
        adapter = make_adapter(model)
        (result,) = run(model, [TrainItem(checked(data, "cross_entropy", model.vocab_size), adapter)])
        gradients.append(torch.cat([f.flatten() for pair in adapter.grads.values() for f in pair]))
        losses.append(result.metrics["loss:sum"])
        codes.append(torch.cat([one.codes.flatten() for one in quantized_weights(model)]))
    assert torch.equal(*codes)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.98


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe", "gpt_oss"])
def test_projections_are_quantised_and_the_rest_is_not(architecture, tmp_path):
    model, _ = open_quantized(tmp_path, architecture, "nf4")
    plain = tiny_model(architecture, **WIDE)
    names, rest = projections(model), dict(model.transformer.named_parameters())
    assert len(quantized_weights(model)) == len(names)
    assert {name for name in names if rest[name].numel()} == set()
    assert model.num_parameters == sum(parameter.numel() for parameter in plain.parameters())
    for name, parameter in plain.named_parameters():
        if name not in names and "norm" not in name:  # ours have other names and offsets
            assert torch.equal(rest[name].cpu(), parameter), name
    weights = quantized_weights(model)
    dense = model.num_parameters - sum(one.num_weights for one in weights)
    assert describe_model(tmp_path).weights_bytes["nf4"] == sum(one.num_bytes for one in weights) + 4 * dense
    assert model.quantize == "nf4"


def test_weights_that_cannot_be_quantised_are_refused_by_name(tmp_path):
    make_debug_model(tmp_path, **WIDE)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)

    def refusal(**changed):
        save_file(weights | changed, file, {"format": "pt"})
        with pytest.raises(ModelRefused) as refused:
            load_model(tmp_path, DEVICE, "debug", quantize="int8")
        return str(refused.value)

    assert f"{name!r} has numbers that are not finite" in refusal(**{name: weights[name] * float("nan")})
    assert f"{name!r} has the shape (4, 96); the model needs (136, 96)" in refusal(**{name: weights[name][:4].clone()})
    embedding = {"model.embed_tokens.weight": weights["model.embed_tokens.weight"][:4].clone()}
    assert "'model.embed_tokens.weight' has the shape (4, 96)" in refusal(**embedding)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert "'debug' is stored quantised, by 'fp8'" in refusal()


@pytest.mark.skipif(DEVICE.type == "pretend", reason="the process that is measured does not know the pretended device")
def test_loading_never_holds_the_dense_model(tmp_path):
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 16}
    tiny_model("llama", **sizes).bfloat16().save_pretrained(tmp_path)
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    peak = peak_of_second_call(partial(load_model, tmp_path, DEVICE, "wide", quantize="nf4"))
    model = load_model(tmp_path, DEVICE, "wide", quantize="nf4")
    # The file is mapped, and its pages are counted where they were read.
    assert peak - file_bytes < 0.75 * 4 * model.num_parameters
    assert 0.1 < sum(one.num_bytes for one in quantized_weights(model)) / (4 * model.num_parameters) < 0.15


def test_the_vision_tower_is_not_quantised_and_images_are_still_read(tmp_path):
    make_debug_vision_model(tmp_path)
    model = load_model(tmp_path, DEVICE, "seeing", quantize="nf4")  # compares a sequence with an image as well
    assert model.no_images == ""
    paths = [name for name, module in model.transformer.named_modules() if isinstance(module, QuantizedWeight)]
    assert len(paths) == 2 * 7
    assert all("language_model.layers" in path for path in paths)
