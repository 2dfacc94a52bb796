"""The check of training data: what it counts is what training sends, and everything wrong is found in files made so."""

import json
from pathlib import Path

import numpy as np
import pytest

from lorimer.chat.conversation import TrainOn
from lorimer.cookbook.data_check import check_data, count_problems
from lorimer.cookbook.datasets import datum_maker, split_off
from lorimer.cookbook.renderers import get_renderer
from lorimer.errors import InvalidInput

SUMS = [{"question": f"What is {a} + 3?", "answer": str(a + 3)} for a in range(20)]


@pytest.fixture(scope="module")
def renderer():
    from transformers import AutoTokenizer

    import lorimer.models.tiny

    return get_renderer("auto", AutoTokenizer.from_pretrained(Path(lorimer.models.tiny.__path__[0])))


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_counts_are_those_of_training(renderer, tmp_path):
    report = check_data(write(tmp_path / "d.jsonl", SUMS), renderer, num_held_out=4)
    rows, _ = split_off(SUMS, 4, 0)
    datums = [datum for row in rows for datum in datum_maker(renderer, max_length=1024)(row)]
    trained = sum(np.count_nonzero(datum.loss_fn_inputs["weights"].to_numpy()) for datum in datums)
    assert (report.num_rows, report.num_held_out, report.num_examples) == (20, 4, 16)
    assert report.num_trained_tokens == trained
    assert report.findings == [] and report.num_truncated == 0
    assert report.lengths["min"] <= report.lengths["median"] <= report.lengths["max"]


def test_preview_shows_what_is_trained_on(renderer, tmp_path):
    path = write(tmp_path / "d.jsonl", [{"question": "Grüße?", "answer": "5 é"}])
    (preview,) = check_data(path, renderer, num_shown=1).previews
    assert [span.text for span in preview if span.is_trained] == ["5 é<|im_end|>"]
    assert "Grüße?" in preview[0].text and not preview[0].is_trained
    for span in preview:
        assert "".join(span.pieces) == span.text
    user = check_data(path, renderer, train_on=TrainOn.ALL_USER_AND_SYSTEM_MESSAGES, num_shown=1).previews[0]
    assert "Grüße?" in "".join(span.text for span in user if span.is_trained)


def test_everything_that_is_wrong_is_found(renderer, tmp_path):
    long = {"question": "Count.", "answer": " ".join(map(str, range(200)))}
    hidden = {"question": " ".join(map(str, range(200))), "answer": "5"}
    rows = [*SUMS[:5], "{broken", "[1]", {"text": "?"}, {"messages": []}, long, hidden, "", SUMS[0]]
    spaced = {"question": "what  is 2 + 3?", "answer": "another"}
    held_out = write(tmp_path / "h.jsonl", [SUMS[9], spaced, "no"])
    report = check_data(write(tmp_path / "d.jsonl", rows), renderer, held_out_data=held_out, max_length=64)
    found = {(one.problem, one.file, one.row) for one in report.findings}
    assert found == {
        *(("form", "data", row) for row in (6, 7, 8, 9)),
        ("form", "held_out", 3),
        ("truncated", "data", 10),
        ("nothing_trained", "data", 11),
        ("duplicate", "data", 13),
        ("leak", "held_out", 2),
    }
    assert count_problems(report.findings)["form"] == 5
    assert report.num_truncated == 2 and report.lengths["max"] > 64
    assert "row 1" in next(one.text for one in report.findings if one.problem == "duplicate")


def test_leak_within_the_split_of_training(renderer, tmp_path):
    """The same questions with other answers are no duplicates, but half of them are measured with."""
    rows = [*SUMS, *({"question": row["question"], "answer": "no"} for row in SUMS)]
    report = check_data(write(tmp_path / "d.jsonl", rows), renderer, num_held_out=6)
    assert set(count_problems(report.findings)) == {"leak"}
    _, held_out = split_off(rows, 6, 0)
    learned = [row["question"] for row in rows if row not in held_out]
    assert len(report.findings) == sum(row["question"] in learned for row in held_out)


def test_pairs_and_questions(renderer, tmp_path):
    pairs = [{"prompt": row["question"], "chosen": row["answer"], "rejected": "no"} for row in SUMS]
    same = {"prompt": "What?", "chosen": "a", "rejected": "a"}
    report = check_data(write(tmp_path / "p.jsonl", [*pairs, same]), renderer, num_held_out=0)
    assert report.form == "dpo" and report.num_examples == 40
    assert [(one.problem, one.row) for one in report.findings] == [("form", 21)]
    report = check_data(write(tmp_path / "q.jsonl", [*SUMS, {"question": "?"}]), renderer, form="rl")
    assert report.num_trained_tokens == 0 and [(one.problem, one.row) for one in report.findings] == [("form", 21)]
    assert check_data(tmp_path / "q.jsonl", renderer, form="distill", num_held_out=0).findings == []


def test_file_without_rows_is_refused(renderer, tmp_path):
    with pytest.raises(InvalidInput, match="has no rows"):
        check_data(write(tmp_path / "d.jsonl", ["{"]), renderer)
    with pytest.raises(InvalidInput, match="cannot be read"):
        check_data(tmp_path / "none.jsonl", renderer)
