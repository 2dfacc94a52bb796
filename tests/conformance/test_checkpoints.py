"""Saving and loading through TrainingClient: training state, samplers, exports that PEFT reads."""

import hashlib
import json
import re

import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.conformance.coverage import covers
from tests.conformance.samples import (
    MODEL,
    RANK,
    batch,
    current_logprobs,
    datum,
    download,
    fetch,
    logprobs,
    prompt_of,
    step,
    tokens_of,
)

DATA = batch()

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")


@pytest.fixture
def learned(service):
    trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=5)
    step(trainer, DATA)
    return trainer


# ── training state ────────────────────────────────────────────────────────────────────────────────────


@covers(
    "TrainingClient.save_state",
    "TrainingClient.save_state_async",
    "TrainingClient.load_state",
    "TrainingClient.load_state_async",
)
async def test_loading_brings_the_saved_weights_back(learned):
    saved = current_logprobs(learned, DATA)
    path = learned.save_state("one").result().path
    assert path == f"tinker://{learned.model_id}/weights/one"
    assert (await (await learned.save_state_async("two"))).path.endswith("/weights/two")
    step(learned, DATA)
    assert np.abs(current_logprobs(learned, DATA) - saved).max() > 1e-3
    assert learned.load_state(path).result().path == path
    np.testing.assert_allclose(current_logprobs(learned, DATA), saved, atol=1e-6)
    step(learned, DATA)
    await (await learned.load_state_async(path))
    np.testing.assert_allclose(current_logprobs(learned, DATA), saved, atol=1e-6)


@covers("TrainingClient.load_state_with_optimizer", "TrainingClient.load_state_with_optimizer_async")
async def test_loading_with_optimizer_repeats_the_next_step(learned):
    path = learned.save_state("here").result().path
    step(learned, DATA)
    expected = current_logprobs(learned, DATA)
    learned.load_state_with_optimizer(path).result()
    step(learned, DATA)
    np.testing.assert_allclose(current_logprobs(learned, DATA), expected, atol=1e-5)
    await (await learned.load_state_with_optimizer_async(path))
    step(learned, DATA)
    np.testing.assert_allclose(current_logprobs(learned, DATA), expected, atol=1e-5)


def test_taken_name_needs_overwrite(learned, rest):
    learned.save_state("same", user_metadata={"version": "1"}).result()
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="same"):
        learned.save_state("same").result()
    step(learned, DATA)
    path = learned.save_state("same", overwrite=True, user_metadata={"version": "2"}, ttl_seconds=7200).result().path
    (shown,) = rest.list_checkpoints(learned.model_id).result().checkpoints
    assert (shown.tinker_path, shown.user_metadata, shown.checkpoint_type) == (path, {"version": "2"}, "training")
    assert 7100 < (shown.expires_at - shown.time).total_seconds() < 7300
    now = current_logprobs(learned, DATA)
    step(learned, DATA)
    learned.load_state(path).result()
    np.testing.assert_allclose(current_logprobs(learned, DATA), now, atol=1e-6)


@pytest.mark.parametrize("name", ["a/b", "..", "a b"], ids=["slash", "dots", "space"])
def test_name_that_could_leave_its_place_is_refused(learned, name):
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError)):
        learned.save_state(name).result()
    step(learned, DATA)


def test_lifetime_below_an_hour_is_refused(learned):
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="3600"):
        learned.save_state("short", ttl_seconds=60).result()


def test_weights_of_another_shape_are_refused(service, learned):
    path = learned.save_state("narrow").result().path
    wide = service.create_lora_training_client(MODEL, rank=2 * RANK)
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match="rank"):
        wide.load_state(path).result()
    step(wide, DATA)


# ── samplers ──────────────────────────────────────────────────────────────────────────────────────────


@covers(
    "TrainingClient.save_weights_for_sampler",
    "TrainingClient.save_weights_for_sampler_async",
    "TrainingClient.create_sampling_client",
    "TrainingClient.create_sampling_client_async",
    "TrainingClient.save_weights_and_get_sampling_client",
    "TrainingClient.save_weights_and_get_sampling_client_async",
)
async def test_every_way_to_a_sampler_gives_the_trainers_logprobs(learned, rest):
    tokens = tokens_of(10, 4)
    expected = current_logprobs(learned, [datum(tokens)])
    named = learned.save_weights_for_sampler("named", ttl_seconds=3600, user_metadata={"a": "b"}).result().path
    again = (await (await learned.save_weights_for_sampler_async("again"))).path
    assert named == f"tinker://{learned.model_id}/sampler_weights/named"
    clients = [
        learned.create_sampling_client(named),
        await learned.create_sampling_client_async(again),
        learned.save_weights_and_get_sampling_client(),
        await learned.save_weights_and_get_sampling_client_async(),
    ]
    for client in clients:
        np.testing.assert_allclose(client.compute_logprobs(prompt_of(tokens)).result()[1:], expected, atol=1e-4)
    shown = {one.checkpoint_id: one for one in rest.list_checkpoints(learned.model_id).result().checkpoints}
    assert set(shown) == {"sampler_weights/named", "sampler_weights/again"}
    assert shown["sampler_weights/named"].user_metadata == {"a": "b"}
    assert shown["sampler_weights/named"].expires_at is not None


# ── exports ───────────────────────────────────────────────────────────────────────────────────────────


@covers("TrainingClient.save_weights_external_async", "RestClient.get_external_weights_urls_async")
@pytest.mark.filterwarnings("ignore")
async def test_export_is_an_adapter_that_peft_loads(learned, rest, tmp_path):
    saved = await (await learned.save_weights_external_async("final", ttl_seconds=3600))
    assert saved.path == f"tinker://{learned.model_id}/external_weights/final"
    answer = await rest.get_external_weights_urls_async(saved.path)
    assert set(answer.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    first, second = (hashlib.sha256(fetch(answer.urls["adapter_model.safetensors"])).digest() for _ in range(2))
    assert first == second
    directory = download(rest, saved.path, tmp_path)
    config = json.loads((directory / "adapter_config.json").read_text("utf-8"))
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, 32)
    base = AutoModelForCausalLM.from_pretrained(learned.get_info().model_data.tokenizer_id, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(directory)).eval()
    for item, found in zip(DATA, logprobs(learned.forward(DATA, "cross_entropy").result()), strict=True):
        with torch.no_grad():
            shown = model(torch.tensor([item.model_input.to_ints()])).logits[0].log_softmax(-1)
        expected = shown.gather(-1, item.loss_fn_inputs["target_tokens"].to_torch()[:, None])[:, 0]
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-4)


@covers("RestClient.get_external_weights_urls")
def test_export_for_recipients_only_they_can_read(learned, rest, tmp_path):
    pyrage = pytest.importorskip("pyrage", reason="the server encrypts with the package pyrage")
    identity = pyrage.x25519.Identity.generate()
    path = learned.save_weights_external("secret", age_encryption_recipients=[str(identity.to_public())]).result().path
    files = rest.get_external_weights_urls(path).result().urls
    assert set(files) == {"adapter_config.json.age", "adapter_model.safetensors.age"}
    content = pyrage.decrypt(fetch(files["adapter_config.json.age"]), [identity])
    assert json.loads(content)["r"] == RANK


def test_export_cannot_be_loaded(learned, service):
    path = learned.save_weights_external("final").result().path
    with pytest.raises(tinker.BadRequestError, match="export"):
        service.create_training_client_from_state(path)


def test_paths_of_results_lead_to_the_console(learned):
    saved = learned.save_weights_for_sampler("shown").result()
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(saved.path)
    assert (parsed.training_run_id, parsed.checkpoint_type) == (learned.model_id, "sampler")
    assert re.match(r"https?://.+/playground\?.*checkpoint", saved.get_playground_url())
