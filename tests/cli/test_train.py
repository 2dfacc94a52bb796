"""``lorimer train``: each kind of training against a real server, from files and flags; resuming; refusals."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from lorimer.cookbook.arithmetic import split_sums, sum_rows
from lorimer.cookbook.checkpoints import read_jsonl
from tests.cli.commands import lorimer, refused
from tests.conformance.servers import environment

SUMS = sum_rows(split_sums()[0][:3000:50])
COMMON = ("--rank", 4, "--batch-size", 4, "--steps", 2, "--model", "lorimer/tiny")


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(base_url, folder):
    """Runs a training, and returns its JSON and what it told on the way."""

    def run(*arguments):
        ended = lorimer("train", *arguments, "-f", "json", LORIMER_BASE_URL=base_url)
        assert ended.exit_code == 0, ended.output
        return json.loads(ended.stdout), ended.stderr

    return run


def test_sft_from_a_file_with_flags(train, folder):
    write_rows(folder / "sums.jsonl", SUMS)
    (folder / "run.yaml").write_text("base_model: lorimer/tiny\ndata: sums.jsonl\nlearning_rate: 1e-3\nrank: 8\n")
    found, told = train("sft", "-c", "run.yaml", "--rank", 4, "--steps", 3, "--set", "batch_size=8", "--log-dir", "log")
    assert found["sampler_path"].startswith("tinker://") and found["metrics"]["test/nll"] > 0
    config = json.loads((folder / "log" / "config.json").read_text("utf-8"))
    assert (config["rank"], config["learning_rate"], config["batch_size"], config["num_steps"]) == (4, 1e-3, 8, 3)
    assert len(config["data_sha256"]) == 64
    assert "step 3/3" in told
    assert [line["step"] for line in read_jsonl(folder / "log" / "metrics.jsonl")] == [0, 1, 2, 3]


def test_dpo_and_distillation(train, folder):
    pairs = [{"prompt": row["question"], "chosen": row["answer"], "rejected": "7"} for row in SUMS]
    found, _ = train("dpo", *COMMON, "--data", write_rows(folder / "pairs.jsonl", pairs), "--learning-rate", 1e-3)
    assert found["log_dir"] == "runs/dpo" and 0 <= found["metrics"]["test/accuracy"] <= 1
    questions = write_rows(folder / "questions.jsonl", [{"question": row["question"]} for row in SUMS])
    flags = ("--set", "max_tokens=6", "--set", "num_samples=2", "--set", "teacher_prompt=Add the numbers.")
    found, _ = train("distill", *COMMON, "--data", questions, *flags)
    assert found["metrics"]["test/reverse_kl"] > 0  # the teacher reads a prompt that the student does not


def test_rl_tasks(train, folder, monkeypatch):
    flags = (*COMMON, "--set", "max_tokens=6", "--set", "group_size=4", "--set", "num_held_out=4")
    found, told = train("rl", *flags, "--task", "arithmetic")
    assert "test/correct" in found["metrics"] and "0.2 of it is taken" in told
    (folder / "my_graders.py").write_text("def grade(reply, answer):\n    return len(reply) / 10\n", "utf-8")
    data = write_rows(folder / "questions.jsonl", SUMS)
    own = ("--task", "questions", "--data", data, "--grader", "my_graders:grade", "--log-dir", "own")
    train("rl", *flags, *own)
    lines = read_jsonl(folder / "own" / "metrics.jsonl")
    assert lines[0]["grader/graded"] == 16 and 0 < lines[0]["env/all/reward/total"] < 1
    found, _ = train("rl", *flags, "--task", "word_problems", "--log-dir", "words", "--learning-rate", 1e-4)
    assert found["state_path"].startswith("tinker://")


def test_full_with_evaluation_tasks(base_url, train, folder):
    """All weights are trained; the tasks run every eval_every steps, and results are stored beside checkpoints."""
    data = write_rows(folder / "sums.jsonl", SUMS)
    write_rows(folder / "asked.jsonl", SUMS[:5])
    flags = ("full", "-m", "lorimer/tiny", "--data", data, "--batch-size", 4, "--steps", 4, "--learning-rate", 1e-4)
    flags += ("--set", "eval_tasks=questions=asked.jsonl", "--set", "eval_limit=3", "--set", "eval_max_tokens=4")
    flags += ("--set", "eval_every=2", "--set", "save_every=2", "--set", "keep=null", "--set", "name=all of it")
    dry, _ = train(*flags, "--dry-run")
    assert dry["eval_items"] == {"asked": 3} and dry["num_evaluations"] == 3
    assert "3, each of 3 items of asked" in lorimer("train", *flags, "--dry-run", LORIMER_BASE_URL=base_url).stdout
    found, _ = train(*flags)
    assert found["log_dir"] == "runs/full" and "test/asked/accuracy" in found["metrics"]
    listed = lorimer("eval", "list", "--run", found["state_path"], "-f", "json", LORIMER_BASE_URL=base_url)
    stored = json.loads(listed.stdout)
    assert [(one["step"], one["task"], one["num_items"]) for one in stored["evaluations"]] == [
        (4, "asked", 3),
        (2, "asked", 3),
    ]
    lines = read_jsonl(folder / "runs" / "full" / "metrics.jsonl")
    assert [line["step"] for line in lines if "test/asked/accuracy" in line] == [0, 2, 4]
    trained = max(line.get("optim/num_parameters", 0) for line in lines)
    assert trained > 500_000, "all of about 900,000, and not an adapter"
    train(*flags, "--set", "eval_limit=2")  # what is measured may change when a run is resumed


def test_dry_run(base_url, train, folder):
    """Counts agree with the training itself; nothing is left in the log directory or among the checkpoints."""
    long = {"question": "Count.", "answer": " ".join(map(str, range(60)))}
    data = write_rows(folder / "sums.jsonl", [*SUMS, long, SUMS[0]])
    flags = ("sft", *COMMON[:-4], "-m", "lorimer/tiny", "--data", data, "--learning-rate", 1e-3, "--log-dir", "log")
    flags += ("--set", "num_held_out=4", "--set", "max_length=64")
    before = lorimer("checkpoint", "list", "-f", "json", LORIMER_BASE_URL=base_url).stdout
    found, _ = train(*flags, "--dry-run")
    assert not (folder / "log").exists()
    assert lorimer("checkpoint", "list", "-f", "json", LORIMER_BASE_URL=base_url).stdout == before
    assert "lorimer-dry-run" not in lorimer("run", "list", LORIMER_BASE_URL=base_url).stdout
    assert "lorimer train sft" in lorimer("session", "list", LORIMER_BASE_URL=base_url).stdout
    assert (found["num_examples"], found["num_held_out"], found["num_steps"]) == (58, 4, 15)
    assert found["num_truncated"] == 1 and found["problems"].keys() >= {"truncated", "duplicate"}
    assert found["seconds_per_step"] > 0 and found["seconds"] == pytest.approx(15 * found["seconds_per_step"])
    assert found["engine_bytes"] > 1e6 and found["available_bytes"] > 0
    train(*flags)
    lines = read_jsonl(folder / "log" / "metrics.jsonl")
    assert sum(line.get("num_tokens", 0) for line in lines) == found["num_tokens"]
    table = lorimer("train", *flags, "--dry-run", LORIMER_BASE_URL=base_url).stdout
    assert "without evaluations and checkpoints" in table and "1 truncated" in table
    rl = ("rl", *COMMON, "--task", "arithmetic", "--set", "max_tokens=6", "--set", "group_size=4", "--dry-run")
    found, _ = train(*rl)
    assert found["num_steps"] == 2 and 0 < found["num_tokens"] <= 2 * 16 * 6


def test_resumes_after_kill_and_ends_the_same(base_url, folder):
    """Killed without warning between two checkpoints; what is resumed is printed, and the end is the same."""
    data = write_rows(folder / "sums.jsonl", SUMS)
    flags = ["--model", "lorimer/tiny", "--data", data, "--rank", 4, "--batch-size", 2, "--steps", 16]
    flags += ["--learning-rate", 1e-3, "--set", "save_every=4", "--set", "eval_every=4"]

    def command(log_dir):
        given = [*flags, "--log-path", log_dir, "--base-url", base_url]
        return [sys.executable, "-m", "lorimer.cli.main", "train", "sft", *map(str, given)]

    surroundings = {"env": environment(OMP_NUM_THREADS="1"), "cwd": folder, "text": True}
    whole = subprocess.run(command("whole"), capture_output=True, timeout=300, **surroundings)
    assert whole.returncode == 0, whole.stderr
    with subprocess.Popen(command("killed"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **surroundings) as process:
        deadline = time.monotonic() + 200
        while len(read_jsonl(folder / "killed" / "metrics.jsonl")) < 6:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
    resumed = subprocess.run(command("killed"), capture_output=True, timeout=300, **surroundings)
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(r"^resumed at step \d+ from tinker://", resumed.stdout, re.MULTILINE)
    names = ("step", "train/nll", "test/nll")
    curves = [
        [{key: line[key] for key in names if key in line} for line in read_jsonl(folder / log / "metrics.jsonl")]
        for log in ("whole", "killed")
    ]
    for whole_line, killed_line in zip(*curves, strict=True):
        assert killed_line == pytest.approx(whole_line, rel=1e-3)
    again = subprocess.run(command("killed"), capture_output=True, timeout=300, **surroundings)
    assert "holds a complete run of 16 steps" in again.stdout
    write_rows(data, SUMS[1:])
    changed = subprocess.run(command("killed"), capture_output=True, timeout=300, **surroundings)
    assert changed.returncode == 2 and "data_sha256 was" in changed.stderr and changed.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["sft", "--set", "learning_rat=1"],
            "--set: there is no setting 'learning_rat'; the nearest is 'learning_rate'",
        ),
        (["sft", "--learning-rate", "-1"], "flag: learning_rate is -1.0; a number, 0 or more is accepted"),
        (["sft", "--data", "x.jsonl"], "base_model is needed"),
        (
            ["rl", "--task", "arithmetics"],
            "task is 'arithmetics'; arithmetic or word_problems or questions is accepted",
        ),
        (["sft", "-c", "none.yaml"], "'none.yaml' cannot be read"),
        (["dpo", "--set", "beta"], "NAME=VALUE is accepted"),
        (["schema", "ppo"], "there is no training 'ppo'; accepted are sft, rl, dpo, distill, full"),
        (["sft", "--set", "method=half"], "method is 'half'; lora or full is accepted"),
        (["full", "--rank", "4"], "there is no setting 'rank'"),
        (["full", "--set", "method=lora"], "there is no setting 'method'"),
    ],
)
def test_refusals(folder, arguments, told):
    code, line = refused(lorimer("train", *arguments))
    assert told in line and code in (1, 2)


def test_a_teacher_that_is_no_path_is_refused(base_url, folder):
    rows = write_rows(folder / "questions.jsonl", [{"question": row["question"]} for row in SUMS])
    flags = (*COMMON, "--data", rows, "--set", "max_tokens=6", "--set", "teacher_path=lorimer/tiny")
    ended = lorimer("train", "distill", *flags, LORIMER_BASE_URL=base_url)
    assert ended.exit_code == 2, ended.output
    assert "teacher_path is 'lorimer/tiny'; a tinker:// path is accepted, and teacher_model" in ended.stderr


def test_groups_that_the_server_refuses_are_lost_without_a_traceback(base_url, folder, caplog):
    flags = (*COMMON, "--task", "arithmetic", "--set", "max_tokens=2000")
    ended = lorimer("train", "rl", *flags, LORIMER_BASE_URL=base_url)
    assert ended.exit_code == 1 and "exceed the context length 1024" in ended.stderr, ended.output
    lost = [one for one in caplog.records if "a group was lost" in one.message]
    assert lost and not any(one.exc_info for one in lost)


def test_wrong_rows_are_named(base_url, folder):
    data = write_rows(folder / "rows.jsonl", [SUMS[0], {"text": "?"}])
    ended = lorimer("train", "sft", "-m", "lorimer/tiny", "--data", data, LORIMER_BASE_URL=base_url)
    assert ended.exit_code == 2 and "row 2 of the data: a row has the fields ['text']" in ended.stderr


def test_schema_is_printed():
    found = json.loads(lorimer("train", "schema", "rl").stdout)
    assert found["additionalProperties"] is False and {"task", "max_tokens", "base_model"} == set(found["required"])
    assert found["properties"]["asynchronous"]["anyOf"][0]["properties"]["stale"]["enum"] == ["requeue", "drop"]
