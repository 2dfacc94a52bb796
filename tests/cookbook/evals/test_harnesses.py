"""What inspect-ai and lm-eval write, in the form of their logs, becomes grades of items."""

import json

import pytest

from lorimer.cookbook.evals.harnesses import (
    HarnessRun,
    check_installed,
    read_inspect_logs,
    read_lm_eval_samples,
    run_harness,
)
from lorimer.errors import InvalidInput, LorimerError


@pytest.fixture
def run(tmp_path):
    return HarnessRun(tasks=["sums"], model="m", base_url="http://127.0.0.1:1", api_key="k", log_dir=tmp_path, limit=3)


def inspect_log(run, samples, status="success"):
    log = {"status": status, "eval": {"task": "mine/sums"}, "samples": samples, "error": {"message": "no tea"}}
    (run.log_dir / "2026_sums.json").write_text(json.dumps(log), "utf-8")


def test_scores_of_inspect(run):
    inspect_log(
        run,
        [
            {"id": 1, "epoch": 1, "scores": {"match": {"value": "C"}, "parts": {"value": {"form": 1, "fact": 0.5}}}},
            {"id": 1, "epoch": 2, "scores": {"match": {"value": "I"}, "parts": {"value": {"form": 0, "fact": True}}}},
            {"id": 2, "epoch": 1, "scores": {"match": {"value": "P"}, "parts": {"value": {"form": 0, "fact": 0}}}},
            {"id": 2, "epoch": 2, "scores": {"match": {"value": "N"}, "parts": {"value": {"form": 1, "fact": 0}}}},
        ],
    )
    found = {one.metric: one for one in read_inspect_logs(run)}
    assert {name: one.grades for name, one in found.items()} == {
        "match": [[1, 0], [0.5, 0]],
        "parts/form": [[1, 0], [0, 1]],
        "parts/fact": [[0.5, 1], [0, 0]],
    }
    assert (found["match"].task, found["match"].items) == ("sums", ["1", "2"])


def test_refuses_what_is_not_a_grade(run):
    inspect_log(run, [{"id": 1, "scores": {"essay": {"value": "lovely"}}}])
    with pytest.raises(InvalidInput, match="'essay' of 'sums' is 'lovely'"):
        list(read_inspect_logs(run))
    inspect_log(run, [], status="error")
    with pytest.raises(LorimerError, match="no tea"):
        list(read_inspect_logs(run))


def test_samples_of_lm_eval(run):
    lines = [
        {"doc_id": n, "doc_hash": "ab" * 32, "filter": kind, "metrics": ["exact_match"], "exact_match": float(value)}
        for kind, values in (("strict", (0, 1)), ("loose", (1, 1)))
        for n, value in enumerate(values)
    ]
    folder = run.log_dir / "m"
    folder.mkdir()
    file = folder / "samples_sums_chat_2026-11-17T10-00-00.123.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    found = list(read_lm_eval_samples(run))
    assert [(one.task, one.metric, one.grades) for one in found] == [
        ("sums_chat", "exact_match,strict", [[0], [1]]),
        ("sums_chat", "exact_match,loose", [[1], [1]]),
    ]
    assert found[0].items == ["0-" + "ab" * 6, "1-" + "ab" * 6]
    assert found[0].settings == {"temperature": 0.0, "limit": 3}
    line = lines[0] | {"exact_match": [1.5, 2]}
    file.write_text(json.dumps(line) + "\n", "utf-8")
    with pytest.raises(InvalidInput, match="not a number"):
        list(read_lm_eval_samples(run))


@pytest.mark.parametrize("package", ["inspect", "lm-eval"])
def test_a_missing_package_is_named_with_its_installation(package, run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match="pip install"):
        check_installed(package)
    with pytest.raises(InvalidInput, match="pip install"):
        run_harness(package, run)
