"""Runs tasks: many items concurrently, each outcome in a journal, so that an interrupted evaluation is resumed.

The result is stored on the server, which computes the estimates. ``task_evaluator`` makes a task an evaluator of a
training loop; what it measured of weights that become a checkpoint is stored by ``loops.py``.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from lorimer import RestClient, SamplingClient
from lorimer.cookbook.checkpoints import read_jsonl
from lorimer.cookbook.evals.eval_tasks import Item, Model, Outcome, Task
from lorimer.cookbook.renderers import Renderer
from lorimer.errors import InvalidInput
from lorimer.types.estimates import estimate
from lorimer.types.evaluations import Evaluation, Harness

Report = Callable[[int, int], None]
"""Called with the number of items that are done, and of all."""

CONCURRENCY = 32


class Journal:
    """Outcomes of an evaluation, one line each; a line that was cut short is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = read_jsonl(path)
        self.outcomes = {line["item"]: Outcome(line["grades"], line["replies"]) for line in lines}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab+")
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, item: Item, outcome: Outcome) -> None:
        self.outcomes[item.item_id] = outcome
        line = {"item": item.item_id, "grades": outcome.grades, "replies": outcome.replies}
        self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._file.flush()


def journal_path(directory: Path, task: Task, identity: str) -> Path:
    """Return the file of an evaluation: another model, task, setting or set of items has another one."""
    key = [identity, task.name, dict(task.settings), [item.item_id for item in task.items]]
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()
    readable = "".join(character if character.isalnum() else "_" for character in task.name)[:60]
    return directory / f"{readable}-{digest}.jsonl"


@dataclass(frozen=True)
class Measured:
    """The grades of one model on one task."""

    task: str
    metric: str
    settings: Mapping[str, Any]
    items: list[str]
    grades: list[list[float]]

    @property
    def num_samples(self) -> int:
        return len(self.grades[0])

    def estimates(self) -> dict[str, float]:
        """Return the mean under the name of the metric, and ``pass@k``."""
        found = estimate(np.array(self.grades, np.float64))
        return {self.metric if name == "mean" else name: one.value for name, one in found.items()}

    async def store(self, rest: RestClient, model: str, harness: Harness = "lorimer") -> Evaluation:
        """Store the grades as those of a model: a ``tinker://`` path or a base model."""
        return await rest.create_evaluation_async(
            model,
            self.task,
            self.items,
            [grade for grades in self.grades for grade in grades],
            num_samples=self.num_samples,
            metric=self.metric,
            settings=self.settings,
            harness=harness,
        )


async def run_task(
    task: Task,
    model: Model,
    *,
    journal: Journal | None = None,
    concurrency: int = CONCURRENCY,
    report: Report = lambda done, total: None,
) -> Measured:
    """Grade every item of a task that the journal does not have, ``concurrency`` of them concurrently."""
    if concurrency < 1:
        raise InvalidInput(f"concurrency is {concurrency}; 1 or more is accepted")
    if not task.items:
        raise InvalidInput(f"the task {task.name!r} has no items; at least one is needed")
    outcomes = dict(journal.outcomes) if journal else {}
    left = iter([item for item in task.items if item.item_id not in outcomes])
    report(len(outcomes), len(task.items))

    async def work() -> None:
        for item in left:
            outcome = await task.grade(model, item)
            outcomes[item.item_id] = outcome
            if journal is not None:
                journal.add(item, outcome)
            report(len(outcomes), len(task.items))

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(task.items)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    grades = [outcomes[item.item_id].grades for item in task.items]
    items = [item.item_id for item in task.items]
    return Measured(task.name, task.metric, dict(task.settings), items, grades)


class TaskEvaluator:
    """An evaluator of a training loop that also gives the grades of each item."""

    def __init__(self, task: Task, renderer: Renderer, concurrency: int = CONCURRENCY) -> None:
        self.task, self._renderer, self._concurrency = task, renderer, concurrency

    async def measure(self, sampling_client: SamplingClient) -> Measured:
        return await run_task(self.task, Model(sampling_client, self._renderer), concurrency=self._concurrency)

    async def __call__(self, sampling_client: SamplingClient, /) -> dict[str, float]:
        return self.metrics(await self.measure(sampling_client))

    def metrics(self, measured: Measured) -> dict[str, float]:
        """Return the estimates as metrics of a step: ``test/gsm8k/accuracy``."""
        return {f"test/{self.task.name}/{name}": value for name, value in measured.estimates().items()}


def task_evaluator(task: Task, renderer: Renderer, *, concurrency: int = CONCURRENCY) -> TaskEvaluator:
    """Return an evaluator for ``evaluators=[...]`` of a loop, which reports ``test/<task>/<metric>``."""
    return TaskEvaluator(task, renderer, concurrency)
