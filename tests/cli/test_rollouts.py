"""``lorimer run rollouts`` against a server with rollouts: tables, one in full, JSON and exports."""

import json

import pytest

import lorimer
from tests.cli.conftest import MODEL


@pytest.fixture(scope="module")
def run_id(alice):
    def rollout(number, **fields):
        turns = [
            {"role": "user", "content": f"{number} + 1"},
            {
                "role": "assistant",
                "content": f"it is {number + 1}",
                "tokens": [5] * number,
                "logprobs": [-1.0] * number,
            },
            {"role": "tool", "content": "[red]\x1b[31m", "logs": {"note": "late"}},
        ]
        return {"turns": turns, "reward": number / 2, "stop_reason": "length" if number > 2 else "stop", **fields}

    with lorimer.ServiceClient(base_url=alice.url, api_key=alice.key) as service:
        trainer = service.create_lora_training_client(MODEL, rank=1, name="chatty")
        for step in range(2):
            sent = trainer.log_rollouts(
                [rollout(number, group="g", errors=["odd"][:step]) for number in range(5)], step
            )
            sent.result()
        yield trainer.model_id


def test_table(alice, run_id):
    header, *rows = alice("run", "rollouts", "chatty", "--step", 1, "--sort", "-reward", "--limit", 2).splitlines()
    assert header.split() == ["id", "step", "split", "group", "reward", "tokens", "turns", "stop", "answer"]
    assert [row.split()[1:] for row in rows] == [
        ["1", "train", "g/4", "2", "4", "3", "length", "it", "is", "5"],
        ["1", "train", "g/3", "1.5", "3", "3", "length", "it", "is", "4"],
    ]
    assert alice.run("run", "rollouts", run_id, "--limit", 3).stderr == "3 of 10 rollouts; --limit 0 shows all\n"
    assert alice.run("run", "rollouts", run_id, "--where", "reward>9").stderr == "no rollouts\n"


def test_json_and_conditions(alice, run_id):
    found = alice.json("run", "rollouts", run_id, "--where", "stop=length", "--where", '"IT is 5"', "--limit", 0)
    assert [(one["step"], one["number"]) for one in found["rollouts"]] == [(1, 4), (0, 4)]
    assert found["rollouts"][0]["content"]["turns"][1]["logprobs"] == [-1.0] * 4
    assert "accepted are" in alice.refused("run", "rollouts", run_id, "--where", "loss<1")[1]
    assert "not sorted by 'text'" in alice.refused("run", "rollouts", run_id, "--sort", "text")[1]


def test_one_in_full(alice, run_id):
    number = alice.json("run", "rollouts", run_id, "--where", "step=1 number=3")["rollouts"][0]["rollout_id"]
    shown = alice("run", "rollouts", run_id, "--id", number)
    for text in ("3 + 1", "it is 4", "odd", "── assistant", "[red]\\x1b[31m", "late", "1.5"):
        assert text in shown
    assert alice.json("run", "rollouts", run_id, "--id", number)["rollout_id"] == number
    assert alice.refused("run", "rollouts", run_id, "--id", 10**9)[0] == 4


def test_export(alice, run_id, tmp_path):
    path = tmp_path / "found.jsonl"
    assert alice.run("run", "rollouts", run_id, "--export", path).stderr == f"10 rollouts in {path}\n"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len(lines) == 10 and lines[0]["content"]["turns"][2]["content"] == "[red]\x1b[31m"
    assert "exists" in alice.refused("run", "rollouts", run_id, "--export", path)[1]
    missing = tmp_path / "no" / "x.jsonl"
    assert "cannot be written" in alice.refused("run", "rollouts", run_id, "--export", missing)[1]
    assert sorted(tmp_path.iterdir()) == [path]
