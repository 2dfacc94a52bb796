"""Classic environments of ``verifiers`` (0.1 to 0.3), single-turn, multi-turn and with tools, as a dataset for RL.

The environment is played turn by turn: it gives messages, the renderer makes tokens of them, and what was sampled
goes back as the model's response, so that training sees the tokens that were sampled. Rewards are those of the
environment's rubric, over the whole group. Environments that run a model by themselves are refused.
"""

import importlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lorimer.chat.conversation import Message, ToolSpec, call_arguments, make_tool_call, text_of, thinking_of
from lorimer.cookbook.completers import StopCondition, derive_seed
from lorimer.cookbook.renderers import Renderer
from lorimer.cookbook.rl.envs import (
    Action,
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    RLDataset,
    StepResult,
    Trajectory,
)
from lorimer.errors import InvalidInput, Unsupported
from lorimer.types import ModelInput

MODEL = "lorimer"
"""What an environment is told the model is called."""


class VerifiersEnv(Env):
    """One episode; ``state`` is that of verifiers."""

    def __init__(self, environment: Any, row: dict[str, Any], renderer: Renderer) -> None:
        self.environment, self.row, self.renderer = environment, row, renderer
        self.state: Any = None
        self.is_finished = False
        self._prompt: Any = None
        self._asked: list[Message] = []

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        self.state = await self.environment.init_state(self.row, _unreachable_client(), MODEL, {})
        self.state["timing"].generation.start = time.time()
        await self.environment.setup_state(self.state)
        observation = await self._next_observation()
        self._asked = [_message(one) for one in self._prompt] if observation.length else []
        return observation, self.renderer.get_stop_sequences()

    def prompt_messages(self) -> Sequence[Message]:
        return self._asked

    async def _next_observation(self) -> ModelInput:
        types = importlib.import_module("verifiers.types")
        self._prompt = await self.environment.get_prompt_messages(self.state)
        if self.state.get("final_env_response") is not None:
            return ModelInput.empty()
        if any(isinstance(message, types.TextMessage) for message in self._prompt):
            raise Unsupported("the environment asks for a continuation of plain text; one that chats is accepted")
        tools = [_tool(tool) for tool in self.state["tool_defs"]]
        return self.renderer.build_generation_prompt([_message(one) for one in self._prompt], tools=tools or None)

    async def step(self, action: Action) -> StepResult:
        await self.environment.add_model_response(self.state, self._prompt, self._response(action))
        observation = ModelInput.empty()
        is_done = await self.environment.is_completed(self.state)
        if not is_done:
            observation = await self._next_observation()
            is_done = observation.length == 0 and await self.environment.is_completed(self.state)
        if is_done:
            await self.finish()
        return StepResult(0.0, is_done, observation, self.renderer.get_stop_sequences())

    def _response(self, action: Action) -> Any:
        types = importlib.import_module("verifiers.types")
        message, termination = self.renderer.parse_response(action)
        calls = [
            types.ToolCall(
                id=call.get("id", f"call_{len(self.state['trajectory'])}_{index}"),
                name=call["function"]["name"],
                arguments=json.dumps(call_arguments(call)),
            )
            for index, call in enumerate(message.get("tool_calls", []))
        ]
        said = types.ResponseMessage(
            content=text_of(message),
            reasoning_content=thinking_of(message) or None,
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop" if termination.is_clean else "length",
            is_truncated=not termination.is_clean,
        )
        return types.Response(id=self.state["trajectory_id"], created=int(time.time()), model=MODEL, message=said)

    async def finish(self) -> None:
        """Let the environment clean up, once."""
        if not self.is_finished:
            self.is_finished = True
            await self.environment.cleanup(self.state)


@dataclass(frozen=True)
class VerifiersGroupBuilder(EnvGroupBuilder):
    environment: Any
    row: dict[str, Any]
    renderer: Renderer
    num_envs: int
    name: str

    async def make_envs(self) -> Sequence[VerifiersEnv]:
        return [VerifiersEnv(self.environment, self.row, self.renderer) for _ in range(self.num_envs)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        played = [env for env in env_group if isinstance(env, VerifiersEnv)]
        for env in played:
            await env.finish()  # one that was cut off by a limit on tokens has not ended by itself
        states = [env.state for env in played]
        await self.environment.rubric.score_group(states)
        for state in states:
            await self.environment.rubric.cleanup(state)
        return [
            (float(state["reward"]), {k: float(v) for k, v in (state["metrics"] or {}).items()}) for state in states
        ]

    def logging_tags(self) -> list[str]:
        return [self.name]


class VerifiersDataset(RLDataset):
    """Rows of an environment, shuffled anew in every epoch."""

    def __init__(self, builders: Sequence[VerifiersGroupBuilder], batch_size: int, num_epochs: int, seed: int) -> None:
        if not 1 <= batch_size <= len(builders):
            raise InvalidInput(
                f"batch_size is {batch_size}; from 1 to {len(builders)}, the number of rows, is accepted"
            )
        self._builders, self._batch_size = builders, batch_size
        self._num_epochs, self._seed = num_epochs, seed

    def __len__(self) -> int:
        return len(self._builders) // self._batch_size * self._num_epochs

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        epoch, position = divmod(index, len(self._builders) // self._batch_size)
        order = list(self._builders)
        random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
        return order[position * self._batch_size : (position + 1) * self._batch_size]


def verifiers_dataset(
    environment: Any,
    renderer: Renderer,
    *,
    batch_size: int,
    group_size: int,
    size: int = -1,
    num_epochs: int = 1,
    seed: int = 0,
    **options: Any,
) -> VerifiersDataset:
    """The training rows of an environment, or of the installed one of that name with its own ``options``."""
    try:
        vf = importlib.import_module("verifiers")
        load, multi_turn = vf.load_environment, vf.MultiTurnEnv
    except (ImportError, AttributeError):
        raise InvalidInput("these environments need verifiers 0.1 to 0.3: pip install 'verifiers<0.4'") from None
    name = environment if isinstance(environment, str) else type(environment).__name__
    if isinstance(environment, str):
        environment = load(environment, **options)
    if not isinstance(environment, multi_turn):
        raise Unsupported(f"{name!r} is a {type(environment).__name__}; environments of MultiTurnEnv are accepted")
    rows = [dict(row) for row in environment.get_dataset(size)]
    builders = [VerifiersGroupBuilder(environment, row, renderer, group_size, name) for row in rows]
    return VerifiersDataset(builders, batch_size, num_epochs, seed)


def _message(message: Any) -> Message:
    content = message.content or ""
    if not isinstance(content, str):
        texts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        if any(part.get("type") != "text" for part in texts):
            raise Unsupported("a message of the environment has a part that is no text; text is accepted")
        content = "".join(part["text"] for part in texts)
    ours: Message = {"role": message.role, "content": content}
    if message.role == "assistant" and message.tool_calls:
        ours["tool_calls"] = [
            make_tool_call(call.name, json.loads(call.arguments), call.id) for call in message.tool_calls
        ]
    if message.role == "tool":
        ours["tool_call_id"] = message.tool_call_id
    return ours


def _tool(tool: Any) -> ToolSpec:
    function: Any = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _unreachable_client() -> Any:
    """The state has a client, which nothing here asks; an environment that does is told why not."""

    async def refuse(*_: Any, **__: Any) -> Any:
        raise Unsupported("an environment asks a model by itself; it can be evaluated at the OpenAI address instead")

    client = importlib.import_module("verifiers.clients").Client
    return type("UnreachableClient", (client,), dict.fromkeys(client.__abstractmethods__, refuse))(None)
