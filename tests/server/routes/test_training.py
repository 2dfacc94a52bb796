"""Runs and their operations, in the forms that old and new releases send."""

import asyncio

import numpy as np
import pytest

from lorimer import types
from lorimer.types.compatibility import PROTOBUF
from lorimer.types.compression import compress_zstd
from lorimer.types.encoding import encode_training_request

from .conftest import LOSS, MODEL, TOKENS, datum

pytestmark = pytest.mark.asyncio(loop_scope="session")

JSON_DATUM = {
    "model_input": {"chunks": [{"tokens": TOKENS}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [20, 30, 40, 50, 60], "dtype": "int64", "shape": [5]},
        "weights": {"data": [1.0] * 5, "dtype": "float32", "shape": [5]},
    },
}
JSON_INPUT = {"data": [JSON_DATUM], "loss_fn": "cross_entropy", "loss_fn_config": None}


async def test_run_is_created_once_and_described(ada, model_directory):
    session_id = await ada.session()
    body = {
        "session_id": session_id,
        "model_seq_id": 3,
        "base_model": MODEL,
        "user_metadata": {"a": "b", "n": 1},
        "lora_config": {"rank": 8, "seed": 3, "train_unembed": False, "train_mlp": True, "train_attn": False},
        "optimizer_config": {"type": "adamw"},
        "type": "create_model",
    }
    promise = await ada.ok("create_model", body)
    assert await ada.ok("create_model", body) == promise
    run_id = f"{session_id}:train:3"
    assert promise["model_id"] == run_id
    assert await ada.result(promise) == {"type": "create_model", "model_id": run_id}
    info = await ada.ok("get_info", {"model_id": run_id})
    assert info == {
        "type": "get_info",
        "model_data": {
            "arch": "Qwen3ForCausalLM",
            "model_name": MODEL,
            "tokenizer_id": str(model_directory),
            "model_id": run_id,
            "lora_rank": 8,
        },
        "model_id": run_id,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "method": "lora",
        "lora_rank": 8,
        "model_name": MODEL,
    }
    run = await ada.fetch(f"training_runs/{run_id}")
    assert run["user_metadata"] == {"a": "b", "n": "1"}
    assert run["lora_rank"] == 8


async def test_run_of_an_old_release_has_the_defaults(ada):
    session_id = await ada.session()
    promise = await ada.ok("create_model", {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL})
    info = await ada.ok("get_info", {"model_id": (await ada.result(promise))["model_id"]})
    assert info["lora_rank"] == 32


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"base_model": "no/such"}, 404, [MODEL]),
        ({"lora_config": {"rank": 0}}, 400, ["rank", "0"]),
        ({"lora_config": {"rank": 4, "seed": -1}}, 400, ["seed"]),
        ({"lora_config": {"rank": 4, "train_mlp": False, "train_attn": False, "train_unembed": False}}, 400, ["train"]),
        ({"lora_config": {"rank": 4, "alpha": 16}}, 422, ["alpha"]),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, 400, ["dimuon", "adamw"]),
        ({"optimizer_config": {"type": "rprop"}}, 400, ["rprop", "adamw", "muon"]),
        ({"optimizer_config": {"type": "sgd", "momentum": 0.9}}, 400, ["momentum", "'type'", "step"]),
        ({"model_seq_id": -1}, 422, ["model_seq_id"]),
        ({"session_id": "no-such-session"}, 404, ["no-such-session"]),
    ],
    ids=[
        "model",
        "rank",
        "seed",
        "nothing to train",
        "unknown field",
        "dimuon",
        "optimizer",
        "its field",
        "number",
        "session",
    ],
)
async def test_run_that_cannot_be_is_refused(ada, fields, status, words):
    body = {"session_id": await ada.session(), "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    response = await ada.post("create_model", body | fields)
    assert response.status_code == status, response.text
    assert all(word in response.json()["detail"] for word in words)


async def test_json_and_protobuf_and_zstd_give_the_same(ada):
    run_id = await ada.run()
    expected = await ada.train(run_id, 1)
    old = await ada.ok("forward_backward", {"forward_backward_input": JSON_INPUT, "model_id": run_id, "seq_id": 2})
    in_json = await ada.result(old)
    assert in_json["loss_fn_outputs"][0]["logprobs"].keys() == {"data", "dtype", "shape"}
    np.testing.assert_allclose(
        in_json["loss_fn_outputs"][0]["logprobs"]["data"], expected.loss_fn_outputs[0]["logprobs"].to_numpy(), rtol=1e-6
    )
    assert in_json["metrics"]["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    body = compress_zstd(encode_training_request(types.TrainingRequest(run_id, 3, [datum()], "cross_entropy")))
    headers = {"content-type": PROTOBUF, "content-encoding": "zstd"}
    response = await ada.post("forward_backward", content=body, headers=headers)
    assert (await ada.result(response.json()))["metrics"] == in_json["metrics"]
    forward = await ada.ok("forward", {"forward_input": JSON_INPUT, "model_id": run_id, "seq_id": 4})
    assert (await ada.result(forward))["metrics"]["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)


@pytest.mark.parametrize("name", ["adam_params", "optimizer_params", "optim_params"])
async def test_optimizer_step_changes_the_run(ada, name):
    run_id = await ada.run()
    first = await ada.train(run_id, 1)
    params = {"learning_rate": 0.05}
    if name == "optimizer_params":
        params = {"learning_rate": 0.05, "beta1": 0.9}
    promise = await ada.ok("optim_step", {"model_id": run_id, "seq_id": 2, name: params})
    metrics = (await ada.result(promise))["metrics"]
    assert metrics["optimizer_step"] == 1
    assert metrics["grad_norm"] > 0
    assert (await ada.train(run_id, 3, forward_only=True)).loss < first.loss


async def test_forward_leaves_no_gradient(ada):
    run_id = await ada.run()
    await ada.train(run_id, 1, forward_only=True)
    assert (await ada.step(run_id, 2))["metrics"]["grad_norm"] == 0


async def test_chunks_come_last_first_and_retries_get_the_same_future(ada):
    run_id = await ada.run()
    requests = [types.TrainingRequest(run_id, number, [datum()], "cross_entropy") for number in (3, 2, 1)]
    promises = [await ada.submit(request) for request in requests]
    assert [await ada.submit(request) for request in requests] == promises
    losses = [(await ada.result(promise))["metrics"]["loss:sum"] for promise in promises]
    assert losses == [losses[0]] * 3


REFUSED = {
    "unknown loss": ({"loss_fn": "no_such_loss"}, 400, ["no_such_loss", "cross_entropy", "gspo"]),
    "stable_reinforce": ({"loss_fn": "stable_reinforce"}, 400, ["stable_reinforce", "not published"]),
    "no data": ({"data": []}, 400, ["data"]),
    "another's loss": ({"loss_fn": "custom", "loss_fn_config": {"loss_id": "x:loss:0"}}, 404, ["x:loss:0"]),
}


@pytest.mark.parametrize(("fields", "status", "words"), REFUSED.values(), ids=REFUSED)
async def test_refused_operation_has_used_its_number(ada, fields, status, words):
    run_id = await ada.run()
    values = {"data": [datum()], "loss_fn": "cross_entropy"} | fields
    body = encode_training_request(types.TrainingRequest(run_id, 1, **values))
    response = await ada.post("forward_backward", content=body, headers={"content-type": PROTOBUF})
    assert response.status_code == status, response.text
    assert all(word in response.json()["detail"] for word in words)
    assert (await asyncio.wait_for(ada.train(run_id, 2), 20)).metrics["loss:sum"] > 0


BAD_BODIES = {
    "optim_step": ("optim_step", {"adam_params": {"learning_rate": "fast"}}, 422, "learning_rate"),
    "optim_step of another optimizer": (
        "optim_step",
        {"optimizer_params": {"type": "dimuon", "learning_rate": 1}},
        400,
        "dimuon",
    ),
    "optim_step of another family": ("optim_step", {"optimizer_params": {"type": "lion"}}, 400, "adamw"),
    "optim_step with an unknown field": ("optim_step", {"adam_params": {"momentum": 1}}, 422, "momentum"),
    "save with a bad name": ("save_weights", {"path": "../x"}, 400, "../x"),
    "save with a short life": ("save_weights", {"path": "a", "ttl_seconds": 60}, 400, "ttl_seconds"),
    "sampler save without anything": ("save_weights_for_sampler", {}, 400, "sampling_session_seq_id"),
    "sampler save with both": ("save_weights_for_sampler", {"path": "a", "sampling_session_seq_id": 1}, 400, "path"),
    "export without a name": ("save_weights_external", {}, 422, "path"),
    "load of nothing": ("load_weights", {"path": "tinker://x:train:0/weights/a", "optimizer": False}, 404, "x:train:0"),
    "load of no path": ("load_weights", {"path": "file:///etc/passwd", "optimizer": False}, 400, "tinker://"),
    "load with a base model": ("load_weights", {"path": "x", "optimizer": False, "base_model": "m"}, 400, "base_model"),
    "forward_backward in JSON": (
        "forward_backward",
        {"forward_backward_input": {"data": 3, "loss_fn": "ppo"}},
        400,
        "data",
    ),
}


@pytest.mark.parametrize(("path", "fields", "status", "word"), BAD_BODIES.values(), ids=BAD_BODIES)
async def test_bad_body_has_used_its_number(ada, path, fields, status, word):
    run_id = await ada.run()
    response = await ada.post(path, {"model_id": run_id, "seq_id": 1, **fields})
    assert response.status_code == status, response.text
    assert word in response.json()["detail"]
    assert (await asyncio.wait_for(ada.train(run_id, 2), 20)).metrics["loss:sum"] > 0


@pytest.mark.parametrize("seq_id", [None, 0, -1, 2**31, 2**70, "one"], ids=str)
async def test_number_must_be_one(ada, seq_id):
    run_id = await ada.run()
    response = await ada.post("optim_step", {"model_id": run_id, "seq_id": seq_id, "adam_params": {}})
    assert response.status_code in (400, 422), response.text
    assert "seq_id" in response.json()["detail"]


async def test_images_and_audio_are_refused_by_name(ada):
    run_id = await ada.run()
    chunks = [types.EncodedTextChunk(tokens=TOKENS), types.ImageChunk(data=b"x", format="png", expected_tokens=2)]
    targets = types.TensorData.from_numpy(np.zeros(7, np.int64))
    image = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": targets})
    body = encode_training_request(types.TrainingRequest(run_id, 1, [image], "cross_entropy"))
    response = await ada.post("forward_backward", content=body, headers={"content-type": PROTOBUF})
    assert response.status_code == 400
    assert "data[0].model_input.chunks[1]" in response.json()["detail"]
    assert "'image'" in response.json()["detail"]


async def test_provenance_spans_are_accepted(ada):
    run_id = await ada.run()
    plain = datum()
    spans = [types.SampledProvenanceSpan(sequence_id="s", offset=0, length=5)]
    told = plain.with_provenance(model_input=spans, loss_fn_inputs=spans)
    assert (await ada.train(run_id, 1, data=[told])).loss == (await ada.train(run_id, 2, data=[plain])).loss


async def test_wrong_tokens_fail_the_operation_and_not_the_run(ada):
    run_id = await ada.run()
    promise = await ada.submit(types.TrainingRequest(run_id, 1, [datum([5, 6, 70_000])], "cross_entropy"))
    failure = await ada.failure(promise)
    assert failure["category"] == "user"
    assert "70000" in failure["error"]
    assert (await ada.train(run_id, 2)).metrics["loss:sum"] > 0


async def test_content_type_must_be_known(ada):
    response = await ada.post("forward_backward", content=b"x", headers={"content-type": "text/plain"})
    assert response.status_code == 400
    assert "text/plain" in response.json()["detail"]


async def test_uploaded_loss_equals_the_built_in_one(ada):
    session_id = await ada.session()
    run_id = await ada.run(session_id)
    promise = await ada.ok("create_custom_loss", {"session_id": session_id, "custom_loss_seq_id": 0, **LOSS})
    loss_id = (await ada.result(promise))["loss_id"]
    expected = await ada.train(run_id, 1)
    custom = await ada.train(run_id, 2, loss_fn="custom", loss_fn_config={"loss_id": loss_id})
    assert custom.loss == pytest.approx(expected.loss, rel=1e-6)
    assert custom.metrics["custom/likelihood:sum"] == pytest.approx(-expected.loss, rel=1e-6)
    other = await ada.run()
    body = types.TrainingRequest(other, 1, [datum()], "custom", {"loss_id": loss_id})
    response = await ada.post(
        "forward_backward", content=encode_training_request(body), headers={"content-type": PROTOBUF}
    )
    assert response.status_code == 404, "a loss belongs to its session"


async def test_large_loss_is_refused(ada):
    body = {"session_id": "s", "custom_loss_seq_id": 0, **LOSS, "name": "x" * 2_000_000}
    response = await ada.post("create_custom_loss", body)
    assert response.status_code == 413
    assert "1048576" in response.json()["detail"]


async def test_unloaded_run_comes_back(ada):
    run_id = await ada.run()
    before = await ada.train(run_id, 1)
    assert await ada.result(await ada.ok("unload_model", {"model_id": run_id})) == {
        "type": "unload_model",
        "model_id": run_id,
    }
    assert (await ada.train(run_id, 2)).loss == before.loss
    assert (await ada.step(run_id, 3))["metrics"]["grad_norm"] > 0
