"""What every recipe has: its command in its docstring, a figure that was measured, and a way to be started."""

import ast
import re
from pathlib import Path

import lorimer.recipes

RECIPES = sorted(path for path in Path(lorimer.recipes.__file__).parent.glob("*.py") if path.stem != "__init__")


TIME = r"\b(?:\d[\d.,]*|a|an) (?:s|seconds?|minutes?|hours?)\b"
MACHINE = r"\b(?:two|2) (?:virtual |CPU )?cores\b|\bCPU\b"


def lacks(docstring: str, name: str) -> list[str]:
    """Return what the docstring of a recipe must say and does not."""
    prose = " ".join(line for line in docstring.splitlines() if not line.startswith("    ")).replace("\n", " ")
    parts = {
        "its command": f"python -m lorimer.recipes.{name}" in docstring,
        "the time it takes": re.search(TIME, prose),
        "the machine on which that was measured": re.search(MACHINE, prose),
        "what came out, as a number": re.search(r"\d", re.sub(f"{TIME}|{MACHINE}|lorimer/\\S+", "", prose)),
    }
    return [part for part, found in parts.items() if not found]


def test_recipes_say_how_they_are_run_and_what_was_measured():
    texts = {path.stem: path.read_text("utf-8") for path in RECIPES}
    docstrings = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in texts.items()}
    missing = {name: found for name, docstring in docstrings.items() if (found := lacks(docstring, name))}
    assert missing == {}
    for name, text in texts.items():
        assert text.endswith('if __name__ == "__main__":\n    run_recipe(main)\n'), name
        assert len(text.splitlines()) <= 250, f"a person reads {name} in ten minutes"


def test_a_recipe_without_figures_is_found():
    command = "Teaches.\n\n    python -m lorimer.recipes.x --rank 8\n\n"
    assert lacks(command, "x") == [
        "the time it takes",
        "the machine on which that was measured",
        "what came out, as a number",
    ]
    assert lacks(command + "With lorimer/tiny 30 seconds on two cores.", "x") == ["what came out, as a number"]
    assert lacks(command + "30 seconds on two cores; 97 % are right.", "x") == []
