"""The settings that say what a training reads; those of the training itself are the loops' own configurations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lorimer.chat.conversation import TrainOn
from lorimer.cookbook.datums import Reduction
from lorimer.cookbook.rl.graders import Backend
from lorimer.cookbook.train.eval_settings import check_eval_tasks
from lorimer.errors import InvalidInput

Task = Literal["arithmetic", "word_problems", "questions"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How rows are dealt into steps, and which of them are held out."""

    held_out_data: str | None = None
    """Rows to measure with, from another file; then none of `data` are held out."""
    num_held_out: int | None = None
    """Rows to measure with; without it a tenth, at most 64, or 200 in RL."""
    batch_size: int = 32
    """Rows of a step."""
    epochs: int = 1
    """How often the rows are gone through."""
    eval_tasks: Sequence[str] = ()
    """Tasks of `lorimer eval`, run every eval_every steps and at the end; results are stored beside the checkpoint of
    that step, if there is one. gsm8k, svamp, multiple_choice=FILE, questions=FILE; others with =FILE read that file."""
    eval_limit: int | None = None
    """Items of each of these tasks, chosen by the seed; without it all."""
    eval_max_tokens: int = 512
    """Most tokens of a reply to an item; replies are greedy."""
    eval_grader: str = "exact"
    """How replies to questions=FILE are graded: exact, numeric, contains, regex or python:FILE:FUNCTION."""

    def __post_init__(self) -> None:
        if self.held_out_data is not None and self.num_held_out:
            raise InvalidInput("held_out_data and num_held_out are both given; one of them is accepted")
        for name in ("batch_size", "epochs", "eval_limit", "eval_max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidInput(f"{name} is {value}; 1 or more is accepted")
        check_eval_tasks(self.eval_tasks)


@dataclass(frozen=True, kw_only=True)
class FileRows(Rows):
    data: str
    """Rows to train on: a .jsonl or .json file, or a Hugging Face dataset as name or name:config."""
    renderer_name: str = "auto"
    """How messages become tokens: auto, template, no_thinking, text or another name of docs/cookbook.md."""


@dataclass(frozen=True, kw_only=True)
class SftData(FileRows):
    max_length: int = 1024
    """Tokens of an example; the rest is cut off."""
    train_on: TrainOn = TrainOn.ALL_ASSISTANT_MESSAGES
    """Which messages are learned."""
    reduction: Reduction = "mean"
    """mean: every example counts the same; sum: every trained token does."""


@dataclass(frozen=True, kw_only=True)
class DpoData(FileRows):
    max_length: int = 1024
    """Tokens of a conversation with one of the answers; the rest is cut off."""


@dataclass(frozen=True, kw_only=True)
class DistillData(FileRows):
    teacher_prompt: str | None = None
    """A system message that only the teacher reads."""


@dataclass(frozen=True, kw_only=True)
class RlData(Rows):
    """What is asked, and how replies are graded."""

    task: Task
    """arithmetic: sums below 100. word_problems: rows in the form of GSM8K, generated ones without `data`. questions:
    rows of `data` with question and answer."""
    data: str | None = None
    """Rows with question and answer: a .jsonl or .json file, or a Hugging Face dataset as name or name:config."""
    grader: str | None = None
    """A function of (reply, answer) that returns a number, as module:function, run in separate processes. Without it
    the reply must equal the answer, or in word_problems end with its number after ####."""
    graders: Backend = "processes"
    """Where the grader runs: in processes of this machine, or with ray in those of the Ray cluster at RAY_ADDRESS."""
    grader_workers: int = 2
    """Processes that grade."""
    grader_seconds: float = 10.0
    """After which a grade is given up and counts 0."""
    group_size: int = 8
    """Replies to each question, which are compared with each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task == "questions" and self.data is None:
            raise InvalidInput("the task 'questions' needs data: a file whose rows have question and answer")
        if self.task == "arithmetic" and (self.data or self.held_out_data):
            raise InvalidInput("the task 'arithmetic' makes its own sums; data is accepted with the other tasks")
        if self.group_size < 2:
            raise InvalidInput(
                f"group_size is {self.group_size}; 2 or more is accepted: replies to a question are compared"
            )
