"""``lorimer session`` against a server."""

import json

import pytest

import lorimer


def test_list(alice, trained):
    shown = alice("session", "list")
    (row,) = [line for line in shown.splitlines() if trained.session_id in line]
    assert "Command line" in row and "active" in row and "\x1b" not in row
    found = alice.json("session", "list", "--limit", 0)["sessions"]
    assert trained.session_id in [one["session_id"] for one in found]
    assert len(alice.json("session", "list", "--limit", 1)["sessions"]) == 1


def test_search_by_name(alice, trained):
    named = alice.json("session", "list", "--name", "line COMMAND")["sessions"]
    assert [one["session_id"] for one in named] == [trained.session_id]
    assert alice.run("session", "list", "--name", "no such words").stderr == "no sessions\n"


def test_info(alice, trained):
    shown = alice("session", "info", trained.session_id)
    assert trained.run_id in shown and "Command line" in shown
    found = alice.json("session", "info", trained.session_id)
    assert found["session_id"] == trained.session_id
    assert trained.run_id in found["training_run_ids"]
    assert found["sampler_ids"]


def test_errors_are_shown(alice):
    with lorimer.ServiceClient(base_url=alice.url, api_key=alice.key) as service:
        training = service.create_lora_training_client("lorimer/debug", rank=4)
        wrong = lorimer.Datum(lorimer.ModelInput.from_ints([1, 2]), {"target_tokens": [3, 999_999_999]})
        with pytest.raises(lorimer.TinkerError) as failed:
            training.forward_backward([wrong], "cross_entropy").result()
        session_id = training.model_id.partition(":")[0]
        service.close("errored", "ValueError: no data").result()
    (error,) = alice.json("session", "info", session_id)["errors"]
    assert error["error"] in str(failed.value) and "999999999" in error["error"]
    shown = " ".join(alice("session", "info", session_id).split())
    assert "errored: ValueError: no data" in shown
    assert "forward_backward" in shown and "999999999" in shown
    listed = alice.json("session", "list", "--limit", 0)["sessions"]
    assert session_id in [one["session_id"] for one in listed]


def test_session_that_is_not_there_or_of_others(alice, bob, trained):
    assert alice.refused("session", "info", "nothing")[0] == 4
    assert bob.refused("session", "info", trained.session_id)[0] == 4


def test_trace_is_exported(alice, trained, tmp_path):
    file = tmp_path / "trace.json"
    assert alice("session", "export-trace", trained.session_id, "-o", file) == f"{file}\n"
    assert json.loads(file.read_text("utf-8"))["traceEvents"]
    assert list(tmp_path.iterdir()) == [file]
    code, line = alice.refused("session", "export-trace", trained.session_id, "-o", file)
    assert (code, "--force replaces it" in line) == (2, True)
    found = alice.json("session", "export-trace", trained.session_id, "-o", file, "--force")
    assert found == {"session_id": trained.session_id, "destination": str(file)}


def test_address_of_a_trace(alice, trained):
    assert alice("session", "export-trace", trained.session_id, "--url-only").startswith(alice.url)
