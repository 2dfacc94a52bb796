"""``lorimer run`` against a server with a trained run."""

import math

from tests.cli.conftest import MODEL, RANK


def test_list_as_table(alice, trained):
    shown = alice("run", "list")
    header, *rows = shown.splitlines()
    assert header.split() == ["run", "id", "status", "steps", "base", "model", "last", "request", "tags"]
    (row,) = [line for line in rows if trained.run_id in line]
    assert MODEL in row and " running " in row
    assert " ago" in row or "now" in row


def test_show_and_change(alice, trained):
    name = alice.json("run", "show", trained.run_id)["name"]
    assert alice("run", "rename", name, "pot [bold]") == f"{trained.run_id}: is now pot [bold]\n"
    assert alice("run", "note", "pot [bold]", "sings") == f"{trained.run_id}: noted\n"
    assert alice("run", "tag", trained.run_id, "tea", "old") == f"{trained.run_id}: has the tags tea, old\n"
    assert alice.json("run", "tag", trained.run_id, "--remove", "old")["tags"] == ["tea"]
    assert "no tag 'old'" in alice.refused("run", "tag", trained.run_id, "--remove", "old")[1]
    shown = alice("run", "show", "pot [bold]")
    for text in ("pot [bold]", trained.run_id, "running", "tea", "sings", MODEL, "loss:sum"):
        assert text in shown
    found = alice.json("run", "list", "tag=tea", "--sort", "name", "--show", "max.loss:sum")
    assert [run["run_id"] for run in found["runs"]] == [trained.run_id]
    assert "no run is called 'kettle'" in alice.refused("run", "show", "kettle")[1]
    assert "there is no field 'rnk'" in alice.refused("run", "list", "rnk>3")[1]


def test_archive_and_delete(alice, trained):
    import lorimer

    with lorimer.ServiceClient(base_url=alice.url, api_key=alice.key) as service:
        run_id = service.create_lora_training_client(MODEL, rank=1, name="short").model_id
        assert "is running" in alice.run("run", "delete", "short", "--yes").stderr
    assert alice("run", "archive", "short") == f"{run_id}: archived\n"
    assert alice.json("run", "list", "short")["total_count"] == 0
    assert alice.json("run", "list", "short", "--archived", "yes")["total_count"] == 1
    assert alice("run", "archive", "short", "--undo") == f"{run_id}: unarchived\n"
    assert "--yes" in alice.refused("run", "delete", "short", "-f", "json")[1]
    assert alice.run("run", "delete", "short", text="n\n").exit_code == 1
    assert alice("run", "delete", "short", "--yes") == f"{run_id}: deleted\n"
    assert alice.refused("run", "show", run_id)[0] == 4


def test_ids_are_whole_in_a_narrow_terminal(alice, trained):
    shown = alice("run", "list", COLUMNS="60")
    assert max(map(len, shown.splitlines())) <= 60
    header = shown.splitlines()[0]
    begin, end = header.index("id"), header.index("status")
    assert trained.run_id in "".join(line[begin:end].strip() for line in shown.splitlines())


def test_list_as_json(alice, trained):
    found = alice.json("run", "list", "--limit", 0)
    assert found["total_count"] == len(found["runs"])
    run = next(one for one in found["runs"] if one["run_id"] == trained.run_id)
    assert (run["base_model"], run["status"], run["num_parts"]) == (MODEL, "running", 1)


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
    assert (found["training_run_id"], found["lora_rank"]) == (trained.run_id, RANK)
    assert found["replica"] == f"{MODEL}#0"
    assert {one["checkpoint_type"] for one in found["checkpoints"]} == {"training", "sampler", "external"}


def test_metrics(alice, trained):
    trained.trainer.log_metrics({"reward": 0.5, "bad": math.nan}, 0).result()
    trained.trainer.log_metrics({"reward": 0.25, "bad": math.nan}, 1).result()
    lines = {line.split()[0]: line.split()[1:] for line in alice("run", "metrics", trained.run_id).splitlines()}
    assert lines["reward"] == ["client", "2", "1", "0.5", "0.25", "0.25", "0.5"]
    assert lines["bad"] == ["client", "2", "1"]
    assert lines["loss:sum"][:3] == ["engine", "1", "0"]
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
