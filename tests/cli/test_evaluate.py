"""``lorimer eval`` against a server: evaluates, lists, shows, compares, deletes; and what it refuses."""

import json

import pytest

from tests.cli.commands import lorimer, refused
from tests.cli.conftest import MODEL


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "colours.jsonl"
    rows = [{"question": f"What colour has thing {number}?", "answer": "."} for number in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def grader(tmp_path_factory):
    path = tmp_path_factory.mktemp("grader") / "mine.py"
    path.write_text("def grade(reply, row):\n    return len(reply) % 2\n", "utf-8")
    return f"python:{path}:grade"


@pytest.fixture
def cache(tmp_path):
    return {"XDG_CACHE_HOME": str(tmp_path)}


def test_evaluates_lists_and_compares(alice, bob, trained, questions, grader, cache, tmp_path):
    name = alice.json("run", "show", trained.run_id)["name"]
    words = ["--data", questions, "--grader", grader, "--max-tokens", 4]
    made = alice.json("eval", f"{name}@last", MODEL, *words, **cache)["evaluations"]
    assert [one["model"] for one in made] == [trained.sampler, MODEL]
    assert {(one["task"], one["num_items"], one["method"]) for one in made} == {("colours", 5, "wilson")}
    assert (made[0]["run_name"], made[0]["step"]) == (name, 1)
    assert not list(tmp_path.rglob("*.jsonl")), "a journal ends with its evaluation"
    again = alice.json("eval", trained.sampler, *words, "--save", tmp_path / "kept", **cache)["evaluations"]
    assert (again[0]["value"], again[0]["variant"]) == (made[0]["value"], made[0]["variant"])
    (kept,) = (tmp_path / "kept").glob("colours-*.jsonl")
    assert len(kept.read_text("utf-8").splitlines()) == 5
    resumed = alice.run("eval", trained.sampler, *words, "--save", tmp_path / "kept", **cache)
    assert "5 of 5 items of colours are done" in resumed.stderr
    listed = alice.json("eval", "list", "--run", name)
    assert [one["evaluation_id"] for one in listed["evaluations"]][-1] == made[0]["evaluation_id"]
    assert alice.json("eval", "list", "--model", MODEL, "--on", "colours")["total_count"] == 1
    shown = alice("eval", "list")
    assert all(word in shown for word in (trained.sampler, "colours", "accuracy", f"{name} @1"))
    (found,) = alice.json("eval", "compare", MODEL, f"{name}@last")["comparisons"]
    assert (found["num_items"], found["test"], found["first"]["model"]) == (5, "mcnemar", MODEL)
    assert "mcnemar" in alice("eval", "compare", trained.sampler, MODEL)
    details = alice("eval", "show", made[0]["evaluation_id"])
    assert "grader = python:mine.py:grade" in details and "Wilson" in details
    assert bob.refused("eval", "show", made[0]["evaluation_id"])[0] == 4
    assert bob.json("eval", "list") == {"evaluations": [], "total_count": 0}
    ids = [one["evaluation_id"] for one in alice.json("eval", "list", "--limit", 0)["evaluations"]]
    assert alice("eval", "delete", *ids) == "".join(f"{one}: deleted\n" for one in ids)
    assert alice.run("eval", "list").stderr == "no evaluations\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--on is missing"),
        (("--on", "gsm9k"), "there is no task 'gsm9k'; accepted are gsm8k"),
        (("--on", "gsm8k,svamp", "--data", "x.jsonl"), "the file of one task"),
        (("--on", "questions", "--data", "x.jsonl"), "needs --grader"),
        (("--on", "mt_bench"), "needs --judge"),
        (("--on", "gsm8k", "--judge", "x"), "--judge is for the task mt_bench"),
        (("--on", "sums", "--with", "helm"), "accepted are inspect and lm-eval"),
        (("--on", "sums", "--with", "inspect", "--grader", "exact"), "--grader is for built-in tasks"),
    ],
)
def test_refuses_options_before_it_looks_for_a_server(words, said):
    code, line = refused(lorimer("eval", MODEL, *words, LORIMER_BASE_URL="http://127.0.0.1:9"))
    assert (code, said in line) == (2, True), line


def test_refuses_models_and_data_by_name(alice, trained, questions, cache):
    words = ["--data", questions, "--grader", "exact"]
    for model, said in (
        ("nothing", "is not a model"),
        ("nobody@last", "no run is called 'nobody'"),
        (f"{trained.run_id}@7", "no checkpoint '7'"),
        ("tinker://x:train:0/weights/y", "x:train:0"),
    ):
        assert said in alice.refused("eval", model, *words, **cache)[1]
    assert "github.com/openai" in alice.refused("eval", MODEL, "--on", "gsm8k", **cache)[1]
    assert "at temperature 0" in alice.refused("eval", MODEL, *words, "--samples", 2, **cache)[1]
