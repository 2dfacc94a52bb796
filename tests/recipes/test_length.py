"""Each recipe is shorter than its counterpart of the official cookbook; docs/recipes.md has the table."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

import lorimer.recipes
from tests.official_cookbook.environment import DIRECTORY

# Code lines of tinker-cookbook 0.5.8, by the files of its folder `recipes` that do what ours does.
COUNTERPARTS = {
    "sl_loop": {"sl_loop.py": 135},
    "sl_basic": {"sl_basic.py": 45},
    "rl_loop": {"rl_loop.py": 210},
    "rl_basic": {"rl_basic.py": 35},
    "chat_sft": {"chat_sl/train.py": 140},
    "sweep": {"chat_sl/sweep/cli.py": 143, "chat_sl/sweep/grid.py": 28, "chat_sl/sweep/runner.py": 159},
    "dpo": {"preference/dpo/train.py": 105},
    "distill_on_policy": {"distillation/on_policy_distillation.py": 108},
    "prompt_distillation": {"prompt_distillation/create_data.py": 152, "prompt_distillation/train.py": 86},
    "arithmetic_rl": {"math_rl/arithmetic_env.py": 97, "math_rl/train.py": 134},
    "rl_gsm8k": {"math_rl/train.py": 134, "math_rl/math_env.py": 375},
    "tool_use_rl": {"search_tool/train.py": 106, "search_tool/search_env.py": 195},
    "self_play": {"multiplayer_rl/guess_number/train.py": 63, "multiplayer_rl/guess_number/env.py": 141},
}
IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def num_code_lines(path: Path) -> int:
    """Lines with code: neither empty, nor a comment, nor a docstring."""
    text = path.read_text("utf-8")
    documented = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in IGNORED for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - documented)


@pytest.mark.parametrize("recipe", COUNTERPARTS)
def test_recipe_is_shorter(recipe):
    ours = Path(lorimer.recipes.__file__ or "").with_name(f"{recipe}.py")
    assert num_code_lines(ours) < sum(COUNTERPARTS[recipe].values())


def test_counts_are_those_of_the_official_cookbook():
    if not (DIRECTORY / "installed").exists():
        pytest.skip("the official cookbook is not installed: make cookbook-official")
    (folder,) = DIRECTORY.glob("lib/python*/site-packages/tinker_cookbook/recipes")
    expected = {name: number for files in COUNTERPARTS.values() for name, number in files.items()}
    assert {name: num_code_lines(folder / name) for name in expected} == expected
