"""Environments and renderers for the tests: small tasks that lorimer/tiny can play."""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

import lorimer.models
from lorimer.cookbook.completers import StopCondition
from lorimer.cookbook.renderers import Renderer, get_renderer
from lorimer.cookbook.rl.envs import Action, Env, EnvGroupBuilder, Observation, RLDataset, StepResult
from lorimer.cookbook.rl.problems import ProblemDataset, ProblemEnv
from lorimer.types import ModelInput

MODEL = "lorimer/tiny"
TINY = Path(lorimer.models.__file__).parent / "tiny"


def tiny_renderer() -> Renderer:
    return get_renderer("auto", AutoTokenizer.from_pretrained(TINY))


class SumEnv(ProblemEnv):
    def __init__(self, renderer: Renderer, numbers: tuple[int, int]) -> None:
        super().__init__(renderer)
        self.a, self.b = numbers

    def get_question(self) -> str:
        return f"What is {self.a} + {self.b}?"

    def check_answer(self, sample_str: str) -> bool:
        return sample_str.strip() == str(self.a + self.b)


def sum_datasets(renderer: Renderer, batch_size: int = 4, group_size: int = 4) -> tuple[RLDataset, RLDataset]:
    sums = [(a, b) for a in range(10) for b in range(10)]
    make = lambda numbers: SumEnv(renderer, numbers)  # noqa: E731
    return (
        ProblemDataset(sums[20:], make, batch_size=batch_size, group_size=group_size, seed=1),
        ProblemDataset(sums[:8], make, batch_size=8, group_size=1),
    )


class TalkEnv(Env):
    """A talk of several turns in which every reply is followed by another question, so that prompts only grow."""

    def __init__(self, renderer: Renderer, num_turns: int, fails_at: int | None = None) -> None:
        self.renderer, self.num_turns, self.fails_at = renderer, num_turns, fails_at
        self.tokens: list[int] = []
        self.turn = 0

    def _ask(self) -> tuple[Observation, StopCondition]:
        question = self.renderer.build_generation_prompt([{"role": "user", "content": "Hello!"}]).to_ints()
        self.tokens += question
        return ModelInput.from_ints(self.tokens), self.renderer.get_stop_sequences()

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return self._ask()

    async def step(self, action: Action) -> StepResult:
        if self.turn == self.fails_at:
            raise ValueError("the talk was interrupted")
        self.tokens += action
        self.turn += 1
        observation, stop = self._ask()
        return StepResult(float(len(action)), self.turn == self.num_turns, observation, stop, {"turn": self.turn})


class TalkGroup(EnvGroupBuilder):
    def __init__(
        self, renderer: Renderer, num_turns: int, fails_at: Sequence[int | None], shares_start: bool = False
    ) -> None:
        self.renderer, self.num_turns, self.fails_at, self.shares_start = renderer, num_turns, fails_at, shares_start
        self.num_cleanups = 0

    async def make_envs(self) -> Sequence[Env]:
        return [TalkEnv(self.renderer, self.num_turns, fails_at) for fails_at in self.fails_at]

    async def compute_group_rewards(self, trajectory_group, env_group):
        return [(10.0 * env.turn, {"rank": index}) for index, env in enumerate(env_group)]

    def logging_tags(self) -> list[str]:
        return ["talk"]

    async def cleanup(self) -> None:
        self.num_cleanups += 1
