"""Replicas: one process that computes its own, and owners elsewhere with leases, one of which is gone."""

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from lorimer.store import Store, moves, owners, runs, sessions, users
from tests.conformance.servers import running_server
from tests.console.conftest import MODEL
from tests.store.postgres import running

OTHER = "test/other"
OWNER = "0123456789abcdef" * 2
LOAD = {
    "num_loaded_runs": 3,
    "num_open_operations": 12,
    "num_running_samples": 8,
    "num_waiting_samples": 1200,
    "training_rate": 1234.5,
    "num_deaths": 2,
    "error": "the engine ran out of memory",
}


def test_one_process_computes_its_replica_itself(server, open_page, trainer):
    trainer.train(trainer.run(server.url), 1)
    page = open_page(server.url)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("e")
    expect(page.get_by_role("heading", name="Replicas", exact=True)).to_be_focused()
    expect(page.get_by_text("1 replica, 1 process")).to_be_visible()
    row = page.locator(f"[data-row='{MODEL}#0']")
    expect(row).to_contain_text("ready")
    expect(row).to_contain_text(f"on {os.uname().nodename}")
    expect(page.get_by_role("columnheader", name="Lease")).to_have_count(0)
    expect(page.get_by_text("No run moved.")).to_be_visible()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[tuple[str, str]]:
    """An API replica with two base models, one without an owner, and a run that moved; its URL and the run."""
    folder = tmp_path_factory.mktemp("cluster")
    models = [MODEL, f"{OTHER}=lorimer/debug"]
    with running() as postgres:
        settings = {"role": "api", "database": postgres.url()}
        with running_server(folder / "data", models, **settings) as api:
            store = Store.open(postgres.url(), folder / "own")
            store.write_now(owners.register, OWNER, "gpu-7", "", 600.0)
            store.write_now(owners.claim, OWNER, [f"{MODEL}#0"])
            found = {f"{MODEL}#0": owners.ReplicaState("ready", None, LOAD)}
            store.write_now(owners.renew, OWNER, 600.0, found)
            run_id = store.write_now(moved_run)
            store.close()
            yield api.url, run_id


def moved_run(c) -> str:
    user = users.ensure_user(c, "local")
    shape = {"train_attn": True, "train_mlp": True, "train_unembed": True, "optimizer_type": "adamw"}
    run = runs.create_run(
        c,
        session_id=sessions.create_session(c, user_id=user.user_id).session_id,
        user_id=user.user_id,
        project_id=None,
        model_seq_id=0,
        base_model=MODEL,
        rank=8,
        seed=1,
        user_metadata={},
        replica=f"{MODEL}#1",
        **shape,
    )
    moves.place(c, run.model_id, f"{MODEL}#0")
    return run.model_id


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_owners_leases_and_moves(cluster, open_page, scheme):
    url, run_id = cluster
    page = open_page(url, "/console/replicas", scheme=scheme)
    expect(page.get_by_text("2 replicas, 1 process, 1 without one")).to_be_visible()
    owned = page.locator(f"[data-row='{MODEL}#0']")
    for text in ("ready", OWNER[:8], "on gpu-7", "1,200 waiting", "1,235 trained", LOAD["error"]):
        expect(owned).to_contain_text(str(text))
    expect(owned.locator("[data-label='Lease']")).to_contain_text("s left")
    lost = page.locator(f"[data-row='{OTHER}#0']")
    for text in ("lost", "nobody"):
        expect(lost).to_contain_text(text)
    moved = page.locator("tr", has=page.locator(f"a[title='{run_id}']"))
    for text in (f"{MODEL}#1", f"{MODEL}#0"):
        expect(moved).to_contain_text(text)


def test_a_phone_shows_a_card_for_each_replica(cluster, open_page):
    page = open_page(cluster[0], "/console/replicas", phone=True)
    expect(page.locator(f"[data-row='{OTHER}#0']")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
