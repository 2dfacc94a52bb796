"""``lorimer recipe``: the recipes are found without loading them, and run with their own options."""

import json
from pathlib import Path

import lorimer.recipes
from tests.cli.commands import lorimer as command
from tests.cli.commands import refused


def test_every_recipe_is_listed():
    found = json.loads(command("recipe", "list", "-f", "json").stdout)
    files = {path.stem for path in Path(lorimer.recipes.__file__ or "").parent.glob("*.py")} - {"__init__"}
    assert {one["name"] for one in found} == files and all(one["summary"] for one in found)
    assert "Direct preference optimization" in command("recipe", "list").stdout


def test_recipe_is_shown():
    shown = command("recipe", "show", "dpo").stdout
    assert "python -m lorimer.recipes.dpo" in shown and "recipes/dpo.py" in shown
    assert command("recipe", "show", "dpo", "--source").stdout.endswith("run_recipe(main)\n")


def test_recipe_runs_with_its_own_options(tmp_path):
    """One that needs neither a server nor a model."""
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2", "reference": "#### 2"}) + "\n", "utf-8")
    ended = command("recipe", "run", "eval_gsm8k", "--answers", answers, "--output", tmp_path / "scores.json")
    assert ended.exit_code == 0, ended.output
    assert json.loads((tmp_path / "scores.json").read_text("utf-8"))["accuracy"] == 1
    helped = command("recipe", "run", "dpo", "--help")
    assert helped.exit_code == 0 and "--beta" in helped.stdout


def test_unknown_recipe_is_refused_with_the_nearest():
    assert "there is no recipe 'dpoo'; the nearest is 'dpo'" in refused(command("recipe", "show", "dpoo"))[1]
