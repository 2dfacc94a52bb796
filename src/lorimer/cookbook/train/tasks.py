"""The tasks of RL that a file of settings names: sums, word problems, or questions of one's own with a grader."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from lorimer.cookbook.arithmetic import split_sums, sum_rows
from lorimer.cookbook.datasets import Row, check_fields, load_rows, split_off
from lorimer.cookbook.evaluation import exact_match
from lorimer.cookbook.gsm8k import is_correct
from lorimer.cookbook.renderers import Renderer
from lorimer.cookbook.rl.envs import Env
from lorimer.cookbook.rl.graders import GraderPool
from lorimer.cookbook.rl.problems import GradedProblem, RowProblem
from lorimer.cookbook.train.inputs import RlData
from lorimer.cookbook.word_problems import generate_problems

NUM_GENERATED = 8000
MAX_HELD_OUT = 200


def task_rows(data: RlData, seed: int) -> tuple[Sequence[Row], Sequence[Row]]:
    """Return the questions to train on and those to measure with."""
    if data.task == "arithmetic":
        learned, held_out = (sum_rows(sums) for sums in split_sums())
        return learned, held_out[: data.num_held_out]
    rows = generate_problems(NUM_GENERATED, seed) if data.data is None else load_rows(data.data)
    rows = check_fields(rows, "question", "answer")
    if data.held_out_data is not None:
        return rows, check_fields(load_rows(data.held_out_data), "question", "answer")
    return split_off(rows, data.num_held_out, seed, most=MAX_HELD_OUT)


@dataclass(frozen=True)
class Grading:
    make_env: Callable[[Renderer, Any], Env]
    """Makes the environment of a row."""
    take_metrics: Callable[[], dict[str, float]] = dict
    """Counts of a step, for its log."""


@asynccontextmanager
async def open_grading(data: RlData) -> AsyncIterator[Grading]:
    """Start the processes of a grader that is named; the built-in ones need none."""
    if data.grader is None:
        grade = grade_number if data.task == "word_problems" else exact_match()
        yield Grading(lambda renderer, row: RowProblem(renderer, grade, row))
        return
    async with GraderPool(
        data.grader,
        num_workers=data.grader_workers,
        timeout_seconds=data.grader_seconds,
        backend=data.graders,
    ) as pool:
        yield Grading(
            lambda renderer, row: GradedProblem(renderer, str(row["question"]), str(row["answer"]), pool),
            pool.take_metrics,
        )


def grade_number(reply: str, row: Any) -> bool:
    """Return whether a reply gives the number of the row's answer."""
    return is_correct(reply, str(row["answer"]))
