"""Attacks of a user with a key, over HTTP: names, paths, sizes, floods of retries, other users' prompts.

What is asked without a key is in ``test_auth.py``, bodies that make no sense are in ``test_hostile.py``.
"""

import asyncio
import math
from urllib.parse import quote

import numpy as np
import pytest

from lorimer import types
from lorimer.types.compatibility import PROTOBUF
from lorimer.types.compression import compress_zstd
from lorimer.types.encoding import encode_training_request

from .conftest import MODEL, TOKENS, datum, sample_body

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAMES = {
    "parent": "../x",
    "parent of Windows": "..\\x",
    "encoded": "%2e%2e%2fx",
    "twice encoded": "%252e%252e%252fx",
    "in the middle": "a/../../b",
    "absolute": "/etc/passwd",
    "drive": "C:\\x",
    "NUL": "a\0b",
    "long": "x" * 5000,
    "dot": ".",
    "dots": "..",
    "right to left": "a\u202eb",
    "zero width": "a\u200bb",
    "composed": "caf\u00e9",
    "decomposed": "cafe\u0301",
    "line break": "a\r\nSet-Cookie: b",
    "option": "-rf",
    "shell": "a;rm -rf b",
    "markup": "<script>",
}
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")


async def test_names_of_checkpoints_are_safe_everywhere(server, ada):
    """In what saves, and in every address that has a name in it; and no file is made that is called so."""
    run_id = await ada.run()
    seen = {}
    seq_id = 0
    for label, name in NAMES.items():
        for path in SAVES:
            seq_id += 1
            response = await ada.post(path, {"model_id": run_id, "seq_id": seq_id, "path": name})
            if response.status_code != 400 or "1 to 128" not in response.json()["detail"]:
                seen[label, path] = (response.status_code, response.text)
        place = f"training_runs/{run_id}/checkpoints/weights/{quote(name, safe='')}"
        for method, rest in (("DELETE", ""), ("POST", "/publish"), ("GET", "/archive"), ("PUT", "/ttl")):
            response = await ada.send(method, place + rest, {"ttl_seconds": 3600} if method == "PUT" else None)
            if response.status_code not in (400, 404, 405):
                seen[label, method] = (response.status_code, response.text)
    assert seen == {}
    data = server.context.directory.path
    assert not [path for path in data.rglob("*") if path.name in NAMES.values()]
    assert not (data / "x").exists() and not (data.parent / "x").exists() and not (data / "weights" / "x").exists()
    assert (await ada.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"] == []


async def test_a_reserved_name_of_another_system_is_only_a_name(server, ada):
    run_id = await ada.run()
    path = await ada.save(run_id, 1, "CON")
    assert path.endswith("/weights/CON")
    assert not [found for found in server.context.directory.path.rglob("*") if found.name == "CON"]


PATHS = (
    "tinker://../weights/x",
    "tinker://run/weights/..",
    "tinker://run/weights/a/../../b",
    "tinker://user:secret@run/weights/x",
    "tinker://run:80/weights/x?y=z#f",
    "tinker://run/weights/x/",
    "TINKER://run/weights/x",
    "file:///etc/passwd",
    "http://169.254.169.254/latest/meta-data",
    "//run/weights/x",
    "tinker://run/weights/" + "x" * 100_000,
    "tinker://run/weights/a\0b",
)


async def test_paths_lead_nowhere_else(ada):
    run_id = await ada.run()
    session_id = await ada.session()
    unexpected = {}
    for seq_id, path in enumerate(PATHS, start=1):
        calls = {
            "load_weights": {"model_id": run_id, "seq_id": seq_id, "path": path, "optimizer": False},
            "weights_info": {"tinker_path": path},
            "copy_weights": {"source_path": path, "destination_project_id": "p"},
            "create_sampling_session": {
                "session_id": session_id,
                "sampling_session_seq_id": seq_id,
                "model_path": path,
            },
        }
        for name, body in calls.items():
            response = await ada.post(name, body)
            if response.status_code not in (400, 404, 413):
                unexpected[name, path[:50]] = (response.status_code, response.text[:200])
    assert unexpected == {}


MODELS = ["--trust-remote-code", "; rm -rf x", "$(id)", "../../etc", "http://127.0.0.1:1/model", "lorimer/tiny\n", ""]


@pytest.mark.parametrize("name", MODELS, ids=repr)
async def test_only_served_models_are_opened(ada, name):
    session_id = await ada.session()
    create = {"session_id": session_id, "model_seq_id": 0, "base_model": name, "lora_config": {"rank": 4}}
    sample = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": name}
    for path, body in (("create_model", create), ("create_sampling_session", sample)):
        response = await ada.post(path, body)
        assert response.status_code == 404, response.text
        assert MODEL in response.json()["detail"], "what is accepted is named"


def long_datum(length):
    return datum([10] * length)


TOO_MUCH = {
    "tokens of a datum": ({"data": [long_datum(131_073)]}, "max_tokens_per_datum"),
    "datums": ({"data": [datum([10, 20])] * 4097}, "max_datums_per_operation"),
    "tokens in all": ({"data": [long_datum(131_072)] * 33}, "max_tokens_per_operation"),
}


@pytest.mark.parametrize(("fields", "setting"), TOO_MUCH.values(), ids=TOO_MUCH)
async def test_too_much_to_train_is_refused_before_any_work(ada, fields, setting):
    run_id = await ada.run()
    body = encode_training_request(types.TrainingRequest(run_id, 1, **({"loss_fn": "cross_entropy"} | fields)))
    headers = {"content-type": PROTOBUF, "content-encoding": "zstd"}
    response = await ada.post("forward_backward", content=compress_zstd(body), headers=headers)
    assert (response.status_code, response.json()["code"]) == (413, "too_large")
    assert setting in response.json()["detail"]
    assert (await ada.train(run_id, 2)).metrics["loss:sum"] > 0


CHUNK = {"type": "encoded_text", "tokens": [10] * 131_073}
TOO_MANY = {
    "prompt": ({"prompt": {"chunks": [CHUNK]}}, 413, "max_tokens_per_datum"),
    "samples": ({"num_samples": 10**6}, 413, "max_samples_per_request"),
    "new tokens": ({"sampling_params": {"max_tokens": 2**31}}, 413, "max_sample_tokens"),
    "stops": ({"sampling_params": {"stop": ["a"] * 10_000}}, 413, "max_stop_sequences"),
    "long stop": ({"sampling_params": {"stop": "a" * 10_000}}, 413, "max_stop_chars"),
    "seed": ({"sampling_params": {"seed": 2**70}}, 400, "seed"),
    "no samples": ({"num_samples": 0}, 400, "num_samples"),
}


@pytest.mark.parametrize(("fields", "status", "words"), TOO_MANY.values(), ids=TOO_MANY)
async def test_too_much_to_sample_is_refused_before_any_work(ada, fields, status, words):
    sampler_id = await ada.sampler(await ada.session())
    response = await ada.post("asample", sample_body(sampler_id, **fields))
    if response.status_code == 200:
        failure = await ada.failure(response.json())
        assert failure["category"] == "user" and words in failure["error"]
        return
    assert response.status_code in (status, 422), response.text
    assert words in response.json()["detail"]


async def test_numbers_that_are_none_are_refused_with_their_place(ada):
    run_id = await ada.run()
    weights = np.ones(len(TOKENS), np.float32)
    for seq_id, value in enumerate((math.nan, math.inf, -math.inf), start=1):
        weights[3] = value
        bad = datum(TOKENS, target_tokens=np.array([*TOKENS[1:], 60], np.int64), weights=weights)
        promise = await ada.submit(types.TrainingRequest(run_id, seq_id, [datum(), bad], "cross_entropy"))
        failure = await ada.failure(promise)
        assert failure["category"] == "user"
        assert "data[1].loss_fn_inputs['weights'][3]" in failure["error"], failure
    assert (await ada.step(run_id, 4))["metrics"]["grad_norm"] == 0, "nothing of it was added"


async def test_a_step_that_explodes_harms_nobody_else(ada, bob):
    run_id, other = await ada.run(), await bob.run()
    before = await bob.train(other, 1, forward_only=True)
    await ada.train(run_id, 1)
    await ada.step(run_id, 2, learning_rate=1e38)
    promise = await ada.submit(types.TrainingRequest(run_id, 3, [datum()], "cross_entropy"))
    answer = (await ada.poll(promise["request_id"])).json()
    assert "error" not in answer or answer["category"] == "user", answer
    after = await bob.train(other, 2, forward_only=True)
    np.testing.assert_array_equal(
        before.loss_fn_outputs[0]["logprobs"].to_numpy(), after.loss_fn_outputs[0]["logprobs"].to_numpy()
    )


async def test_ids_cannot_be_guessed(ada):
    """Each has 128 random bits, and no two look alike."""
    sessions = [await ada.session() for _ in range(20)]
    run_id = await ada.run(sessions[0])
    futures = [
        (await ada.submit(types.TrainingRequest(run_id, seq_id, [datum()], "cross_entropy")))["request_id"]
        for seq_id in range(1, 21)
    ]
    for ids in (sessions, futures):
        assert all(len(found) == 32 and int(found, 16) >= 0 for found in ids)
        for place in range(32):
            assert len({found[place] for found in ids}) > 3, "a digit that hardly changes"


async def test_a_hundred_copies_of_a_request_are_one(ada):
    run_id = await ada.run()
    request = types.TrainingRequest(run_id, 1, [datum()], "cross_entropy")
    promises = await asyncio.gather(*(ada.submit(request) for _ in range(100)))
    assert len({promise["request_id"] for promise in promises}) == 1
    once = (await ada.result(promises[0]))["metrics"]
    body = {"model_id": run_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    steps = await asyncio.gather(*(ada.ok("optim_step", body) for _ in range(100)))
    assert len({step["request_id"] for step in steps}) == 1
    assert (await ada.result(steps[0]))["metrics"]["optimizer_step"] == 1
    alone = await ada.run()
    assert (await ada.train(alone, 1)).metrics == once, "and was added to the gradient once"


async def test_other_content_under_a_used_number_is_refused(ada):
    run_id = await ada.run()
    await ada.train(run_id, 1)
    body = encode_training_request(types.TrainingRequest(run_id, 1, [datum([10, 20])], "cross_entropy"))
    response = await ada.post("forward_backward", content=body, headers={"content-type": PROTOBUF})
    assert response.status_code == 400, "and not 409, which the official SDK sends again for five minutes"
    assert "already submitted with other content" in response.json()["detail"]


async def test_prompts_of_others_are_not_found_in_the_cache(ada, bob):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [11, 12, 13, 14] * 40}]}
    ours = await ada.sampler(await ada.session())
    theirs = await bob.sampler(await bob.session())
    first = await ada.sample(ours, 0, prompt=prompt)
    again = await ada.sample(ours, 1, prompt=prompt)
    others = await bob.sample(theirs, 0, prompt=prompt)
    assert again.prompt_cache_hit_tokens > first.prompt_cache_hit_tokens
    assert others.prompt_cache_hit_tokens == 0


async def test_a_session_has_so_many_runs(server, ada):
    session_id = await ada.session()
    path = await ada.save(await ada.run(session_id), 1, "kept")
    limits, settings = server.context.scheduler.limits, server.context.settings
    most = limits.max_runs_per_session
    create = {"session_id": session_id, "base_model": MODEL, "lora_config": {"rank": 4}}
    for holder in (limits, settings):
        object.__setattr__(holder, "max_runs_per_session", 2)
    try:
        await ada.run(session_id, 1)
        load = {"session_id": session_id, "path": path, "optimizer": False, "model_seq_id": 2}
        copy = {"session_id": session_id, "source_path": path, "model_seq_id": 2}
        for name, body in (
            ("create_model", create | {"model_seq_id": 2}),
            ("load_weights", load),
            ("copy_weights", copy),
        ):
            response = await ada.post(name, body)
            assert (response.status_code, response.json()["code"]) == (413, "too_large"), response.text
            assert "has 2 training runs; at most 2 is accepted (max_runs_per_session)" in response.json()["detail"]
        assert (await ada.ok("create_model", create | {"model_seq_id": 1}))["model_id"] == f"{session_id}:train:1"
        await ada.run(await ada.session())
    finally:
        for holder in (limits, settings):
            object.__setattr__(holder, "max_runs_per_session", most)
    await ada.run(session_id, 2)
