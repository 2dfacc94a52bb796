"""Generated word problems have the form of GSM8K and right answers."""

import re

from lorimer.cookbook.gsm8k import is_correct
from lorimer.cookbook.word_problems import generate_problems


def test_problems_depend_on_the_seed_and_are_right():
    problems = generate_problems(500, seed=3)
    assert problems[:100] == generate_problems(100, seed=3) != generate_problems(100, seed=4)
    assert len({problem["question"] for problem in problems}) > 400
    for problem in problems:
        *equations, last = problem["answer"].splitlines()
        for equation in equations:
            assert re.fullmatch(r"\d+ [-+*] \d+ = \d+", equation)
            left, right = equation.split(" = ")
            assert eval(left) == int(right)
        assert last == f"#### {right}"
        assert is_correct(problem["answer"], problem["answer"])
        assert not is_correct(f"#### {int(right) + 1}", problem["answer"])
