"""Problems with one answer: ask, read the reply, grade it.

``ProblemEnv`` is subclassed, as in the official cookbook; for rows and a grader there is ``question_dataset``. Where a
grader is slow, written by somebody else, or runs what a model wrote, ``GradedProblem`` asks a ``GraderPool``.
"""

import inspect
import random
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from lorimer.chat.conversation import Message, Termination, text_of
from lorimer.cookbook.completers import StopCondition, derive_seed
from lorimer.cookbook.evaluation import Grader
from lorimer.cookbook.renderers import Renderer
from lorimer.cookbook.rl.envs import Action, Env, EnvGroupBuilder, Logs, Metrics, Observation, RLDataset, StepResult
from lorimer.cookbook.rl.graders import GraderPool
from lorimer.errors import InvalidInput
from lorimer.types import ModelInput

T = TypeVar("T")


class ProblemEnv(Env):
    """One question, one reply. Reward: 1 for the right answer, less ``format_coef`` where the form is wrong."""

    def __init__(
        self, renderer: Renderer, convo_prefix: Sequence[Message] | None = None, format_coef: float = 0.1
    ) -> None:
        self.renderer = renderer
        self.convo_prefix = list(convo_prefix or [])
        self.format_coef = format_coef
        self.metrics: Metrics = {}
        self.logs: Logs = {}
        """What a check wants reported besides its answer."""

    @property
    def stop_condition(self) -> StopCondition:
        return self.renderer.get_stop_sequences()

    @abstractmethod
    def get_question(self) -> str: ...

    @abstractmethod
    def check_answer(self, sample_str: str) -> bool | float | Awaitable[bool | float]:
        """How right the reply is, from 0 to 1."""

    def check_format(self, sample_str: str) -> bool:
        """Whether the reply has the form that was asked for; a reply without an end never has."""
        return True

    def get_reference_answer(self) -> str:
        """For the transcript."""
        return ""

    def prompt_messages(self) -> list[Message]:
        return [*self.convo_prefix, {"role": "user", "content": self.get_question()}]

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return self.renderer.build_generation_prompt(self.prompt_messages()), self.stop_condition

    async def step(self, action: Action) -> StepResult:
        message, termination = self.renderer.parse_response(action)
        reply = text_of(message)
        is_malformed = termination is Termination.MALFORMED
        has_format = not is_malformed and self.check_format(reply)
        checked = self.check_answer(reply)
        correct = float(await checked if inspect.isawaitable(checked) else checked)
        return StepResult(
            reward=correct + self.format_coef * (has_format - 1),
            episode_done=True,
            next_observation=ModelInput.empty(),
            next_stop_condition=self.stop_condition,
            metrics=self.metrics | {"correct": correct, "format": float(has_format), "malformed": float(is_malformed)},
            logs=self.logs | {"reference_answer": self.get_reference_answer()},
        )


class RowProblem(ProblemEnv):
    """The question of a row, graded as ``evaluation.accuracy`` grades it."""

    def __init__(self, renderer: Renderer, grade: Grader, row: Any) -> None:
        super().__init__(renderer)
        self.grade, self.row = grade, row

    def get_question(self) -> str:
        return str(self.row["question"])

    def get_reference_answer(self) -> str:
        return str(self.row.get("answer", ""))

    def check_answer(self, sample_str: str) -> bool | float | Awaitable[bool | float]:
        return self.grade(sample_str, self.row)


class GradedProblem(ProblemEnv):
    """A problem whose reply is graded by ``grader(reply, answer)`` in a worker process; an error of it counts as 0."""

    def __init__(
        self,
        renderer: Renderer,
        question: str,
        answer: str,
        graders: GraderPool,
        convo_prefix: Sequence[Message] | None = None,
    ) -> None:
        super().__init__(renderer, convo_prefix)
        self.question, self.answer, self.graders = question, answer, graders

    def get_question(self) -> str:
        return self.question

    def get_reference_answer(self) -> str:
        return self.answer

    async def check_answer(self, sample_str: str) -> float:
        grade = await self.graders.grade(sample_str, self.answer)
        self.metrics |= {**grade.metrics, "grader_error": float(grade.error is not None)}
        if grade.error is not None:
            self.logs["grader_error"] = f"{grade.error}: {grade.detail}"
        return grade.value


@dataclass(frozen=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """``num_envs`` tries at one problem."""

    env_thunk: Callable[[], Env]
    num_envs: int
    dataset_name: str = "problems"

    shares_start = True

    async def make_envs(self) -> Sequence[Env]:
        return [self.env_thunk() for _ in range(self.num_envs)]

    def logging_tags(self) -> list[str]:
        return [self.dataset_name]


class ProblemDataset(RLDataset, Generic[T]):
    """Items in batches of ``batch_size``, each item a group of ``group_size`` tries; shuffled anew in every epoch."""

    def __init__(
        self,
        items: Sequence[T],
        make_env: Callable[[T], Env],
        *,
        batch_size: int,
        group_size: int,
        num_epochs: int = 1,
        seed: int = 0,
        name: str = "problems",
    ) -> None:
        if not 1 <= batch_size <= len(items):
            raise InvalidInput(f"batch_size is {batch_size}; from 1 to {len(items)}, the number of items, is accepted")
        self.items, self.make_env = items, make_env
        self.batch_size, self.group_size = batch_size, group_size
        self.num_epochs, self.seed, self.name = num_epochs, seed, name

    def __len__(self) -> int:
        return len(self.items) // self.batch_size * self.num_epochs

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        epoch, position = divmod(index, len(self.items) // self.batch_size)
        order = list(range(len(self.items)))
        random.Random(derive_seed(self.seed, "epoch", epoch)).shuffle(order)
        chosen = order[position * self.batch_size : (position + 1) * self.batch_size]
        return [
            ProblemGroupBuilder(partial(self.make_env, self.items[at]), self.group_size, self.name) for at in chosen
        ]


def question_dataset(
    rows: Sequence[Any],
    renderer: Renderer,
    grade: Grader,
    *,
    batch_size: int,
    group_size: int = 1,
    num_epochs: int = 1,
    seed: int = 0,
) -> ProblemDataset[Any]:
    """Rows with a ``question``, whose replies ``grade(reply, row)`` judges."""
    make_env = partial(RowProblem, renderer, grade)
    return ProblemDataset(
        rows, make_env, batch_size=batch_size, group_size=group_size, num_epochs=num_epochs, seed=seed
    )
