"""Word problems are answered and scored: the output of one recipe is the input of the next."""

import importlib
import json

import pytest
import typer
from typer.testing import CliRunner

from lorimer.cookbook.word_problems import generate_problems
from lorimer.errors import InvalidInput
from tests.recipes.conftest import recipe_command


def run(name, **options):
    app = typer.Typer()
    app.command()(importlib.import_module(f"lorimer.recipes.{name}").main)
    command = recipe_command(name, **options)
    ended = CliRunner().invoke(app, command[command.index(f"lorimer.recipes.{name}") + 1 :], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output[-4000:]
    return ended.stdout


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in generate_problems(12)), "utf-8")
    return path


def test_chain_from_training_to_a_score(run_recipe, base_url, problems, tmp_path):
    reference, answers = tmp_path / "sft_model.txt", tmp_path / "answers.jsonl"
    run_recipe("sft_gsm8k", data=problems, output=reference, batch_size=4, num_held_out=4, max_steps=2, rank=4)
    options = {"data": problems, "model_file": reference, "output": answers, "base_url": base_url, "max_tokens": 24}
    printed = run("inference_gsm8k", **options)
    assert reference.read_text().strip() in printed
    found = lines(answers)
    asked = lines(problems)
    assert [line["question"] for line in found] == [row["question"] for row in asked]
    assert [line["reference"] for line in found] == [row["answer"] for row in asked]
    assert all(line["model"] == reference.read_text().strip() for line in found)
    printed = run("eval_gsm8k", answers=answers, output=tmp_path / "scores.json")
    assert "num_questions" in printed
    assert json.loads((tmp_path / "scores.json").read_text())["num_questions"] == 12


def test_interrupted_run_goes_on(base_url, problems, tmp_path):
    options = {"data": problems, "base_url": base_url, "max_tokens": 16, "temperature": 1.0, "num_samples": 2}
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run("inference_gsm8k", output=whole, **options)
    run("inference_gsm8k", output=cut, **options)
    assert cut.read_text("utf-8") == whole.read_text("utf-8")
    kept = lines(whole)[6:11]  # both samples of two questions, and one of another
    kept[0]["answer"] = kept[1]["answer"] = "#### 1"
    cut.write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"index": 11, "que', "utf-8")
    run("inference_gsm8k", output=cut, **options)
    assert lines(cut) == lines(whole)[:6] + kept[:2] + lines(whole)[8:], "what was answered is not asked again"
    with pytest.raises(InvalidInput, match=r"max_tokens was 16"):
        run("inference_gsm8k", output=cut, **options | {"max_tokens": 17})
    (tmp_path / "foreign.jsonl").write_text("{}\n")
    with pytest.raises(InvalidInput, match="give another --output"):
        run("inference_gsm8k", output=tmp_path / "foreign.jsonl", **options)


def test_scores_of_a_file_from_elsewhere(tmp_path, problems):
    answers = tmp_path / "answers.jsonl"
    rows = lines(problems)
    said = [row["answer"] for row in rows[:3]] + ["it is 5"] * 9
    answers.write_text(
        "".join(
            json.dumps({"question": row["question"], "answer": text}) + "\n"
            for row, text in zip(rows, said, strict=True)
        )
    )
    with pytest.raises(InvalidInput, match="line 1 has no reference"):
        run("eval_gsm8k", answers=answers)
    output = tmp_path / "scores.json"
    printed = run("eval_gsm8k", answers=answers, data=problems, output=output, show_wrong=1)
    assert "25.0%" in printed
    assert "it is 5" in printed
    assert json.loads(output.read_text()) == {
        "num_questions": 12,
        "num_answers": 12,
        "accuracy": 0.25,
        "answered": 0.25,
    }
