"""The evaluation tasks of a training: the settings ``eval_tasks`` and ``eval_...`` as evaluators of its loop.

Tasks are those of ``lorimer eval``; judged ones, which need a second model, are left to that command.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lorimer.cookbook.renderers import Renderer
from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from lorimer.cookbook.evals.eval_tasks import Task
    from lorimer.cookbook.evals.running import TaskEvaluator
    from lorimer.cookbook.train.inputs import Rows

HAS_DATA = ("gsm8k", "svamp")
"""Tasks that read a file of the cache where none is named."""
ACCEPTED = (*HAS_DATA, "multiple_choice", "questions")


def check_eval_tasks(texts: Sequence[str]) -> None:
    """Refuse a task that does not exist, one without its file, and one that is given twice."""
    for place, text in enumerate(texts):
        name, _, file = text.partition("=")
        if name == "mt_bench":
            raise InvalidInput("eval_tasks has 'mt_bench', which needs a judge; run `lorimer eval --on mt_bench` later")
        if name not in ACCEPTED:
            raise InvalidInput(f"eval_tasks has {text!r}; accepted are {', '.join(ACCEPTED)}, as NAME or NAME=FILE")
        if not file and name not in HAS_DATA:
            raise InvalidInput(f"eval_tasks has {text!r}, which needs a file; {name}=FILE is accepted")
        if text in texts[:place]:
            raise InvalidInput(f"eval_tasks has {text!r} twice")


def make_evaluators(data: "Rows", renderer: Renderer, seed: int) -> "list[TaskEvaluator]":
    """Read the tasks of a training and return an evaluator for each."""
    from lorimer.cookbook.evals.running import task_evaluator

    made = [_make_task(data, text, seed) for text in data.eval_tasks]
    names = [task.name for task in made]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise InvalidInput(f"eval_tasks has two tasks called {twice[0]!r}; give one of the files another name")
    return [task_evaluator(task, renderer) for task in made]


def _make_task(data: "Rows", text: str, seed: int) -> "Task":
    from lorimer.cookbook.evals import eval_tasks, multiple_choice

    name, _, named = text.partition("=")
    file, limit = named or None, data.eval_limit
    sampling = eval_tasks.SamplingSettings(max_tokens=data.eval_max_tokens, seed=seed)
    match name:
        case "gsm8k":
            return eval_tasks.gsm8k_task(file, limit=limit, sampling=sampling)
        case "svamp":
            return eval_tasks.svamp_task(file, limit=limit, sampling=sampling)
        case "multiple_choice":
            return multiple_choice.multiple_choice_task(file, limit=limit, seed=seed)
    return eval_tasks.file_task(named, data.eval_grader, limit=limit, sampling=sampling)
