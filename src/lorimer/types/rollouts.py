"""Messages about rollouts and samples: what a policy wrote in a step, turn by turn, and what it was worth.

A rollout is an episode of training; a sample is an answer that was evaluated. A client logs them to a run, and they are
found by step, group, reward, length, stop reason and text. Fields are documented where a client gives them.
"""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from lorimer.types.base import Counter, Integer, Request, Response
from lorimer.types.metrics import LAST_SECOND, Step
from lorimer.types.runs import MAX_NAME_CHARS, MAX_TAG_CHARS, Tags

RolloutKind = Literal["rollout", "sample"]

MAX_PARTS = 100
"""Reward parts, timings, logs or errors of one rollout, and logs or calls of one turn."""

Label = Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARS)]
Seconds = Annotated[float, Field(ge=0, le=LAST_SECOND)]
Numbers = Annotated[dict[str, float], Field(max_length=MAX_PARTS)]
Logs = Annotated[dict[str, str | float], Field(max_length=MAX_PARTS)]


class _ToolCallFields(BaseModel):
    name: str
    arguments: str = ""
    """As the model wrote them."""
    result: str | None = None
    error: str | None = None
    seconds: Seconds | None = None


class RolloutToolCall(_ToolCallFields, Request):
    """A tool that a turn called, and what it answered."""


class LoggedToolCall(_ToolCallFields, Response):
    pass


class _TurnFields(BaseModel):
    role: Label
    content: str
    tokens: list[Integer] | None = None
    logprobs: list[float | None] | None = None
    """Of the sampler, one for each token; only turns that were sampled have them."""
    advantages: list[float | None] | None = None
    """One for each token, where they differ from the advantage of the rollout."""
    offsets: list[Counter] | None = None
    """Where each token begins in ``content``, counted in Unicode code points."""
    reward: float | None = None
    stop_reason: Label | None = None
    logs: Logs = Field(default_factory=dict)
    """What the environment or the grader said of the turn."""
    seconds: Seconds | None = None
    """How long the turn took to sample, or the environment to answer."""


class RolloutTurn(_TurnFields, Request):
    """One message of an episode: a prompt, an action of the policy, or an answer of the environment."""

    tool_calls: Annotated[list[RolloutToolCall], Field(max_length=MAX_PARTS)] = Field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        return self.logprobs is not None or self.role == "assistant"

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        num_tokens = None if self.tokens is None else len(self.tokens)
        for name in ("logprobs", "advantages", "offsets"):
            values = getattr(self, name)
            if values is not None and len(values) != num_tokens:
                raise ValueError(f"{name} has {len(values)} values; as many as tokens, {num_tokens or 0}, are accepted")
        if self.offsets and (self.offsets != sorted(self.offsets) or self.offsets[-1] > len(self.content)):
            raise ValueError(
                "offsets decrease or exceed the content; ascending ones of at most its length are accepted"
            )
        return self


class LoggedTurn(_TurnFields, Response):
    tool_calls: list[LoggedToolCall] = Field(default_factory=list)


class Rollout(Request):
    """One episode, or one evaluated answer. ``kind``, ``split``, ``step``, ``group`` and ``number`` identify it.

    A rollout that is logged again replaces the earlier one.
    """

    step: Step
    kind: RolloutKind = "rollout"
    split: Label = "train"
    """``train``, ``test``, or the name of another set of prompts."""
    group: Annotated[str, Field(max_length=MAX_NAME_CHARS)] = ""
    """The episodes whose rewards are compared with each other."""
    number: Counter = 0
    """Counts the rollouts of a group."""
    turns: Annotated[list[RolloutTurn], Field(min_length=1)]
    reward: float | None = None
    reward_parts: Numbers = Field(default_factory=dict)
    advantage: float | None = None
    stop_reason: Label | None = None
    errors: Annotated[list[str], Field(max_length=MAX_PARTS)] = Field(default_factory=list)
    """What went wrong while it was played or graded."""
    tags: Tags = Field(default_factory=list)
    seconds: Annotated[dict[str, Seconds], Field(max_length=MAX_PARTS)] = Field(default_factory=dict)
    """How long its parts took, such as ``sampling`` and ``environment``."""
    logs: Logs = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        for text in (self.split, self.group, self.stop_reason or "", *self.tags, *(turn.role for turn in self.turns)):
            if not text.isprintable():
                raise ValueError(f"{text[:80]!r} is not accepted; printable characters in one line are")
        return self


class LogRolloutsRequest(Request):
    rollouts: list[Rollout]


class LogRolloutsResponse(Response):
    num_stored: int
    num_superseded: int = 0
    """Not stored, because a later part of the run begins before their step."""


class RolloutContent(Response):
    """What is read only of rollouts that somebody looks at."""

    turns: list[LoggedTurn]
    reward_parts: dict[str, float] = Field(default_factory=dict)
    errors: list[str] = Field(default_factory=list)
    seconds: dict[str, float] = Field(default_factory=dict)
    logs: dict[str, str | float] = Field(default_factory=dict)


class LoggedRollout(Response):
    rollout_id: int
    training_run_id: str
    """The part of the run that logged it."""
    step: int
    kind: RolloutKind
    split: str
    group: str
    number: int
    reward: float | None = None
    advantage: float | None = None
    num_tokens: int | None = None
    """Of the turns that were sampled; none if they have no tokens."""
    num_turns: int
    stop_reason: str | None = None
    has_errors: bool = False
    tags: list[str] = Field(default_factory=list)
    prompt_key: str
    """The same for rollouts that begin with the same turns."""
    prompt: str
    """The end of what comes before the first sampled turn, in one line."""
    answer: str
    """The beginning of the last sampled turn, in one line."""
    content_bytes: int
    """The size of ``content`` as JSON."""
    created_at: datetime
    content: RolloutContent | None = None
    """None in lists that were not asked for it."""


class RolloutsResponse(Response):
    rollouts: list[LoggedRollout]
    total_count: int | None = None
    """Of all pages; given with the first one."""
    next_cursor: str | None = None
    """To pass as ``after``; none if there are no more."""


class RolloutStep(Response):
    step: int
    num_rollouts: int
    mean_reward: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    mean_tokens: float | None = None
    counts: list[int] = Field(default_factory=list)
    """Rollouts by reward, in the bins of the answer."""


class RolloutStepsResponse(Response):
    """The steps that have rollouts which match, with a histogram of their rewards."""

    steps: list[RolloutStep]
    """In order."""
    num_rollouts: int
    edges: list[float]
    """The borders of the bins, one more than there are; empty if nothing has a reward.

    A bin has its lower border; the last one also has its upper border.
    """
    counts: list[int]
    """Over all steps."""
    values: dict[str, list[str]] = Field(default_factory=dict)
    """The kinds, splits and stop reasons among them, most frequent first."""
