"""The public names of Lorimer: sorted, importable, and changed only on purpose."""

import inspect
import re
import tomllib
from pathlib import Path

import tinker

import lorimer
from lorimer import errors

ROOT = Path(__file__).parents[1]


OURS = {"AwaitableConcurrentFuture", "RetryConfig", "errors"}
"""On top of what the official SDK has; ``tests/client/test_parity.py`` compares the rest name by name."""


def test_public_names_are_those_of_the_official_sdk_and_ours():
    assert set(lorimer.__all__) - set(tinker.__all__) == OURS


def test_public_names_are_sorted_and_importable():
    assert lorimer.__all__ == sorted(set(lorimer.__all__))
    for name in lorimer.__all__:
        assert hasattr(lorimer, name), name


def test_nothing_else_is_left_open():
    others = {name for name, value in vars(lorimer).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert others <= set(lorimer.__all__)


def test_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in project["project"]
    assert (ROOT / project["tool"]["hatch"]["version"]["path"]).samefile(lorimer.__file__)
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", lorimer.__version__)


def test_errors_are_the_tree_drawn_in_their_module():
    classes = [item for item in vars(errors).values() if inspect.isclass(item)]
    assert all(issubclass(item, errors.LorimerError) for item in classes)
    drawn = re.findall(r"^ {4}[│├└─ ]*(\w+)", errors.__doc__ or "", re.MULTILINE)
    assert drawn == [item.__name__ for item in classes]


def test_drawn_errors_hang_from_the_right_parent():
    parents = {0: errors.LorimerError}
    for branch, name in re.findall(r"^ {4}((?:│ {3}| {4})*[├└]── )(\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(branch) // 4
        error = getattr(errors, name)
        assert error.__bases__ == (parents[depth - 1],), name
        parents[depth] = error
