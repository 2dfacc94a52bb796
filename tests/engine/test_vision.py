"""Images in training and sampling against plain transformers with PEFT, one sequence at a time."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForImageTextToText

from lorimer.engine.engine import Engine
from lorimer.engine.messages import ForwardBackward, PublishSampler, SaveState, TrainResult
from lorimer.engine.model.vision import FAMILIES, ReadImage, _turns, open_vision
from lorimer.errors import InvalidInput
from lorimer.models.export.export import export_merged
from tests.engine.debug_vision import VISION_ARCHITECTURES, tiny_vision_config
from tests.engine.operations import make_operation, make_sample, settings
from tests.engine.pictures import broken_files, png
from tests.engine.reference import DEVICE, relative_error
from tests.engine.seeing import (
    RUN,
    Mixed,
    create_run,
    finish,
    make_directory,
    open_engine,
    plain_model,
    reference_of,
    run_reference,
)

SEQUENCES = [
    Mixed(4, "0", 3, "1", 5, seed=1),
    Mixed(9, seed=2),
    Mixed("2", 6, seed=3),
    Mixed(5, "0", seed=4),
    Mixed(7, "3", 1, "2", 2, "0", 3, seed=5),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return {name: make_directory(place / name, name) for name in VISION_ARCHITECTURES}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "llava"])
def directory(request, directories):
    """Of each kind one: windows in the tower, features in the layers, positions that are counted."""
    return directories[request.param]


@pytest.fixture(scope="module")
def qwen(directories):
    return directories["qwen3_vl"]


@pytest.fixture(scope="module")
def engine(directory):
    """An engine with a run, for tests that leave both as they are."""
    engine = open_engine(directory)
    create_run(engine)
    return engine


@pytest.fixture(scope="module")
def qwen_engine(qwen):
    engine = open_engine(qwen)
    create_run(engine)
    return engine


def operation(data, request_id="r", **more):
    return ForwardBackward(request_id=request_id, model_id=RUN, data=data, loss_fn="cross_entropy", **more)


def train(engine, *operations):
    results = engine.train(list(operations))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def forward(engine, data):
    return train(engine, operation(data, forward_only=True))[0].logprobs


# ── training ──────────────────────────────────────────────────────────────────────────────────────────


CASES = [*((name, 512) for name in VISION_ARCHITECTURES), ("qwen3_vl", 40), ("llava", 40)]
"""The second number is the token budget: the large one takes a pass, the small ones several, recomputed in part."""


@pytest.mark.parametrize(("architecture", "budget"), CASES)
def test_loss_logprobs_and_gradients_equal_the_reference(directories, architecture, budget):
    directory = directories[architecture]
    engine = open_engine(directory, token_budget=budget)
    adapter = create_run(engine)
    data = [sequence.datum(directory, seed) for seed, sequence in enumerate(SEQUENCES)]
    (result,) = train(engine, operation(data))
    reference = reference_of(directory, engine, adapter)
    loss, logprobs, gradients = run_reference(reference, directory, SEQUENCES, data)
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    for ours, theirs in zip(result.logprobs, logprobs, strict=True):
        assert abs(ours - theirs).max() < 1e-4
    assert adapter.grads.keys() == gradients.keys()
    for name, pair in gradients.items():
        for factor, ours, theirs in zip("AB", adapter.grads[name], pair, strict=True):
            assert relative_error(ours, theirs) < 1e-4, f"{name} {factor}"


def test_only_the_language_model_is_trained(engine):
    names = {target.name for target in engine.model.targets}
    assert all(name == "lm_head" or name.startswith("model.language_model.layers.") for name in names)
    assert len(names) == 2 * 7 + 1


def test_a_mixed_batch_equals_each_alone(directory, engine):
    data = [sequence.datum(directory, seed) for seed, sequence in enumerate(SEQUENCES)]
    together = forward(engine, data)
    for datum, logprobs in zip(data, together, strict=True):
        np.testing.assert_allclose(forward(engine, [datum])[0], logprobs, atol=2e-5)


def test_operations_with_and_without_images_share_a_batch(qwen, qwen_engine):
    seeing, blind = operation([SEQUENCES[0].datum(qwen)], "a"), operation([SEQUENCES[1].datum(qwen)], "b")
    together = train(qwen_engine, seeing, blind)
    for alone, result in zip((seeing, blind), together, strict=True):
        np.testing.assert_allclose(train(qwen_engine, alone)[0].logprobs[0], result.logprobs[0], atol=2e-5)


def test_datums_share_what_comes_before_an_image_and_equal_images(directory, engine):
    """Training of datums that begin alike, up to an image, through one and after it, equals training of each alone."""
    parts = (20, "0", 18), (20, "0", 25), (20, "4", 18), (20, "0"), (29,), (20, "0", 3, "1", 4)
    data = [Mixed(*some, seed=3).datum(directory, seed=i) for i, some in enumerate(parts)]
    adapter, trainer, found = engine._run(RUN), engine.trainer, []
    for min_shared in (8, sys.maxsize):
        adapter.clear_gradient()
        before, trainer.min_shared = trainer.min_shared, min_shared
        operation = ForwardBackward(request_id="f", model_id=RUN, data=data, loss_fn="cross_entropy")
        (result,) = engine.train([operation])
        trainer.min_shared = before
        found.append((result, adapter.grads))
    adapter.clear_gradient()
    (shared, gradients), (alone, expected) = found
    assert shared.metrics["tokens_computed:sum"] < 0.8 * alone.metrics["tokens_computed:sum"]
    for ours, theirs in zip(shared.logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, pair in expected.items():
        for ours, theirs in zip(gradients[name], pair, strict=True):
            assert relative_error(ours, theirs) < 1e-5, name


def test_what_is_in_the_picture_matters(directory, engine):
    datum = Mixed(4, "0", 6).datum(directory)
    same = Mixed(4, "0", 6).datum(directory)
    other = Mixed(4, "4", 6).datum(directory)  # of the same size
    first, second, third = forward(engine, [datum, same, other])
    np.testing.assert_allclose(first, second, atol=2e-5)
    assert abs(first - third).max() > 1e-2
    np.testing.assert_allclose(first[:4], third[:4], atol=2e-5)  # nothing before the image sees it


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────────


def trainer_logprobs(engine, directory, mixed, tokens):
    """Of every token but the first, by the trainer."""
    whole = mixed.inputs(directory, tokens)["input_ids"][0].numpy()
    targets = {"target_tokens": whole[1:]}
    longer = Mixed(seed=0)
    longer.parts = [*mixed.parts, np.asarray(tokens[:-1], np.int64)]
    datum = longer.datum(directory)
    return forward(engine, [replace(datum, loss_fn_inputs=targets)])[0]


@pytest.fixture(scope="module")
def sampler_id(engine):
    engine.publish_sampler(PublishSampler(request_id="p", model_id=RUN, sampler_id="mine"))
    return "mine"


@pytest.mark.parametrize("sequence", [SEQUENCES[0], SEQUENCES[2], SEQUENCES[3]], ids=["between", "first", "last"])
def test_logprobs_of_prompt_and_samples_are_the_trainers(directory, engine, sampler_id, sequence):
    request = sequence.sample(max_tokens=7, num_samples=3, prompt_logprobs=True, sampler_id=sampler_id)
    crowd = [make_sample(f"text{i}", prompt_length=5 + i) for i in range(3)]
    result = finish(engine, *crowd, request)["s"]
    length = sequence.length(directory)
    assert result.prompt_tokens == length
    is_image = sequence.inputs(directory)["input_ids"][0].numpy() == engine.model.vision._placeholder
    for sampled in result.sequences:
        expected = trainer_logprobs(engine, directory, sequence, sampled.tokens)
        assert abs(sampled.logprobs - expected[length - 1 :]).max() < 1e-4
        of_prompt = result.prompt_logprobs[1:]
        assert np.isnan(of_prompt[is_image[1:]]).all()
        assert abs(of_prompt - expected[: length - 1])[~is_image[1:]].max(initial=0) < 1e-4


def test_greedy_samples_are_those_of_transformers(directory, engine):
    plain, sequence = plain_model(directory), SEQUENCES[0]
    found = finish(engine, sequence.sample(max_tokens=8, temperature=0.0))["s"].sequences[0].tokens.tolist()
    tokens = []
    for _ in found:
        with torch.no_grad():
            tokens.append(int(plain(**sequence.inputs(directory, tokens)).logits[0, -1].argmax()))
    assert found == tokens


def test_prompts_share_what_comes_before_an_image_and_equal_images(directory):
    first, other = Mixed(20, "0", 20), Mixed(20, "4", 20)
    fresh = open_engine(directory)
    results = [finish(fresh, mixed.sample(topk_sample_logprobs=3))["s"] for mixed in (first, other, first, other)]
    hits = [result.prompt_cache_hit_tokens for result in results]
    whole = (first.length(directory) - 1) // 16 * 16
    assert hits == [0, 16, whole, whole]
    for a, b in ((0, 2), (1, 3)):
        assert results[a].sequences[0].tokens.tolist() == results[b].sequences[0].tokens.tolist()
        np.testing.assert_allclose(
            results[a].sequences[0].topk_logprobs.logprobs, results[b].sequences[0].topk_logprobs.logprobs, atol=1e-5
        )
    best = [result.sequences[0].topk_logprobs.logprobs for result in results[:2]]
    assert abs(best[0] - best[1]).max() > 1e-3


def test_equal_prompts_that_wait_are_computed_once_and_others_are_not(qwen):
    engine = open_engine(qwen)
    mixed = [Mixed(4, "0", 3), Mixed(4, "0", 3), Mixed(4, "4", 3)]
    results = finish(engine, *(one.sample(str(i), max_tokens=2, seed=5) for i, one in enumerate(mixed)))
    assert engine.sampler.num_prefilled == 2 * mixed[0].length(qwen)
    logprobs = [results[str(i)].sequences[0].logprobs for i in range(3)]
    assert logprobs[0].tolist() == logprobs[1].tolist() != logprobs[2].tolist()


def test_an_image_may_be_cut_by_the_pieces_of_a_prompt(directory, engine, monkeypatch):
    sequence = SEQUENCES[4]
    request = sequence.sample(max_tokens=5, prompt_logprobs=True)
    whole = finish(engine, request)["s"]
    monkeypatch.setattr("lorimer.engine.sampling.sampler.PREFILL_TOKENS", 7)
    pieces = finish(open_engine(directory), request)["s"]
    np.testing.assert_allclose(pieces.prompt_logprobs, whole.prompt_logprobs, atol=2e-5)
    assert pieces.sequences[0].tokens.tolist() == whole.sequences[0].tokens.tolist()


def test_a_sequence_that_loses_its_row_comes_out_the_same(qwen):
    sequence = SEQUENCES[0]
    request = sequence.sample(max_tokens=40, num_samples=4)
    ample, tight = open_engine(qwen), open_engine(qwen)
    tight.sampler._slab.max_positions = 300
    expected, found = (finish(engine, request)["s"] for engine in (ample, tight))
    assert tight.sampler.num_prefilled > ample.sampler.num_prefilled, "something was computed again"
    for a, b in zip(expected.sequences, found.sequences, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


# ── positions ─────────────────────────────────────────────────────────────────────────────────────────


def test_positions_are_those_of_transformers(qwen, qwen_engine):
    plain = plain_model(qwen)
    for sequence in SEQUENCES:
        if not sequence.seeds:
            continue
        inputs = sequence.inputs(qwen)
        expected, deltas = plain.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        )
        images = qwen_engine.model.vision.read(sequence.text, sequence.images, "prompt", 512, {})
        assert images.positions.tolist() == expected[:, 0].tolist()
        assert images.shift == int(deltas[0, 0])


def test_images_may_stand_side_by_side(qwen_engine):
    """Where transformers takes them for one."""
    image = ReadImage(Mixed("2").images[0], b"", 4, (1, 4, 4))
    found = _turns(10, [(1, image), (5, image)], merge=2)
    assert found.tolist() == [
        [0, 1, 1, 1, 1, 3, 3, 3, 3, 5],
        [0, 1, 1, 2, 2, 3, 3, 4, 4, 5],
        [0, 1, 2, 1, 2, 3, 4, 3, 4, 5],
    ]
    result = finish(qwen_engine, Mixed(2, "0", "2", 3).sample(prompt_logprobs=True))["s"]
    assert np.isfinite(result.prompt_logprobs[-3:]).all()


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────


def with_images(datum, **fields):
    return replace(datum, images=[replace(image, **fields) for image in datum.images])


def test_a_wrong_number_of_expected_tokens_is_refused_with_both(directory, engine):
    sequence = Mixed(4, "2", 3)
    number = sequence.length(directory) - 7
    datum = sequence.datum(directory)
    wrong, right = (operation([with_images(datum, expected_tokens=n)]) for n in (number + 1, number))
    refused, done = engine.train([wrong, right])
    text = rf"data\[0\].model_input.chunks\[1\] has expected_tokens {number + 1}; .* as {number} tokens"
    with pytest.raises(InvalidInput, match=text):
        raise refused
    assert isinstance(done, TrainResult)


BROKEN = broken_files()


@pytest.mark.parametrize(("data", "kind", "words"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_picture_fails_its_operation_alone(qwen, qwen_engine, data, kind, words):
    datum = Mixed(4, "2", 3).datum(qwen)
    bad = operation([datum, with_images(datum, data=data, format=kind)])
    refused, done = qwen_engine.train([bad, operation([datum])])
    assert isinstance(refused, InvalidInput)
    assert all(word in str(refused) for word in ["data[1].model_input.chunks[1]", *words]), str(refused)
    assert isinstance(done, TrainResult)


def test_a_picture_that_the_processor_cannot_take_is_refused(qwen_engine):
    request = with_images(Mixed(4, "2", 3).sample(), data=png(1000, 2))
    with pytest.raises(InvalidInput, match=r"prompt.chunks\[1\] has 1000 x 2 pixels"):
        qwen_engine.add_sample(request)


def test_more_images_than_the_context_holds_are_refused(qwen_engine):
    with pytest.raises(InvalidInput, match=r"prompt has \d+ tokens up to its chunk \d+; at most 512"):
        qwen_engine.add_sample(Mixed(*(["0", 1] * 40)).sample())


def test_a_model_that_reads_text_refuses_images_by_name(tmp_path):
    engine = Engine(settings(tmp_path))
    create_run(engine)
    assert engine.info.no_images == "it reads text only"
    text = "'lorimer/debug' reads no images: it reads text only"
    with pytest.raises(InvalidInput, match=text):
        engine.add_sample(Mixed(4, "2", 3).sample())
    blind = make_operation("t", RUN)
    seeing = operation([replace(blind.data[0], images=Mixed("2").images)])
    refused, done = engine.train([seeing, blind])
    assert text in str(refused)
    assert isinstance(done, TrainResult)


def test_without_an_image_processor_a_model_reads_text(tmp_path):
    directory = make_directory(tmp_path / "model", "llava")
    (directory / "preprocessor_config.json").unlink()
    engine = open_engine(directory)
    assert engine.info.no_images == "its directory has no preprocessor_config.json"
    assert finish(engine, make_sample("text"))["text"].sequences
    with pytest.raises(InvalidInput, match="preprocessor_config"):
        engine.add_sample(Mixed(4, "2", 3).sample())


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("gemma3", {}, "images of the family 'gemma3' are not supported; those of qwen2_vl, "),
        ("llava", {"vision_config": {"model_type": "pixtral"}}, "its vision tower is a 'pixtral'"),
    ],
    ids=["family", "tower"],
)
def test_other_families_and_towers_are_named(family, fields, reason, tmp_path):
    config = AutoConfig.for_model(family, **fields)
    assert open_vision(SimpleNamespace(config=config), tmp_path, DEVICE, 1).startswith(reason)


def test_models_open_in_the_small_precision(directory):
    assert open_engine(directory, dtype="bfloat16").info.no_images == ""


def test_code_that_comes_with_an_image_processor_is_not_run(qwen, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(qwen, directory)
    file = directory / "preprocessor_config.json"
    names = {"image_processor_type": "Qwen2VLImageProcessorFast", "auto_map": {"AutoImageProcessor": "planted.Planted"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    (directory / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Planted: pass\n")
    result = finish(open_engine(directory), SEQUENCES[0].sample())["s"]
    assert result.prompt_tokens == SEQUENCES[0].length(qwen)
    assert not (tmp_path / "ran").exists()


# ── what is saved ─────────────────────────────────────────────────────────────────────────────────────


def test_a_saved_adapter_is_the_same_in_peft(directory, engine, tmp_path):
    engine.save_state(SaveState(request_id="s", model_id=RUN, directory=str(tmp_path / "saved"), weights_only=True))
    modules = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["target_modules"]
    assert not any("visual" in name or "vision" in name for name in modules)
    loaded = peft.PeftModel.from_pretrained(plain_model(directory), tmp_path / "saved").eval()
    assert not any("visual" in name or "vision" in name for name, _ in loaded.named_parameters() if "lora" in name)
    sequence = SEQUENCES[0]
    datum = sequence.datum(directory)
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
    with torch.no_grad():
        logits = loaded(**sequence.inputs(directory)).logits[0]
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(forward(engine, [datum])[0], expected, atol=1e-4)


def test_a_merged_model_sees_the_same(directory, engine, tmp_path):
    engine.save_state(SaveState(request_id="s", model_id=RUN, directory=str(tmp_path / "saved"), weights_only=True))
    output = tmp_path / "merged"
    export_merged(tmp_path / "saved", directory, output, "auto", is_checked=True, progress=lambda *_: None)
    merged = AutoModelForImageTextToText.from_pretrained(output, attn_implementation="eager").eval()
    sequence = SEQUENCES[0]
    datum = sequence.datum(directory)
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
    with torch.no_grad():
        logits = merged(**sequence.inputs(output)).logits[0]
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(forward(engine, [datum])[0], expected, atol=1e-4)


def test_tiny_models_are_of_supported_families():
    assert set(VISION_ARCHITECTURES) <= set(FAMILIES)
    with pytest.raises(InvalidInput, match="'gemma3'"):
        tiny_vision_config("gemma3")
