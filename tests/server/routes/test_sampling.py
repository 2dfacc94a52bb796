"""Sampling sessions and samples."""

import numpy as np
import pytest

from lorimer.types.compatibility import PROTOBUF

from .conftest import MODEL, TOKENS, sample_body

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_sampling_session_is_made_once(ada):
    session_id = await ada.session()
    assert await ada.sampler(session_id, 4) == f"{session_id}:sample:4"
    assert await ada.sampler(session_id, 4) == f"{session_id}:sample:4"
    described = await ada.fetch(f"samplers/{session_id}:sample:4")
    assert described == {
        "sampler_id": f"{session_id}:sample:4",
        "base_model": MODEL,
        "model_path": None,
        "model_id": None,
    }


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
async def test_checkpoints_of_both_kinds_are_sampled(ada, kind):
    session_id = await ada.session()
    run_id = await ada.run(session_id)
    await ada.train(run_id, 1)
    await ada.step(run_id, 2, learning_rate=0.1)
    path = await ada.save(run_id, 3, "s", kind=kind)
    sampler_id = await ada.sampler(session_id, model_path=path, base_model=MODEL)
    assert (await ada.fetch(f"samplers/{sampler_id}"))["model_path"] == path
    found = await ada.sample(sampler_id, prompt_logprobs=True)
    expected = (await ada.train(run_id, 4, forward_only=True)).loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(found.prompt_logprobs_np[1:], expected[:-1], atol=1e-5)


async def test_sample_is_the_same_by_seed_and_carries_what_was_asked(ada):
    sampler_id = await ada.sampler(await ada.session())
    asked = {
        "num_samples": 3,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 2,
        "prompt_alt_tokens_k": 2,
        "target_prompt_logprobs": {"data": [1, -1, 2, 3], "dtype": "int64", "shape": [4, 1]},
        "sampling_params": {"stop": []},
    }
    first, second = await ada.sample(sampler_id, 0, **asked), await ada.sample(sampler_id, 1, **asked)
    assert [sequence.tokens for sequence in first.sequences] == [sequence.tokens for sequence in second.sequences]
    assert [len(sequence.tokens) for sequence in first.sequences] == [4, 4, 4]
    assert {sequence.stop_reason for sequence in first.sequences} == {"length"}
    assert first.sequences[0].topk_logprobs_np.token_ids.shape == (4, 2)
    assert np.isnan(first.prompt_logprobs_np[0])
    assert len(first.prompt_logprobs_np) == len(TOKENS)
    assert first.target_prompt_logprobs.to_numpy().shape == (4, 1)
    assert first.target_prompt_logprobs.to_numpy()[1, 0] == 0
    assert first.prompt_alt_tokens.tokens.to_numpy().shape == (4, 2)


async def test_sample_in_json_for_old_releases(ada):
    old = ada.release("0.7.0")
    sampler_id = await old.sampler(await old.session())
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": TOKENS}]},
        "sampling_params": {"max_tokens": 3, "seed": None, "stop": ["x"]},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 1,
        "base_model": None,
    }
    found = await old.result(await old.ok("asample", body))
    assert found["type"] == "sample"
    assert len(found["sequences"]) == 2
    assert all(len(sequence["tokens"]) == len(sequence["logprobs"]) for sequence in found["sequences"])
    assert found["prompt_logprobs"][0] is None
    assert all(isinstance(value, float) for value in found["prompt_logprobs"][1:])
    assert found["topk_prompt_logprobs"][0] is None
    assert len(found["topk_prompt_logprobs"][1]) == 1


async def test_retry_of_a_sample_gets_the_same_future(ada):
    sampler_id = await ada.sampler(await ada.session())
    body = sample_body(sampler_id, 10**18, num_samples=2)
    promise = await ada.ok("asample", body)
    assert await ada.ok("asample", body) == promise
    assert len(promise["sample_sequence_ids"]) == 2
    response = await ada.poll(promise["request_id"], f"{PROTOBUF}, application/json")
    assert response.headers["content-type"] == PROTOBUF


async def test_clients_of_a_sampling_session_get_numbers_of_their_own(ada):
    sampler_id = await ada.sampler(await ada.session())
    joined = [await ada.ok("join_sampling_session", {"sampling_session_id": sampler_id}) for _ in range(3)]
    assert [answer["client_counter"] for answer in joined] == [1, 2, 3]


REFUSED = {
    "record_stability_info": ({"record_stability_info": True}, 400, ["record_stability_info"]),
    "image": ({"prompt": {"chunks": [{"data": "eA==", "format": "png"}]}}, 400, ["'image'", "prompt.chunks[0]"]),
    "asset pointer": (
        {"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "http://x", "format": "png"}]}},
        400,
        ["image_asset_pointer"],
    ),
    "true as a token": ({"prompt": {"chunks": [{"tokens": [5, True]}]}}, 422, ["tokens[1]", "True"]),
    "text as a token": ({"prompt": {"chunks": [{"tokens": ["1"]}]}}, 422, ["tokens[0]", "'1'"]),
    "fraction as a token": ({"prompt": {"chunks": [{"tokens": [1.0]}]}}, 422, ["tokens[0]", "1.0"]),
    "num_samples": ({"num_samples": 5000}, 413, ["5000", "1024"]),
    "no samples": ({"num_samples": 0}, 400, ["num_samples"]),
    "max_tokens": ({"sampling_params": {"max_tokens": 2**31}}, 413, ["max_tokens", "131072"]),
    "stops": ({"sampling_params": {"stop": ["x"] * 100}}, 413, ["100", "64"]),
    "long stop": ({"sampling_params": {"stop": "x" * 2000}}, 413, ["2000", "1024"]),
    "unknown parameter": ({"sampling_params": {"min_p": 0.1}}, 422, ["min_p"]),
    "temperature": ({"sampling_params": {"temperature": "hot"}}, 422, ["temperature"]),
    "unknown field": ({"logit_bias": {}}, 422, ["logit_bias"]),
    "addressing": ({"base_model": MODEL}, 400, ["create_sampling_session"]),
    "no session": ({"sampling_session_id": None}, 400, ["sampling_session_id"]),
    "unknown session": ({"sampling_session_id": "no-such"}, 404, ["no-such"]),
    "seq_id": ({"seq_id": 2**63}, 422, ["seq_id"]),
}


@pytest.mark.parametrize(("fields", "status", "words"), REFUSED.values(), ids=REFUSED)
async def test_sample_that_cannot_be_is_refused(ada, fields, status, words):
    sampler_id = await ada.sampler(await ada.session())
    body = sample_body(sampler_id)
    body["sampling_params"] |= fields.get("sampling_params", {})
    response = await ada.post(
        "asample", body | {key: value for key, value in fields.items() if key != "sampling_params"}
    )
    assert response.status_code == status, response.text
    assert all(word in response.json()["detail"] for word in words), response.text


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": {"chunks": [{"tokens": [5, 99_999]}]}}, "99999"),
        ({"sampling_params": {"max_tokens": 600}}, "512"),
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 9}, "prompt_logprobs_last_n"),
    ],
    ids=["token out of range", "beyond the context", "empty prompt", "last n"],
)
async def test_sample_that_the_model_refuses_fails(ada, fields, word):
    sampler_id = await ada.sampler(await ada.session())
    response = await ada.post("asample", sample_body(sampler_id, **fields))
    if response.status_code != 200:
        assert response.status_code == 400
        assert word in response.json()["detail"]
        return
    failure = await ada.failure(response.json())
    assert failure["category"] == "user"
    assert word in failure["error"]


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({}, 400, "base_model"),
        ({"base_model": "no/such"}, 404, MODEL),
        ({"model_path": "tinker://x:train:0/weights/a"}, 404, "x:train:0"),
        ({"model_path": "tinker://x/../weights/a"}, 400, "tinker://"),
        ({"model_path": "/etc/passwd"}, 400, "tinker://"),
        ({"base_model": MODEL, "sampling_session_seq_id": -1}, 422, "sampling_session_seq_id"),
    ],
    ids=["neither", "unknown model", "unknown path", "no path", "file", "number"],
)
async def test_sampling_session_of_nothing_is_refused(ada, fields, status, word):
    body = {"session_id": await ada.session(), "sampling_session_seq_id": 0, **fields}
    response = await ada.post("create_sampling_session", body)
    assert response.status_code == status, response.text
    assert word in response.json()["detail"]


async def test_weights_go_with_the_base_model_they_were_trained_on(ada):
    session_id = await ada.session()
    path = await ada.save(await ada.run(session_id), 1, "w")
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path, "base_model": "other/model"}
    response = await ada.post("create_sampling_session", body)
    assert response.status_code == 400
    assert "other/model" in response.json()["detail"]


async def test_sampler_outlives_its_checkpoint(ada):
    session_id = await ada.session()
    run_id = await ada.run(session_id)
    path = await ada.save(run_id, 1, "gone", kind="save_weights_for_sampler")
    sampler_id = await ada.sampler(session_id, model_path=path)
    before = await ada.sample(sampler_id, 0)
    deleted = await ada.send("DELETE", f"training_runs/{run_id}/checkpoints/sampler_weights/gone")
    assert deleted.status_code == 204
    assert (await ada.sample(sampler_id, 1)).sequences[0].tokens == before.sequences[0].tokens
