"""``lorimer training``: start, list, show, stop, resume and delete a training of a real server."""

import json
import time

from lorimer.cookbook.arithmetic import split_sums, sum_rows
from tests.cli.commands import lorimer, refused

SUMS = sum_rows(split_sums()[0][:600:50])


def wait_for_steps(show):
    """Wait until a training has a run and has printed a step."""
    deadline = time.monotonic() + 240
    while "\nstep " not in (found := show())["output"] or found["run_id"] is None:
        assert found["state"] == "running" and time.monotonic() < deadline, found
        time.sleep(0.1)


def test_a_training_from_start_to_end(base_url, tmp_path):
    def ask(*words):
        ended = lorimer("training", *words, "-f", "json", LORIMER_BASE_URL=base_url)
        assert ended.exit_code == 0, ended.output
        return json.loads(ended.stdout) if ended.stdout else None

    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, SUMS)), "utf-8")
    (tmp_path / "run.yaml").write_text("base_model: lorimer/tiny\nrank: 4\nbatch_size: 4\nlearning_rate: 1e-3\n")
    flags = ("--config", tmp_path / "run.yaml", "--rows", tmp_path / "sums.jsonl", "--set", "epochs=200")
    made = ask("start", "sft", *flags, "--set", "name=by command")
    assert (made["state"], made["settings"]["epochs"]) == ("running", "200")
    training_id = made["training_id"]
    try:
        wait_for_steps(lambda: ask("show", training_id))
    finally:
        stopped = ask("stop", training_id)
    assert stopped["state"] == "stopped"
    table = lorimer("training", "list", LORIMER_BASE_URL=base_url).stdout
    assert training_id in table and "stopped" in table and "by command" in table
    shown = lorimer("training", "show", training_id, LORIMER_BASE_URL=base_url).stdout
    assert "train/nll" in shown
    try:
        assert ask("resume", training_id)["num_starts"] == 2
        code, line = refused(lorimer("training", "delete", training_id, LORIMER_BASE_URL=base_url))
        assert "stop it before it is deleted" in line and code == 1
    finally:
        ask("stop", training_id)
    ask("delete", training_id)
    assert training_id not in lorimer("training", "list", LORIMER_BASE_URL=base_url).stdout
    recipe = ("start", "recipe:rl_basic", "--set", "base_model=lorimer/tiny", "--set", "steps=200")
    training_id = ask(*recipe)["training_id"]
    try:
        wait_for_steps(lambda: ask("show", training_id))
    finally:
        assert ask("stop", training_id)["state"] == "stopped"
    code, line = refused(lorimer("training", "start", "ppo", LORIMER_BASE_URL=base_url))
    assert code == 2 and "kind" in line
