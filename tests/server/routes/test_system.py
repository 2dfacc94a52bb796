"""The system over time over HTTP: sampled by the running server, seen by every user, read on from a second."""

import asyncio
import time

import pytest

from lorimer.store import system

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_server_samples_itself_and_every_user_sees_it(ada, bob, server):
    run_id = await ada.run()
    await ada.train(run_id, 1)
    context = server.app.state.context
    deadline = time.monotonic() + 60
    while True:
        found = await bob.fetch("system")
        kinds = {(one["kind"], one["name"].partition(" ")[0]) for one in found["series"]}
        if ("memory", "engine") in kinds:
            break
        assert time.monotonic() < deadline, kinds
        await asyncio.sleep(0.5)
    assert kinds >= {("cpu", "machine"), ("cpu", "server"), ("memory", "machine"), ("disk", "free")}
    assert found["period_seconds"] == context.settings.system_sample_seconds
    last = max(point[0] for one in found["series"] for point in one["points"])
    assert abs(found["now"] - last) < 60
    later = await ada.fetch(f"system?after={last}")
    assert all(point[0] > last for one in later["series"] for point in one["points"])


async def test_ranges(ada, server):
    now = int(time.time())

    def add(c):
        for at in range(now - 3 * 3600, now - 2 * 3600, 30):
            system.add(c, "elsewhere", at, {"queue/sample": 2.0})

    await server.app.state.context.store.write(add)
    for chosen, period in (("day", 60), ("week", 600)):
        found = await ada.fetch(f"system?range={chosen}")
        (series,) = [one for one in found["series"] if one["source"] == "elsewhere"]
        assert (series["kind"], series["name"], found["period_seconds"]) == ("queue", "sample", period)
        assert {tuple(point[1:]) for point in series["points"]} == {(2.0, 2.0)}
        assert {point[0] % period for point in series["points"]} == {0}
    assert "elsewhere" not in {one["source"] for one in (await ada.fetch("system?range=hour"))["series"]}


@pytest.mark.parametrize("query", ["range=year", "after=-1", "after=x"])
async def test_wrong_queries_are_refused(ada, query):
    answer = await ada.http.get(f"/api/v1/system?{query}", headers=ada.headers)
    assert answer.status_code == 400 and "accepted" in answer.json()["detail"]
