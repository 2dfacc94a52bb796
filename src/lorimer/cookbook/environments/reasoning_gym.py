"""Tasks of ``reasoning-gym``, more than a hundred that are generated and graded by program, as a dataset for RL.

An answer is what stands between the last ``<answer>`` and ``</answer>`` of a reply, or the whole of it; the task's own
grader gives from 0 to 1. Whether a model is told about the marks is the caller's ``system_prompt``.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lorimer.chat.conversation import Message
from lorimer.cookbook.renderers import Renderer
from lorimer.cookbook.rl.problems import ProblemDataset, ProblemEnv
from lorimer.errors import InvalidInput

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymEnv(ProblemEnv):
    def __init__(
        self,
        renderer: Renderer,
        dataset: Any,
        entry: Mapping[str, Any],
        convo_prefix: Sequence[Message] = (),
        format_coef: float = 0.0,
    ) -> None:
        super().__init__(renderer, convo_prefix, format_coef)
        self.dataset, self.entry = dataset, entry

    def get_question(self) -> str:
        return str(self.entry["question"])

    def get_reference_answer(self) -> str:
        return str(self.entry["answer"])

    def check_answer(self, sample_str: str) -> float:
        return float(self.dataset.score_answer(answer_in(sample_str), self.entry))

    def check_format(self, sample_str: str) -> bool:
        """Counts only with a ``format_coef``: whether the answer is marked."""
        return _ANSWER.search(sample_str) is not None


def answer_in(reply: str) -> str:
    marked = _ANSWER.findall(reply)
    return str(marked[-1] if marked else reply).strip()


def reasoning_gym_dataset(
    task: str,
    renderer: Renderer,
    *,
    size: int,
    batch_size: int,
    group_size: int,
    num_epochs: int = 1,
    seed: int = 0,
    system_prompt: str | None = None,
    format_coef: float = 0.0,
    **options: Any,
) -> ProblemDataset[Mapping[str, Any]]:
    """``size`` problems of a task such as ``basic_arithmetic``, with the task's own ``options``."""
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError:
        raise InvalidInput(
            f"the task {task!r} needs the package reasoning-gym, which is not installed: pip install reasoning-gym"
        ) from None
    try:
        made = gym.create_dataset(task, size=size, seed=seed, **options)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"reasoning-gym makes no {task!r} with {options}: {error}") from error
    prefix: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return ProblemDataset(
        [made[index] for index in range(size)],
        lambda entry: ReasoningGymEnv(renderer, made, entry, prefix, format_coef),
        batch_size=batch_size,
        group_size=group_size,
        num_epochs=num_epochs,
        seed=seed,
        name=task,
    )
