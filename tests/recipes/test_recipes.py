"""What every recipe has: its command in its docstring, a figure that was measured, and a way to be started."""

import ast
from pathlib import Path

import pytest

import lorimer.recipes

RECIPES = sorted(path for path in Path(lorimer.recipes.__file__).parent.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_says_how_it_is_run(path):
    text = path.read_text("utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert f"python -m lorimer.recipes.{path.stem}" in docstring
    assert not {"MEASURED", "NUMBERS", "EXPECTED"} & set(docstring.replace(".", " ").split()), "a figure is missing"
    assert text.endswith('if __name__ == "__main__":\n    run_recipe(main)\n')
    assert len(text.splitlines()) <= 250, "a person reads it in ten minutes"
