"""The directory of a model is gone when its engine is to be started: the others go on, and it does when it is back."""

import signal
import time

import httpx2
import pytest

from lorimer.models.debug import make_debug_model
from tests.conformance.servers import create_key
from tests.faults.caller import ADAM, Caller
from tests.faults.supervisor import Supervisor, eventually

STAYS, VANISHES = "test/stays", "test/vanishes"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_directory_that_vanished(tmp_path, tell):
    here, away = tmp_path / "model", tmp_path / "elsewhere"
    make_debug_model(here)
    models = [f"{STAYS}=lorimer/debug", f"{VANISHES}={here}"]
    key = create_key(tmp_path / "data", "alice")
    with (
        Supervisor(tmp_path / "data", models=models) as server,
        Caller(server.url, key, STAYS) as first,
        Caller(server.url, key, VANISHES) as second,
    ):
        ours, theirs = first.run(), second.run()
        assert first.step(ours) == second.step(theirs) == 1
        here.rename(away)
        for engine in server.engines():
            engine.kill()
        waiting = second.operate("optim_step", theirs, adam_params=ADAM)
        assert first.step(ours) == 2, "the other model goes on"
        eventually(lambda: str(here) in server.logged(), "a message that names the directory")
        eventually(lambda: told(server, VANISHES), "what is wrong is told")
        refused = second.post(
            "create_model", session_id=second.session_id, model_seq_id=50, base_model=VANISHES, lora_config={"rank": 4}
        )
        saw = refused.text if refused.status_code != 200 else second.failure(refused.json())
        assert VANISHES in saw or here.name in saw, saw
        assert str(tmp_path) not in saw, "paths of the server are not told to users"
        assert first.step(ours) == 3
        away.rename(here)
        assert second.result(waiting)["metrics"]["optimizer_step"] == 2, "it waited, and went on"
        assert second.step(theirs) == 3
        tell("a model directory vanished while the server ran", f"its runs wait; a new one: {saw}")
        tell(
            "a model directory vanished before a restart", vanished_before_a_start(server, first, second, ours, theirs)
        )


def told(server: Supervisor, model: str) -> bool:
    reasons = httpx2.get(f"{server.url}/readyz", timeout=30).json()["reasons"]
    return f"model {model!r} could not be loaded" in reasons


def vanished_before_a_start(server: Supervisor, first: Caller, second: Caller, ours: str, theirs: str) -> str:
    """The operator serves what is left: runs of the missing model are refused by its name, and kept."""
    ended = len(server.exit_codes)
    command = server.command
    server.command = [part for part in command if VANISHES not in part]
    server.send(signal.SIGTERM)
    assert server.wait_for_end(ended) == 0
    server.wait_until_ready()
    assert first.step(ours) == 4
    refused = second.try_operation("optim_step", theirs, adam_params=ADAM)
    assert refused.status_code == 404 and VANISHES in refused.text, refused.text
    server.command = command
    ended = len(server.exit_codes)
    server.send(signal.SIGTERM)
    assert server.wait_for_end(ended) == 0
    server.wait_until_ready()
    second._next[theirs] += 1  # what was refused has used its number up
    deadline = time.monotonic() + 60
    assert second.step(theirs) == 4 and time.monotonic() < deadline
    return f"404: {refused.json()['detail']}"
