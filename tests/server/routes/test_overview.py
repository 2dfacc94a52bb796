"""How the server stands, as its users see it: models and their rates, what waits, what went wrong."""

from datetime import UTC, datetime

import pytest

from lorimer import __version__, types
from lorimer.types.compatibility import PROTOBUF

from .conftest import MODEL, datum

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_callers_learn_who_they_are(ada, server):
    found = await ada.fetch("whoami")
    assert found == {"user_id": ada.user_id, "name": "ada", "needs_key": True, "version": __version__}
    wrong = await ada.http.get("/api/v1/whoami", headers={"x-api-key": "tml-nobody"})
    assert (wrong.status_code, wrong.json()["code"]) == (401, "unauthorized")


async def test_a_server_without_keys_says_so(start):
    async with start() as running:
        found = (await running.http.get("/api/v1/whoami")).json()
        assert (found["name"], found["needs_key"]) == ("local", False)


async def test_models_have_rates_and_memory(ada):
    session_id = await ada.session()
    run_id = await ada.run(session_id)
    await ada.train(run_id, 1)
    await ada.sample(await ada.sampler(session_id))
    found = await ada.fetch("overview")
    (model,) = found["models"]
    assert (model["name"], model["state"], model["error"]) == (MODEL, "ready", None)
    assert model["tokens_per_second"]["training"] > 0 and model["tokens_per_second"]["sampling"] > 0
    assert model["num_resident_runs"] >= 1
    runs = await ada.fetch("training_runs", params={"limit": 0})
    assert model["num_runs"] == runs["cursor"]["total_count"]
    memory = model["memory"]
    assert 10e6 < memory["engine_bytes"] < memory["machine_bytes"]
    assert memory["available_bytes"] < memory["machine_bytes"]
    assert found["version"] == __version__
    assert datetime.fromisoformat(found["started_at"]) < datetime.now(UTC)


async def test_of_others_only_sums_are_told(ada, bob):
    run_id = await ada.run()
    # Behind a number that has not come yet.
    waiting = await ada.submit(types.TrainingRequest(run_id, 2, [datum(), datum()], "cross_entropy"))
    step = {"model_id": run_id, "seq_id": 3, "adam_params": {"learning_rate": 0.01}}
    stepping = await ada.ok("optim_step", step)
    own = (await ada.fetch("overview"))["queue"]
    assert {(one["user"], one["run_id"], one["kind"], one["num_requests"], one["num_tokens"]) for one in own} == {
        ("ada", run_id, "forward_backward", 1, 10),
        ("ada", run_id, "optim_step", 1, 0),
    }
    seen = (await bob.fetch("overview"))["queue"]
    assert seen == [
        {"user": "(others)", "run_id": None, "kind": "forward_backward", "num_requests": 1, "num_tokens": 10},
        {"user": "(others)", "run_id": None, "kind": "optim_step", "num_requests": 1, "num_tokens": 0},
    ]
    await ada.train(run_id, 1)
    await ada.result(stepping)
    await ada.poll(waiting["request_id"], PROTOBUF)
    assert (await ada.fetch("overview"))["queue"] == []


async def test_errors_are_their_owners(ada, bob):
    run_id = await ada.run()
    wrong = datum([10, 20, 999_999_999])
    promise = await ada.submit(types.TrainingRequest(run_id, 1, [wrong], "cross_entropy"))
    failure = await ada.failure(promise)
    newest = (await ada.fetch("overview"))["errors"]
    assert newest[0]["error"] == failure["error"]
    assert (newest[0]["run_id"], newest[0]["kind"], newest[0]["category"]) == (run_id, "forward_backward", "user")
    assert newest == sorted(newest, key=lambda one: one["at"], reverse=True) and len(newest) <= 20
    assert run_id not in [one["run_id"] for one in (await bob.fetch("overview"))["errors"]]
