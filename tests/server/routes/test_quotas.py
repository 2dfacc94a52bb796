"""Quotas of users: stored bytes and requests per second, refused with the numbers, and nothing is lost."""

import asyncio
from typing import Any
from uuid import uuid4

import httpx2
import pytest
import pytest_asyncio

from .conftest import Client, Server

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def quinn(server: Server):
    """A user of one test, whose quotas are set by name."""
    name = f"quinn-{uuid4().hex[:8]}"
    key, secret = await server.context.credentials.create(name, "test")
    transport = httpx2.ASGITransport(app=server.app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as http:
        client = Client(http, key.user_id, headers={"x-api-key": secret})

        async def set_quotas(**values: float | None) -> None:
            await server.context.credentials.set_quotas(name, values)

        client.set_quotas = set_quotas
        yield client


async def quotas(client: Client) -> dict[str, Any]:
    used = (await client.fetch("billing/usage/checkpoints/current"))["quotas"]
    assert (await client.fetch("keys"))["quotas"] == used
    return used


def folders(server: Server) -> set[str]:
    return {path.name for path in server.context.directory.weights.iterdir()}


def save_body(run_id: str, seq_id: int, name: str, **fields: object) -> dict[str, object]:
    return {"model_id": run_id, "seq_id": seq_id, "path": name, **fields}


async def test_a_save_beyond_the_quota_is_refused_before_it_is_written(server, quinn):
    run_id = await quinn.run()
    await quinn.train(run_id, 1)
    path = await quinn.save(run_id, 2, "first")
    size = (await quotas(quinn))["stored_bytes"]
    assert size > 0
    allowed = size + size // 2
    await quinn.set_quotas(max_stored_bytes=allowed)
    assert await quotas(quinn) == {
        "stored_bytes": size,
        "rollout_bytes": 0,
        "max_stored_bytes": allowed,
        "requests_per_second": None,
    }
    written = folders(server)
    refused = await quinn.post("save_weights", save_body(run_id, 3, "second"))
    assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
    assert refused.headers["retry-after"] and refused.headers["x-should-retry"] == "false"
    detail = refused.json()["detail"]
    assert all(str(word) in detail for word in ("max_stored_bytes", allowed, size)), detail
    # What a client does that sends it again all the same, as the official SDK: it learns the reason.
    failure = await quinn.failure(await quinn.ok("save_weights", save_body(run_id, 3, "second")))
    assert (failure["category"], failure["error"]) == ("user", detail)
    assert folders(server) == written
    await quinn.train(run_id, 4)
    assert await quinn.save(run_id, 5, "first", overwrite=True) == path, "it takes the place of what it replaces"
    source = {"source_path": path, "destination_project_id": "p"}
    assert (await quinn.post("copy_weights", source)).status_code == 429
    assert (await quinn.send("DELETE", f"training_runs/{run_id}/checkpoints/weights/first")).status_code == 204
    await quinn.save(run_id, 6, "third")


async def test_saves_that_are_too_large_together_fail_alone(server, quinn):
    run_id = await quinn.run()
    await quinn.save(run_id, 1, "measured")
    size = (await quotas(quinn))["stored_bytes"]
    await quinn.send("DELETE", f"training_runs/{run_id}/checkpoints/weights/measured")
    await quinn.set_quotas(max_stored_bytes=2 * size + size // 2)
    other = await quinn.run()  # of a run without checkpoints the size is not known before
    written = folders(server)
    promises = [await quinn.ok("save_weights", save_body(other, seq, f"c{seq}")) for seq in (3, 4, 2, 1)]
    answers = [(await quinn.poll(promise["request_id"])).json() for promise in promises]
    failed = [answer for answer in answers if "error" in answer]
    assert len(failed) == 2
    assert all("max_stored_bytes" in one["error"] and one["category"] == "user" for one in failed)
    assert (await quotas(quinn))["stored_bytes"] <= 2 * size + size // 2
    async with asyncio.timeout(30):  # what the refused ones wrote is removed after their answers
        while len(folders(server) - written) != 2:
            await asyncio.sleep(0.01)
    await quinn.train(other, 5)


async def test_rollouts_count(quinn):
    """They are part of what is stored, and refused when they would exceed the quota; so are checkpoints then."""
    run_id = await quinn.run()
    turns = [{"role": "assistant", "content": "".join(map(chr, range(300, 3000)))}]

    async def log(step: int) -> Any:
        return await quinn.post(f"runs/{run_id}/rollouts", {"rollouts": [{"step": step, "turns": turns}]})

    assert (await log(0)).status_code == 200
    used = await quotas(quinn)
    size = used["rollout_bytes"]
    assert size > 1000 and used["stored_bytes"] >= size
    await quinn.set_quotas(max_stored_bytes=used["stored_bytes"] + size + size // 2)
    assert (await log(1)).status_code == 200
    refused = await log(2)
    assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
    assert "these rollouts take" in refused.json()["detail"]
    assert (await quotas(quinn))["rollout_bytes"] == 2 * size
    await quinn.set_quotas(max_stored_bytes=1)
    refused = await quinn.post("save_weights", save_body(run_id, 1, "none"))
    assert refused.json()["code"] == "quota_exceeded" and "checkpoints and rollouts" in refused.json()["detail"]
    await quinn.set_quotas(max_stored_bytes=None)


async def test_the_quota_of_one_user_is_none_of_another(ada, quinn):
    await quinn.set_quotas(max_stored_bytes=1)
    run_id = await quinn.run()
    failure = await quinn.failure(await quinn.ok("save_weights_for_sampler", save_body(run_id, 1, "s")))
    assert failure["category"] == "user" and "max_stored_bytes allows you 1 bytes" in failure["error"]
    await ada.save(await ada.run(), 1, "mine")
    await quinn.set_quotas(max_stored_bytes=None)
    await quinn.save(run_id, 2, "s", "save_weights_for_sampler")


async def test_requests_beyond_the_rate_are_put_off(ada, quinn):
    await quinn.set_quotas(requests_per_second=0.5)
    session = await quinn.session()
    answers = [await quinn.get("sessions") for _ in range(6)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert [answer.status_code for answer in answers] == [200] * 4 + [429] * 2, "five in a burst of ten seconds"
    assert refused[0].json()["code"] == "quota_exceeded"
    detail = refused[0].json()["detail"]
    assert all(word in detail for word in ("requests_per_second", "0.5", "5 in a burst"))
    assert 1 <= int(refused[0].headers["retry-after"]) <= 2
    assert (await ada.get("sessions")).status_code == 200
    for path, body in (
        ("session_heartbeat", {"session_id": session}),
        ("retrieve_future", {"request_id": "0" * 32}),
    ):
        assert (await quinn.post(path, body)).status_code in (200, 410), "clients repeat them by themselves"
    await asyncio.sleep(int(refused[0].headers["retry-after"]))
    assert (await quinn.get("sessions")).status_code == 200
    await quinn.set_quotas(requests_per_second=0)
    assert {(await quinn.get("sessions")).status_code for _ in range(20)} == {200}
