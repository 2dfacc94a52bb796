"""Saving and loading weights, and who may load them."""

import numpy as np
import pytest

from .conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def trained(client, **fields):
    run_id = await client.run(**fields)
    await client.train(run_id, 1)
    await client.step(run_id, 2)
    return run_id


async def logprobs(client, run_id, seq_id):
    found = (await client.train(run_id, seq_id, forward_only=True)).loss_fn_outputs[0]["logprobs"]
    return found.to_numpy()


async def test_saved_run_is_loaded_into_another(ada):
    run_id = await trained(ada)
    path = await ada.save(run_id, 3, "step-1", user_metadata={"epoch": "1"}, ttl_seconds=7200)
    assert path == f"tinker://{run_id}/weights/step-1"
    other = await ada.run()
    body = {"model_id": other, "seq_id": 1, "path": path, "optimizer": True, "type": "load_weights"}
    assert await ada.result(await ada.ok("load_weights", body)) == {
        "type": "load_weights",
        "path": path,
        "model_id": other,
    }
    np.testing.assert_array_equal(await logprobs(ada, other, 2), await logprobs(ada, run_id, 4))
    assert (await ada.step(other, 3))["metrics"]["optimizer_step"] == 2, "the optimizer came along"


async def test_run_is_created_from_weights(ada):
    path = await ada.save(await trained(ada), 3, "base")
    session_id = await ada.session()
    body = {
        "session_id": session_id,
        "model_seq_id": 5,
        "path": path,
        "optimizer": False,
        "user_metadata": {"from": 1},
        "optimizer_config": {"type": "adamw"},
        "base_model": MODEL,
    }
    promise = await ada.ok("load_weights", body)
    run_id = f"{session_id}:train:5"
    assert (await ada.result(promise))["model_id"] == run_id
    assert await ada.ok("load_weights", body) == promise
    assert (await ada.fetch(f"training_runs/{run_id}"))["user_metadata"] == {"from": "1"}
    await ada.train(run_id, 1)
    assert (await ada.step(run_id, 2))["metrics"]["optimizer_step"] == 1, "the optimizer began anew"


async def test_names_cannot_be_taken_twice_unless_overwritten(ada):
    run_id = await trained(ada)
    await ada.save(run_id, 3, "same", user_metadata={"a": "1"})
    await ada.save(run_id, 4, "same", kind="save_weights_for_sampler")  # another kind has names of its own
    failure = await ada.failure(await ada.ok("save_weights", {"model_id": run_id, "seq_id": 5, "path": "same"}))
    assert failure["category"] == "user"
    assert "'same'" in failure["error"]
    await ada.save(run_id, 6, "same", overwrite=True)
    [kept] = [found for found in await listed(ada, run_id) if found["checkpoint_type"] == "training"]
    assert kept["user_metadata"] is None


async def listed(client, run_id):
    return (await client.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"]


async def test_save_without_a_name_is_called_by_its_number(ada):
    run_id = await ada.run()
    promise = await ada.ok("save_weights", {"model_id": run_id, "seq_id": 1})
    assert (await ada.result(promise))["path"] == f"tinker://{run_id}/weights/000001"


async def test_sampler_weights_hold_no_optimizer(ada):
    run_id = await trained(ada)
    path = await ada.save(run_id, 3, "s", kind="save_weights_for_sampler")
    assert path == f"tinker://{run_id}/sampler_weights/s"
    response = await ada.post("load_weights", {"model_id": run_id, "seq_id": 4, "path": path, "optimizer": True})
    assert response.status_code == 400
    assert "optimizer" in response.json()["detail"]
    await ada.result(await ada.ok("load_weights", {"model_id": run_id, "seq_id": 5, "path": path, "optimizer": False}))


async def test_ephemeral_save_gives_a_sampler_of_that_moment(ada):
    session_id = await ada.session()
    run_id = await trained(ada, session_id=session_id)
    body = {"model_id": run_id, "seq_id": 3, "sampling_session_seq_id": 0}
    promise = await ada.ok("save_weights_for_sampler", body)
    retried = await ada.ok("save_weights_for_sampler", body | {"sampling_session_seq_id": 1})
    assert retried == promise, "a retry carries a new number for the session, and gets the first one"
    sampler_id = (await ada.result(promise))["sampling_session_id"]
    assert sampler_id == f"{session_id}:sample:0"
    before = await ada.sample(sampler_id, 0, prompt_logprobs=True)
    expected = await logprobs(ada, run_id, 4)
    np.testing.assert_allclose(before.prompt_logprobs_np[1:], expected[:-1], atol=1e-5)
    await ada.train(run_id, 5)
    await ada.step(run_id, 6, learning_rate=0.1)
    after = await ada.sample(sampler_id, 1, prompt_logprobs=True)
    np.testing.assert_array_equal(before.prompt_logprobs_np, after.prompt_logprobs_np)
    assert before.sequences[0].tokens == after.sequences[0].tokens


async def test_weights_info_says_what_a_new_run_needs(ada):
    session_id = await ada.session()
    lora = {"rank": 2, "train_unembed": False, "train_mlp": True, "train_attn": True}
    run_id = await ada.run(session_id, lora_config=lora)
    path = await ada.save(run_id, 1, "w")
    assert await ada.ok("weights_info", {"tinker_path": path}) == {
        "base_model": MODEL,
        "optimizer_config": {"type": "adamw"},
        "is_lora": True,
        "lora_rank": 2,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
        "method": "lora",
        "train_embed": False,
        "train_norms": False,
        "use_rslora": False,
        "use_dora": False,
    }


async def test_weights_of_another_shape_are_refused(ada):
    path = await ada.save(await ada.run(rank=2), 1, "w")
    run_id = await ada.run(rank=4)
    response = await ada.post("load_weights", {"model_id": run_id, "seq_id": 1, "path": path, "optimizer": False})
    assert response.status_code == 400
    assert "rank" in response.json()["detail"]
    await ada.train(run_id, 2)


async def test_others_load_published_weights_or_with_a_token(server, ada, bob):
    path = await ada.save(await trained(ada), 3, "shared")
    mine = await bob.run()
    body = {"model_id": mine, "path": path, "optimizer": False}
    assert (await bob.post("load_weights", body | {"seq_id": 1})).status_code == 404
    token = {"weights_access_token": server.secrets["ada"]}
    await bob.result(await bob.ok("load_weights", body | {"seq_id": 2} | token))
    wrong = {"weights_access_token": "tml-" + "x" * 40}
    assert (await bob.post("load_weights", body | {"seq_id": 3} | wrong)).status_code == 401
    info = await bob.post("weights_info", {"tinker_path": path})
    assert info.status_code == 404
    as_ada = await bob.ok("weights_info", {"tinker_path": path}, headers={"x-api-key": server.secrets["ada"]})
    assert as_ada["lora_rank"] == 4
    checkpoint = path.removeprefix("tinker://").replace("/weights/", "/checkpoints/weights/")
    assert (await ada.post(f"training_runs/{checkpoint}/publish")).status_code == 204
    await bob.result(await bob.ok("load_weights", body | {"seq_id": 4}))
    assert (await bob.ok("weights_info", {"tinker_path": path}))["lora_rank"] == 4
    assert (await ada.send("DELETE", f"training_runs/{checkpoint}/publish")).status_code == 204
    assert (await bob.post("load_weights", body | {"seq_id": 5})).status_code == 404
