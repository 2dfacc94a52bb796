"""The replicas of base models as users see them: in one process, and computed by owners elsewhere."""

import asyncio
import os
from datetime import UTC, datetime, timedelta

import httpx2
import pytest

from lorimer.server.app import create_app
from lorimer.server.settings import ModelSettings, Settings
from lorimer.store import moves, owners
from tests.store.postgres import running

from .conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

PLACE = f"{MODEL}#0"


async def test_one_process_computes_its_replica_itself(ada):
    run_id = await ada.run()
    await ada.train(run_id, 1)
    (replica,) = (await ada.fetch("replicas"))["replicas"]
    assert (replica["name"], replica["base_model"], replica["state"], replica["error"]) == (PLACE, MODEL, "ready", None)
    assert (replica["node"], len(replica["owner_id"]), replica["lease_seconds"]) == (os.uname().nodename, 8, None)
    assert datetime.fromisoformat(replica["changed_at"]) < datetime.now(UTC)
    assert replica["num_loaded_runs"] >= 1
    assert replica["tokens_per_second"]["training"] > 0
    assert replica["num_deaths"] == 0
    assert replica["engine_bytes"] > 10e6


async def test_a_run_names_its_replica(ada):
    run_id = await ada.run()
    await ada.train(run_id, 1)
    assert (await ada.fetch(f"training_runs/{run_id}"))["replica"] == PLACE


async def test_moves_are_shown_to_the_owner_of_the_run_only(ada, bob, server):
    run_id = await ada.run()
    write = server.context.store.write
    try:
        await write(moves.place, run_id, "elsewhere#0")
        (move,) = (await ada.fetch("replicas"))["moves"]
        assert (move["run_id"], move["from_replica"], move["to_replica"]) == (run_id, PLACE, "elsewhere#0")
        assert datetime.now(UTC) - datetime.fromisoformat(move["at"]) < timedelta(minutes=1)
        assert (await bob.fetch("replicas"))["moves"] == []
    finally:
        await write(moves.place, run_id, PLACE)


@pytest.mark.service
async def test_an_api_replica_shows_owners_and_leases(tmp_path):
    with running() as postgres:
        settings = Settings(
            role="api",
            database=postgres.url(),
            data=tmp_path / "data",
            model={MODEL: ModelSettings(source="lorimer/debug", replicas=2)},
        )
        app = create_app(settings)
        async with app.router.lifespan_context(app):
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
                await check_owners(http, app.state.context.store)


async def check_owners(http, store):
    async def fetch(state):
        """Return the first replica once its row is in this state, and the second."""
        while True:
            first, second = (await http.get("/api/v1/replicas")).json()["replicas"]
            if first["state"] == state:
                return first, second
            await asyncio.sleep(0.1)

    first, second = await fetch("lost")
    assert (first["name"], second["name"]) == (PLACE, f"{MODEL}#1")
    assert (first["owner_id"], first["node"], first["lease_seconds"]) == (None, None, None)
    owner_id = "0123456789abcdef" * 2
    await store.write(owners.register, owner_id, "gpu-7", "", 60.0)
    await store.write(owners.claim, owner_id, [PLACE])
    load = {"num_loaded_runs": 3, "num_deaths": 1, "training_rate": 12.5, "error": "out of memory"}
    await store.write(owners.renew, owner_id, 60.0, {PLACE: owners.ReplicaState("ready", None, load)})
    first, second = await fetch("ready")
    assert (first["owner_id"], first["node"], second["state"]) == ("01234567", "gpu-7", "lost")
    assert 30 < first["lease_seconds"] <= 60
    assert (first["num_loaded_runs"], first["num_deaths"], first["error"]) == (3, 1, "out of memory")
    assert first["tokens_per_second"] == {"training": 12.5, "sampling": 0}
    assert datetime.now(UTC) - datetime.fromisoformat(first["changed_at"]) < timedelta(minutes=1)
    await store.write(owners.resign, owner_id)
    first, _ = await fetch("lost")
    assert (first["owner_id"], first["num_loaded_runs"], first["error"]) == (None, 0, None)
