"""A training in a process of the server: stopped, resumed, and the ends of the server around it.

Its process has a key of its user that is in no command line, log or file, and is revoked when the training ends.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.conformance.servers import create_key
from tests.server.processes import Process

ROWS = "\n".join(
    json.dumps({"question": f"What is {a} + {b}?", "answer": str(a + b)}) for a in range(9) for b in (3, 8)
)
SETTINGS = {"base_model": "lorimer/tiny", "rank": 4, "batch_size": 2, "learning_rate": 1e-3, "epochs": 2000}
SETTINGS |= {"save_every": 2, "num_held_out": 2}
DEADLINE_SECONDS = 120


class Installation:
    """Servers on one data directory, one after the other, and a client with a key of alice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        flags = ("--model", "lorimer/tiny", "--dtype", "float32", "--set", "trainings=on")
        self.server = Process(self.folder, *flags).wait_until_listening()

    def ask(self, method: str, path: str, key: str, **options: object) -> httpx2.Response:
        return httpx2.request(
            method, f"{self.server.url}/api/v1/{path}", headers={"X-API-Key": key}, timeout=60, **options
        )

    def training(self, training_id: str, key: str) -> dict[str, Any]:
        return self.ask("GET", f"trainings/{training_id}", key).json()

    def wait_for_step(self, training_id: str, key: str, after: str = "") -> dict[str, Any]:
        """Wait until a training has logged steps after a text of its output."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            found = self.training(training_id, key)
            output = str(found["output"]).rpartition(after)[2] if after else str(found["output"])
            if output.count("\nstep ") > 4 and (not after or after in str(found["output"])):
                return found
            assert found["state"] == "running", found
            assert time.monotonic() < deadline, found
            time.sleep(0.1)

    def child(self) -> psutil.Process:
        (found,) = [
            one for one in psutil.Process(self.server.process.pid).children() if "lorimer.cli.child" in one.cmdline()
        ]
        return found


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_stop_resume_and_the_ends_of_servers(tmp_path, tell):

    place = Installation(tmp_path)
    try:
        key = create_key(tmp_path / "data", "alice")
        # The control socket has created it in the running server.
        made = place.ask("POST", "trainings", key, json={"kind": "sft", "settings": SETTINGS, "data": ROWS})
        assert made.status_code == 200, made.text
        training_id = made.json()["training_id"]
        place.wait_for_step(training_id, key)

        # One at a time.
        more = place.ask("POST", "trainings", key, json={"kind": "sft", "settings": SETTINGS, "data": ROWS})
        assert (more.status_code, more.json()["code"]) == (429, "quota_exceeded")

        # The key of the process is its own, and nowhere but in its memory.
        child = place.child()
        secret = child.environ()["LORIMER_API_KEY"]
        assert secret != key and secret.startswith("tml-")
        assert secret not in " ".join(child.cmdline()) and secret not in place.server.stderr()
        files = [path for path in (tmp_path / "data" / "trainings").rglob("*") if path.is_file()]
        assert len(files) > 5 and not any(secret.encode() in path.read_bytes() for path in files)
        assert place.ask("GET", "trainings", secret).status_code == 200
        assert not {name for name in child.environ() if name.startswith(("AWS_", "LORIMER_DATA"))}

        # Stopped by its user: the process and the key are gone, the run is marked as interrupted.
        stopped = place.ask("POST", f"trainings/{training_id}/stop", key).json()
        assert stopped["state"] == "stopped" and has_ended(child)
        assert place.ask("GET", "trainings", secret).status_code == 401
        run_id = place.training(training_id, key)["run_id"]
        assert place.ask("GET", f"runs/{run_id}", key).json()["status"] == "interrupted"

        # Resumed, in the same run; then the server is asked to stop.
        assert place.ask("POST", f"trainings/{training_id}/resume", key).json()["num_starts"] == 2
        found = place.wait_for_step(training_id, key, "resumed at step ")
        assert found["run_id"] == run_id
        child = place.child()
        place.server.process.send_signal(signal.SIGTERM)
        assert place.server.process.wait(60) == 0
        assert has_ended(child)
        place.server.close()
        place.begin()
        assert place.training(training_id, key)["state"] == "interrupted"

        # Killed without warning: the process ends by itself, and its key is revoked at the next start.
        place.ask("POST", f"trainings/{training_id}/resume", key)
        place.wait_for_step(training_id, key, "resumed at step ")
        child = place.child()
        secret = child.environ()["LORIMER_API_KEY"]
        os.kill(place.server.process.pid, signal.SIGKILL)
        child.wait(60)
        place.server.close()
        place.begin()
        assert place.training(training_id, key)["state"] == "interrupted"
        assert place.ask("GET", "trainings", secret).status_code == 401
        deleted = place.ask("DELETE", f"trainings/{training_id}", key)
        assert deleted.status_code == 204 and not list((tmp_path / "data" / "trainings").iterdir())
        tell("a server stopped and killed during its own training", "the training as interrupted, to be resumed")
    finally:
        place.server.close()


def test_refused_by_the_training_itself(tmp_path):
    """What only the training notices is told as its error; a dry run gives numbers."""
    place = Installation(tmp_path)
    try:
        for settings, rows, told in (
            ({"learning_rat": 1}, ROWS, "the nearest is 'learning_rate'"),
            ({}, '{"text": "?"}', "row 1 of the data"),
        ):
            body = {"kind": "sft", "settings": SETTINGS | settings, "data": rows}
            training_id = place.ask("POST", "trainings", "", json=body).json()["training_id"]
            found = wait_for_end(place, training_id)
            assert found["state"] == "failed" and told in found["error"]
        body = {"kind": "sft", "settings": SETTINGS | {"max_steps": 7}, "data": ROWS, "dry_run": True}
        found = wait_for_end(place, place.ask("POST", "trainings", "", json=body).json()["training_id"])
        assert (found["state"], found["result"]["num_steps"], found["result"]["num_held_out"]) == ("finished", 7, 2)
        assert place.ask("POST", f"trainings/{found['training_id']}/resume", "").status_code == 409
    finally:
        place.server.close()


def wait_for_end(place: Installation, training_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (found := place.training(training_id, ""))["state"] == "running":
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def test_check_of_data(tmp_path):
    """What `lorimer data check` prints, as JSON, with the tokens that are trained on."""
    place = Installation(tmp_path)
    try:
        first = ROWS.splitlines()[0]
        body = {"model": "lorimer/tiny", "data": f"{ROWS}\n{first}\nnot JSON", "num_shown": 1, "num_held_out": 0}
        found = place.ask("POST", "data/check", "", json=body)
        assert found.status_code == 200, found.text
        report = found.json()
        assert (report["form"], report["num_rows"], report["problems"]) == ("sft", 19, {"form": 1, "duplicate": 1})
        ((asked, answered, *_),) = report["previews"]
        assert "What is 0 + 3?" in asked["text"] and not asked["is_trained"]
        assert answered["is_trained"] and answered["text"].startswith("3") and answered["pieces"][0] == "3"
        for wrong, status, told in (
            ({"data": "not JSON"}, 400, "has no rows"),
            ({"train_on": "nothing"}, 400, "--train-on is 'nothing'"),
            ({"model": "lorimer/none"}, 404, "is not served here"),
            ({"num_shown": 1000}, 422, "num_shown"),
        ):
            refused = place.ask("POST", "data/check", "", json=body | wrong)
            assert refused.status_code == status and told in refused.json()["detail"], refused.text
    finally:
        place.server.close()
