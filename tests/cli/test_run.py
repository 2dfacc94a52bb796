"""``lorimer run`` against a server with a trained run."""

import math

from tests.cli.conftest import MODEL, RANK


def test_list_as_table(alice, trained):
    shown = alice("run", "list")
    header, *rows = shown.splitlines()
    assert header.split() == [
        "run",
        "base",
        "model",
        "rank",
        "last",
        "request",
        "last",
        "checkpoint",
        "replica",
        "state",
    ]
    (row,) = [line for line in rows if trained.run_id in line]
    assert MODEL in row and f" {RANK} " in row and " ok" in row
    assert "weights/first" in row or "sampler_weights/final" in row  # they were saved side by side
    assert " ago" in row or "now" in row
    assert " #0 " in row


def test_ids_are_whole_in_a_narrow_terminal(alice, trained):
    shown = alice("run", "list", COLUMNS="60")
    assert max(map(len, shown.splitlines())) <= 60
    assert trained.run_id in "".join(line.split()[0] for line in shown.splitlines() if line[:1].strip())


def test_list_as_json(alice, trained):
    found = alice.json("run", "list", "--limit", 0)
    assert found["total_count"] == len(found["runs"])
    run = next(one for one in found["runs"] if one["training_run_id"] == trained.run_id)
    assert (run["base_model"], run["lora_rank"], run["corrupted"]) == (MODEL, RANK, False)
    assert run["replica"] == f"{MODEL}#0"
    assert run["last_checkpoint"]["tinker_path"] == trained.training


def test_limit_says_what_is_left_out(alice, trained):
    shown = alice.run("run", "list", "--limit", 1)
    assert len(shown.stdout.splitlines()) == 2
    total = alice.json("run", "list", "--limit", 1)["total_count"]
    assert shown.stderr == f"1 of {total} runs; --limit 0 shows all\n"
    assert alice.run("run", "list", "--limit", 0).stderr == ""


def test_others_have_no_runs(bob, trained):
    shown = bob.run("run", "list")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "", "no runs\n")
    assert bob.json("run", "list") == {"runs": [], "total_count": 0}


def test_info(alice, trained):
    shown = alice("run", "info", trained.run_id)
    for text in (trained.run_id, MODEL, trained.training, trained.sampler, trained.external):
        assert text in shown
    assert "purpose=cli [bold]\\x1b[31m" in shown  # neither markup nor control codes have an effect
    found = alice.json("run", "info", trained.training)
    assert found["training_run_id"] == trained.run_id
    assert {one["checkpoint_type"] for one in found["checkpoints"]} == {"training", "sampler", "external"}


def test_metrics(alice, trained):
    trained.trainer.log_metrics({"reward": 0.5, "bad": math.nan}, 0).result()
    trained.trainer.log_metrics({"reward": 0.25, "bad": math.nan}, 1).result()
    lines = {line.split()[0]: line.split()[1:] for line in alice("run", "metrics", trained.run_id).splitlines()}
    assert lines["reward"] == ["client", "2", "1", "0.5", "0.25", "0.25", "0.5"]
    assert lines["bad"] == ["client", "2", "1"]
    assert lines["loss:sum"][:3] == ["engine", "1", "1"]
    found = alice.json("run", "metrics", trained.training, "--name", "re*")
    (series,) = found["series"]
    assert (series["name"], [value for _, _, value in series["points"]]) == ("reward", [0.5, 0.25])
    shown = alice.run("run", "metrics", trained.run_id, "--name", "nothing")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "", "no metrics\n")


def test_run_that_is_not_there_or_of_others(alice, bob, trained):
    for user, run in ((alice, "nothing:train:0"), (bob, trained.run_id)):
        code, line = user.refused("run", "info", run, "-f", "json")
        assert code == 4
        assert run in line
