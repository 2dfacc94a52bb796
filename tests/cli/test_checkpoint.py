"""``lorimer checkpoint`` against a server: lists, facts, and everything that changes a checkpoint."""

import json

import pytest


@pytest.fixture
def saved(trained):
    """Two checkpoints that a test may change."""
    futures = [trained.trainer.save_state(f"kept-{number}", overwrite=True) for number in range(2)]
    return [future.result().path for future in futures]


def paths(found):
    return [one["tinker_path"] for one in found["checkpoints"]]


def test_list(alice, trained):
    shown = alice("checkpoint", "list", "--limit", 0)
    for path in (trained.training, trained.sampler, trained.external):
        assert path in shown
    assert " kB" in shown or " MB" in shown
    assert "never" in shown


def test_list_of_a_run_and_a_kind(alice, bob, trained):
    everything = alice.json("checkpoint", "list", "--run-id", trained.run_id, "--limit", 0)
    assert everything["total_count"] == len(everything["checkpoints"]) >= 3
    assert paths(alice.json("checkpoint", "list", "--run-id", trained.run_id, "--type", "external")) == [
        trained.external
    ]
    assert paths(alice.json("checkpoint", "list", "-t", "sampler")) == [trained.sampler]
    assert len(paths(alice.json("checkpoint", "list", "--limit", 1))) == 1
    assert bob.json("checkpoint", "list") == {"checkpoints": [], "total_count": 0}


def test_info(alice, trained):
    shown = alice("checkpoint", "info", trained.sampler)
    for text in (trained.sampler, "lorimer/debug", "attention, mlp, output head", "never"):
        assert text in shown
    found = alice.json("checkpoint", "info", trained.training)
    assert found["tinker_path"] == trained.training and found["size_bytes"] > 0
    assert found["weights"]["lora_rank"] == 4


def test_ttl_is_set_and_removed(alice, saved):
    assert alice.json("checkpoint", "set-ttl", *saved, "--ttl", "2h") == {"done": saved, "failed": []}
    assert "in 1 h" in alice("checkpoint", "info", saved[0])
    assert "kept for ever" in alice("checkpoint", "set-ttl", *saved, "--remove")
    assert [alice.json("checkpoint", "info", path)["expires_at"] for path in saved] == [None, None]


def test_published_checkpoints_are_for_everybody(alice, bob, saved):
    assert bob.refused("checkpoint", "info", saved[0])[0] == 4
    assert "published" in alice("checkpoint", "publish", saved[0])
    assert bob.json("checkpoint", "info", saved[0])["public"]
    assert alice("checkpoint", "unpublish", saved[0])
    assert bob.refused("checkpoint", "info", saved[0])[0] == 4


def test_delete_asks(alice, saved):
    run = alice.run("checkpoint", "delete", *saved, text="n\n")
    assert run.exit_code == 1
    assert run.stdout == " n\n"  # what was typed, which the runner shows instead of a terminal
    assert "Delete these 2 checkpoints?" in run.stderr and saved[0] in run.stderr
    run = alice.run("checkpoint", "delete", saved[0], "-f", "json", text="y\n")
    assert json.loads(run.stdout.removeprefix(" y\n")) == {"done": [saved[0]], "failed": []}
    assert alice("checkpoint", "delete", saved[1], "--yes") == f"{saved[1]}: deleted\n"


def test_delete_by_run_kind_and_age(alice, trained, saved):
    def delete(*options):
        return alice.json("checkpoint", "delete", "--run", trained.run_id, "--type", "training", "-y", *options)["done"]

    assert delete("--before", "1h") == []
    assert delete("--after", "2999-01-01") == []
    trained.trainer.save_state("first", overwrite=True).result()
    assert set(delete("--after", "1h")) >= {*saved, trained.training}
    trained.trainer.save_state("first").result()
    assert trained.sampler in paths(alice.json("checkpoint", "list", "--limit", 0))


def test_what_fails_is_told_and_the_rest_is_done(alice, saved):
    gone = saved[0].replace("kept-0", "never-was")
    run = alice.run("checkpoint", "delete", "-y", gone, *saved, "-f", "json")
    assert run.exit_code == 4
    found = json.loads(run.stdout)
    assert found["done"] == saved
    assert [one["tinker_path"] for one in found["failed"]] == [gone]
    assert gone in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "weights/x"], "is no checkpoint; accepted is tinker://"),
        (["delete"], "nothing is named"),
        (["delete", "tinker://a/weights/b", "--run-id", "a"], "not both"),
        (["delete", "tinker://a/weights/b", "--before", "7d"], "--run-id"),
        (["delete", "--run-id", "a", "--before", "yesterday"], "'yesterday' is no time"),
        (["set-ttl", "tinker://a/weights/b"], "--ttl and --remove"),
        (["set-ttl", "tinker://a/weights/b", "--ttl", "soon"], "'soon' is no length of time"),
        (["publish", "tinker://a/b"], "with one of the segments"),
        (["download", "tinker://a/weights/b", "nonsense"], "'nonsense' is no checkpoint"),
    ],
)
def test_wrong_usage(alice, arguments, message):
    code, line = alice.refused("checkpoint", *arguments)
    assert code == 2
    assert message in line


def test_ttl_that_the_server_refuses_is_wrong_usage(alice, trained):
    run = alice.run("checkpoint", "set-ttl", trained.training, "--ttl", "1s")
    assert (run.exit_code, "ttl_seconds" in run.stderr) == (2, True)
