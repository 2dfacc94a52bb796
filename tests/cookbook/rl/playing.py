"""An environment with a memory, which misbehaves when it is told to, for the tests of environments in processes."""

import gc
import os
import time

from lorimer.chat.conversation import Message
from lorimer.cookbook.rl.envs import Action, Env, StepResult
from lorimer.types import ModelInput


class Summing(Env):
    """Shows the sum of all tokens so far, and ends after ``num_turns``."""

    def __init__(self, start: int, num_turns: int) -> None:
        self.total, self.left = start, num_turns

    async def initial_observation(self) -> tuple[ModelInput, list[int]]:
        return ModelInput.from_ints([self.total]), [7, 8]

    def prompt_messages(self) -> list[Message]:
        return [{"role": "user", "content": f"from {self.total}"}]

    async def step(self, action: Action) -> StepResult:
        match action:
            case [0]:
                raise ValueError("no such move")
            case [1]:
                time.sleep(3600)
            case [2]:
                os._exit(7)
        self.total, self.left = self.total + sum(action), self.left - 1
        num_known = sum(type(one) is Summing for one in gc.get_objects())
        metrics = {"total": self.total, "pid": os.getpid(), "num_known": num_known}
        observation = ModelInput.empty() if self.left == 0 else ModelInput.from_ints([self.total, 5])
        return StepResult(self.total / 2, self.left == 0, observation, ["\n"], metrics, {"seen": f"{self.total}"})


def make_summing(start: int, num_turns: int) -> Summing:
    return Summing(start, num_turns)
