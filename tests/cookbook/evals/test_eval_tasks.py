"""Tasks and graders: rows in, items and grades out; and what is refused before anything is sampled."""

import json

import pytest

from lorimer.cookbook.evals.data_files import read_task_rows
from lorimer.cookbook.evals.eval_tasks import SamplingSettings, file_task, gsm8k_task, make_items, svamp_task
from lorimer.cookbook.evals.judged import RATINGS, VERDICTS, check_turns, consistent, read_verdict
from lorimer.cookbook.evals.multiple_choice import multiple_choice_task, right_choice
from lorimer.cookbook.evals.named_graders import grader_settings, named_grader
from lorimer.errors import InvalidInput

ROWS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(5) for b in range(5)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("grader", "answer", "right", "wrong"),
    [
        ("exact", "green", " green\n", "Green, of course"),
        ("numeric", "1,200", "So it is $1200.00", "1200 and 3"),
        ("numeric", "x\n#### 7", "#### 7 and not 8", "7 is near #### 8"),
        ("contains", "Green", "it is green, I think", "blue"),
        ("regex", r"\bgr(e|a)y\b", "a gray cat", "greyish"),
    ],
)
def test_graders(grader, answer, right, wrong):
    grade = named_grader(grader)
    assert (grade(right, {"answer": answer}), grade(wrong, {"answer": answer})) == (True, False)


def test_a_grader_of_ones_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def half(reply, row):\n    return 0.5 * (row['key'] in reply)\nnumber = 3\n", "utf-8")
    grade = named_grader(f"python:{file}:half")
    assert grade("a key", {"key": "key"}) == 0.5
    first = grader_settings(f"python:{file}:half")
    assert first["grader"] == "python:mine.py:half"
    file.write_text("def half(reply, row):\n    return 1\n", "utf-8")
    assert grader_settings(f"python:{file}:half")["grader_digest"] != first["grader_digest"]
    for wrong in (f"python:{file}:none", "python:nothing.py:f", "python:f", "fuzzy"):
        with pytest.raises(InvalidInput, match=r"grader|function"):
            named_grader(wrong)


def test_items_have_ids_of_their_content(tmp_path):
    items = make_items([*ROWS, ROWS[0]])
    assert len({item.item_id for item in items}) == len(ROWS) + 1
    assert items[-1].item_id == f"{items[0].item_id}-2"
    again = make_items(list(reversed(ROWS)))
    assert {item.item_id for item in again} == {item.item_id for item in items[:-1]}
    few = make_items(ROWS, 6, seed=1)
    assert len(few) == 6 and few == [item for item in make_items(ROWS) if item in few]
    assert few == make_items(ROWS, 6, seed=1) != make_items(ROWS, 6, seed=2)
    more = make_items(ROWS, 9, seed=1)
    assert {item.item_id for item in few} <= {item.item_id for item in more}, "a larger limit adds items"
    assert make_items(ROWS, 1000) == make_items(ROWS)


def test_data_are_given_or_in_the_cache_and_never_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InvalidInput, match=r"gsm8k.*test\.jsonl.*github\.com/openai.*--data"):
        gsm8k_task()
    (tmp_path / "lorimer/data/gsm8k").mkdir(parents=True)
    write(tmp_path / "lorimer/data/gsm8k/test.jsonl", [{"question": "q", "answer": "so\n#### 3"}])
    assert [item.row["question"] for item in gsm8k_task().items] == ["q"]
    with pytest.raises(InvalidInput, match=r"needs data"):
        read_task_rows("questions", None)
    with pytest.raises(InvalidInput, match=r"\.jsonl or \.json"):
        read_task_rows("gsm8k", "openai/gsm8k")


def test_svamp_joins_body_and_question(tmp_path):
    rows = [
        {"Body": "A pack costs 76 dollars", "Question": "How much is it?", "Answer": 51.0},
        {"Body": "There are 5 cats.", "Question": "How many?", "Answer": 2.5},
    ]
    (tmp_path / "s.json").write_text(json.dumps(rows), "utf-8")
    found = [dict(item.row) for item in svamp_task(str(tmp_path / "s.json")).items]
    assert found == [
        {"question": "A pack costs 76 dollars. How much is it?", "answer": "51"},
        {"question": "There are 5 cats. How many?", "answer": "2.5"},
    ]


def test_settings_say_what_a_result_depends_on(tmp_path):
    path = write(tmp_path / "sums.jsonl", ROWS)
    greedy = file_task(path, "exact", sampling=SamplingSettings(max_tokens=8, seed=5))
    assert greedy.name == "sums"
    assert greedy.settings == {"grader": "exact", "max_tokens": 8, "temperature": 0.0, "num_samples": 1}
    hot = SamplingSettings(temperature=0.5, num_samples=4, seed=5)
    assert file_task(path, "exact", sampling=hot, suffix="!").settings["seed"] == 5
    for wrong in ({"num_samples": 2}, {"temperature": -1}, {"max_tokens": 0}):
        with pytest.raises(InvalidInput, match="accepted"):
            SamplingSettings(**wrong)
    with pytest.raises(InvalidInput, match=r"row 1 .* no number"):
        file_task(write(tmp_path / "w.jsonl", [{"question": "q", "answer": "red"}]), "numeric")
    with pytest.raises(InvalidInput, match=r"row 1 .* no answer"):
        file_task(write(tmp_path / "n.jsonl", [{"question": "q"}]), "exact")


@pytest.mark.parametrize(("answer", "place"), [(1, 1), ("B", 1), ("b", 1), ("seven", 0), ("10", 2)])
def test_the_right_choice(answer, place):
    assert right_choice({"choices": ["seven", "9", "10"], "answer": answer}) == place


@pytest.mark.parametrize("row", [("x",), (3,), (-1,), (True,), (0, ["one"]), (0, "ab"), (0, ["a", ""])])
def test_refuses_choices_by_name(row, tmp_path):
    wrong = {"question": "q", "answer": row[0], "choices": row[1] if len(row) > 1 else ["a", "b", "c"]}
    with pytest.raises(InvalidInput, match=r"answer is|choices is"):
        multiple_choice_task(write(tmp_path / "c.jsonl", [wrong]))


def test_a_verdict_counts_if_it_survives_the_exchange_of_places():
    assert [consistent(a, b) for a, b in ((1, 1), (0, 0), (0.5, 0.5), (1, 0), (0, 1), (1, 0.5))] == [
        1,
        0,
        0.5,
        0.5,
        0.5,
        0.5,
    ]
    with pytest.raises(InvalidInput, match=r"turns is"):
        check_turns({"turns": "hello"})


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Good. Rating: [[3]] no, Rating: [[ 10 ]].", "10"),
        ("[[2]] [[99]]", "2"),
        ("Rating: 7", None),
        ("[[7.5]]", None),
    ],
)
def test_the_last_verdict_in_brackets_counts(text, verdict):
    assert read_verdict(text, RATINGS) == verdict


def test_verdicts_of_comparisons():
    assert [read_verdict(f"So: [[{letter}]]", VERDICTS) for letter in "ABCD"] == ["A", "B", "C", None]
