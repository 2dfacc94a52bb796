"""Polling: pending, done, failed, large, lost, another's; all of a client together; giving up."""

import asyncio

import numpy as np
import pytest

from lorimer import types
from lorimer.server.routes import futures
from lorimer.store.futures import release
from lorimer.types.compatibility import PROTOBUF

from .conftest import datum, sample_body

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_pending_future_is_held_then_answered_408_with_a_reason(server, ada, monkeypatch):
    run_id = await ada.run()
    waiting = await ada.submit(types.TrainingRequest(run_id, 2, [datum()], "cross_entropy"))
    object.__setattr__(server.context.settings, "poll_seconds", 0.3)
    try:
        began = asyncio.get_running_loop().time()
        response = await ada.post("retrieve_future", {"request_id": waiting["request_id"]})
        held = asyncio.get_running_loop().time() - began
    finally:
        object.__setattr__(server.context.settings, "poll_seconds", 20.0)
    assert response.status_code == 408
    answer = response.json()
    assert (answer["type"], answer["request_id"], answer["queue_state"]) == (
        "try_again",
        waiting["request_id"],
        "active",
    )
    assert "operation 1" in answer["queue_state_reason"]
    assert held >= 0.3
    polled = asyncio.ensure_future(ada.result(waiting))
    await asyncio.sleep(0)
    await ada.train(run_id, 1)
    assert (await polled)["metrics"]["loss:sum"] > 0


async def test_result_can_be_fetched_again(ada):
    run_id = await ada.run()
    promise = await ada.submit(types.TrainingRequest(run_id, 1, [datum()], "cross_entropy"))
    answers = [await ada.poll(promise["request_id"], PROTOBUF) for _ in range(3)]
    assert len({answer.content for answer in answers}) == 1


async def test_large_result_is_announced_first(ada, monkeypatch):
    monkeypatch.setattr(futures, "METADATA_BYTES", 100)
    run_id = await ada.run()
    promise = await ada.submit(types.TrainingRequest(run_id, 1, [datum(list(range(10, 200)))], "cross_entropy"))
    announced = (await ada.poll(promise["request_id"], PROTOBUF, allow_metadata_only=True)).json()
    whole = await ada.poll(promise["request_id"], PROTOBUF, allow_metadata_only=False)
    assert announced == {"status": "complete_metadata", "response_payload_size": len(whole.content)}
    assert whole.headers["content-type"] == PROTOBUF


async def test_unknown_and_expired_futures_are_gone(server, ada):
    for request_id in ("0" * 32, "a\0b", "x" * 5000):
        response = await ada.post("retrieve_future", {"request_id": request_id})
        assert (response.status_code, response.json()["code"]) == (410, "gone")
    run_id = await ada.run()
    promise = await ada.submit(types.TrainingRequest(run_id, 1, [datum()], "cross_entropy", {}, True))
    await ada.result(promise)
    server.context.scheduler.results.forget(promise["request_id"])
    await server.context.store.write(release, [promise["request_id"]])
    response = await ada.post("retrieve_future", {"request_id": promise["request_id"]})
    assert response.status_code == 410


async def test_anothers_future_looks_like_an_unknown_one_and_is_not_consumed(ada, bob):
    run_id = await ada.run()
    promise = await ada.submit(types.TrainingRequest(run_id, 1, [datum()], "cross_entropy"))

    async def asked(route, request_id):
        answer = await bob.post(route, {"request_id": request_id})
        shown = answer.json() | {"request_id": ""}
        return answer.status_code, str(shown).replace(request_id, "ID")

    for route in ("retrieve_future", "cancel_future"):
        assert await asked(route, promise["request_id"]) == await asked(route, "0" * 32)
        assert (await asked(route, promise["request_id"]))[0] == 410
    assert (await ada.result(promise))["metrics"]["loss:sum"] > 0
    assert await asked("retrieve_future", promise["request_id"]) == await asked("retrieve_future", "0" * 32)


async def completions(client, sampler_id, cursor=0, clone=0, **fields):
    target = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": clone}
    return await client.ok("retrieve_futures", {"target": target, "prev_cursor": cursor, **fields})


async def test_session_poller_sees_each_completion_once(ada):
    sampler_id = await ada.sampler(await ada.session())
    assert await completions(ada, sampler_id, timeout=0) == {"completions": [], "cursor": 0}
    promises = [await ada.ok("asample", sample_body(sampler_id, number)) for number in range(3)]
    clone = await ada.ok("asample", sample_body(sampler_id, 5_000_000_000))
    found, cursor = {}, 0
    while len(found) < 3:
        answer = await completions(ada, sampler_id, cursor)
        assert answer["cursor"] > cursor
        cursor = answer["cursor"]
        found |= {one["request_id"]: one for one in answer["completions"]}
    assert found.keys() == {promise["request_id"] for promise in promises}
    assert {one["state"] for one in found.values()} == {"finished"}
    for request_id, one in found.items():
        content = (await ada.poll(request_id, PROTOBUF)).content
        assert len(content) == one["response_payload_uncompressed_size"]
    assert (await completions(ada, sampler_id, cursor, timeout=0))["completions"] == []
    await ada.poll(clone["request_id"])
    of_clone = await completions(ada, sampler_id, 0, clone=5, timeout=0)
    assert [one["request_id"] for one in of_clone["completions"]] in ([], [clone["request_id"]])


async def test_acknowledged_results_are_freed_and_only_ones_own(ada, bob):
    sampler_id = await ada.sampler(await ada.session())
    promise = await ada.ok("asample", sample_body(sampler_id))
    await ada.poll(promise["request_id"])
    his = await bob.sampler(await bob.session())
    await completions(bob, his, timeout=0, retrieved_request_ids=[promise["request_id"], "a\0b", "none"])
    assert (await ada.poll(promise["request_id"])).status_code == 200
    await completions(ada, sampler_id, timeout=0, retrieved_request_ids=[promise["request_id"]])
    assert (await ada.poll(promise["request_id"])).status_code == 410


async def test_cancelled_sample_fails_and_others_go_on(ada):
    sampler_id = await ada.sampler(await ada.session())
    long = {"sampling_params": {"max_tokens": 200, "stop": []}}
    promises = [await ada.ok("asample", sample_body(sampler_id, number, num_samples=4, **long)) for number in range(2)]
    assert (await ada.post("cancel_future", {"request_id": promises[0]["request_id"]})).status_code == 204
    answer = await ada.poll(promises[0]["request_id"])
    assert answer.status_code in (200, 410)
    if answer.status_code == 200:
        assert "error" in answer.json()
    assert len((await ada.result(promises[1]))["sequences"]) == 4
    assert (await ada.post("cancel_future", {"request_id": promises[1]["request_id"]})).status_code == 204
    assert (await ada.post("cancel_future", {"request_id": "0" * 32})).status_code == 410


async def test_ragged_targets_survive_both_forms(ada):
    run_id = await ada.run()
    data = [
        datum(
            [5, 6, 7], target_tokens=np.array([[6, 1], [7, 2], [8, 3]], np.int64), weights=np.ones((3, 2), np.float32)
        ),
        datum([5, 6], target_tokens=np.array([6, 7], np.int64), weights=np.ones(2, np.float32)),
    ]
    promise = await ada.submit(types.TrainingRequest(run_id, 1, data, "cross_entropy"))
    outputs = (await ada.result(promise))["loss_fn_outputs"]
    assert [output["logprobs"]["shape"] for output in outputs] == [[3, 2], [2]]
