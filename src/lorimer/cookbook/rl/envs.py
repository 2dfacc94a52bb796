"""What an RL task is made of, in the words of the official cookbook.

An ``Env`` is one episode: it shows tokens, takes tokens, gives a reward. An ``EnvGroupBuilder`` makes the episodes
whose rewards are compared with each other. An ``RLDataset`` hands out builders in batches, one for each step of
training. Playing the episodes is told in ``rollouts.py``.

Legend: G trajectories of a group, P groups of a batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from lorimer.chat.conversation import Message
from lorimer.cookbook.completers import StopCondition, TokensWithLogprobs
from lorimer.errors import Unsupported
from lorimer.types import ModelInput, RolloutToolCall

if TYPE_CHECKING:
    from lorimer.cookbook.rl.rollouts import Policy

Action: TypeAlias = list[int]
Observation: TypeAlias = ModelInput
Metrics: TypeAlias = dict[str, float | int]
Logs: TypeAlias = dict[str, str | int | float]


@dataclass(frozen=True)
class StepResult:
    """What an environment answers to an action."""

    reward: float
    episode_done: bool
    next_observation: Observation
    """Empty (``ModelInput.empty()``) where the episode is done."""
    next_stop_condition: StopCondition
    metrics: Metrics = field(default_factory=dict)
    """Numbers that are averaged over all steps which have them."""
    logs: Logs = field(default_factory=dict)
    """What a person wants to see beside the transcript; goes to ``rollouts.jsonl`` and to the server."""
    tool_calls: list[RolloutToolCall] = field(default_factory=list)
    """The tools that the action called, with what they answered; for the transcript."""


class Env(ABC):
    """One episode of one agent; made for one use."""

    @abstractmethod
    async def initial_observation(self) -> tuple[Observation, StopCondition]: ...

    @abstractmethod
    async def step(self, action: Action) -> StepResult: ...

    def prompt_messages(self) -> Sequence[Message]:
        """Return the messages that the first observation was made of, for the transcript; none if there were none.

        Called after ``initial_observation``.
        """
        return ()


class SelfPlayedEnv(Env):
    """One episode that is not played turn by turn: something else asks the policy, and its turns are read later."""

    @abstractmethod
    async def play(self, policy: "Policy") -> "Trajectory": ...

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        raise Unsupported(f"{type(self).__name__} plays its episode itself; do_group_rollout is accepted")

    async def step(self, action: Action) -> StepResult:
        raise Unsupported(f"{type(self).__name__} plays its episode itself; do_group_rollout is accepted")


@dataclass(frozen=True)
class Transition:
    """One turn: what the agent saw, what it said, what it got."""

    ob: Observation
    ac: TokensWithLogprobs
    reward: float
    episode_done: bool
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    tool_calls: list[RolloutToolCall] = field(default_factory=list)
    sampling_seconds: float | None = None
    """None for a first turn that a group sampled together."""
    environment_seconds: float | None = None


@dataclass(frozen=True)
class Trajectory:
    """An episode as it was played."""

    transitions: list[Transition]
    final_ob: Observation
    stop_reason: str | None = None
    """``max_tokens`` where the limit on the whole trajectory ended it before the environment did."""
    prompt: Sequence[Message] = ()
    """The messages of the first observation, if they are known."""

    @property
    def is_truncated(self) -> bool:
        """Whether a limit on tokens cut the trajectory or any action in it."""
        return self.stop_reason == "max_tokens" or any(step.ac.stop_reason == "length" for step in self.transitions)


class EnvGroupBuilder(ABC):
    """Makes a group of episodes: several tries at one problem, or the players of one game."""

    shares_start: bool = False
    """Whether every episode begins with the same prompt without waiting for another one. The first turn of the whole
    group is then one request, which reads the prompt once."""

    @abstractmethod
    async def make_envs(self) -> Sequence[Env]: ...

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """A reward for each trajectory that depends on the others; it is added to those of its steps."""
        return [(0.0, {}) for _ in trajectory_group]

    def logging_tags(self) -> list[str]:
        """Names under which the metrics of this group are reported besides ``all``."""
        return []

    async def cleanup(self) -> None:
        """Release what ``make_envs`` took. Called once the group is over, however it ended."""
        return None


@dataclass(frozen=True)
class TrajectoryGroup:
    """The trajectories of a group that came to an end, with what it takes to compare them."""

    trajectories_G: list[Trajectory]
    final_rewards_G: list[float]
    metrics_G: list[Metrics]
    tags: list[str] = field(default_factory=list)
    rollout_errors: list[Exception] = field(default_factory=list)
    """Of the trajectories that are missing."""
    sampler_step: int = 0
    """The number of optimiser updates of the weights it was sampled from, in steps of training."""

    def get_total_rewards(self) -> list[float]:
        """The return of each trajectory: its steps' rewards and the group's."""
        pairs = zip(self.trajectories_G, self.final_rewards_G, strict=True)
        return [sum(step.reward for step in trajectory.transitions) + final for trajectory, final in pairs]


class RLDataset(ABC):
    """Batches of groups. A batch is a function of its index alone, so that a resumed run gets the same ones."""

    @abstractmethod
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]: ...

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches."""
