"""``lorimer replica`` against a server that computes its replica itself."""

import os

from lorimer.cli.replica import row
from lorimer.types.replicas import ReplicaEntry
from tests.cli.conftest import MODEL


def test_list_as_table(alice, trained):
    header, line = alice("replica", "list").splitlines()
    assert header.split() == "replica state owner node lease since runs samples operations tokens/s deaths".split()
    assert line.startswith(f"{MODEL}#0 ")
    assert " ready " in line and os.uname().nodename in line


def test_list_as_json(alice, trained):
    found = alice.json("replica", "list")
    (replica,) = found["replicas"]
    assert (replica["name"], replica["base_model"], replica["state"]) == (f"{MODEL}#0", MODEL, "ready")
    assert replica["lease_seconds"] is None
    assert replica["num_loaded_runs"] >= 1
    assert found["moves"] == []


def test_row_of_an_owner_and_of_none():
    numbers = {"num_loaded_runs": 1, "num_waiting_samples": 2, "num_running_samples": 3, "num_open_operations": 4}
    values = {
        "name": "m#0",
        "base_model": "m",
        "changed_at": "2026-01-31T00:00:00Z",
        "tokens_per_second": {"training": 10.4, "sampling": 0},
        "num_deaths": 5,
        **numbers,
    }
    owned = {"state": "starting", "stage": "loading", "owner_id": "0123", "node": "gpu-7", "lease_seconds": 7.6}
    first = row(ReplicaEntry.model_validate(values | owned))
    assert first[:5] == ["m#0", "starting: loading", "0123", "gpu-7", "8 s"]
    assert first[6:] == [1, "3 + 2", 4, "10 + 0", 5]
    assert row(ReplicaEntry.model_validate(values | {"state": "lost"}))[1:5] == ["lost", "", "", ""]
