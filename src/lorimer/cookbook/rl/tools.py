"""Tools that a model may call, and the episode in which it calls them.

``@tool`` makes a tool of a function: its name, docstring and annotations are what the model is shown. An error of a
tool, wrong arguments included, is told to the model, which may try again; it never ends the episode or the program.
"""

import asyncio
import inspect
import json
import types
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from lorimer.chat.conversation import Message, Termination, ToolCall, ToolSpec, call_arguments
from lorimer.cookbook.completers import StopCondition
from lorimer.cookbook.renderers import Renderer
from lorimer.cookbook.rl.envs import Action, Env, Metrics, Observation, StepResult
from lorimer.errors import InvalidInput
from lorimer.types import ModelInput, RolloutToolCall

ParseCalls = Callable[[Message], list[ToolCall]]
Reward = Callable[[list[Message]], float | Awaitable[float]]


@dataclass(frozen=True)
class ToolResult:
    """What a tool answers, where that is more than a text."""

    content: str
    should_stop: bool = False
    """Whether the episode is over."""
    metrics: Metrics = field(default_factory=dict)


class Tool:
    """A function that a model can call by name. It may be a coroutine function, or a method, which keeps state."""

    def __init__(self, function: Callable[..., Any], timeout_seconds: float = 30.0) -> None:
        self.function, self.timeout_seconds = function, timeout_seconds
        self.name = function.__name__
        self._arguments = _arguments_model(function)

    def __get__(self, instance: object, owner: type | None = None) -> "Tool":
        return self if instance is None else Tool(types.MethodType(self.function, instance), self.timeout_seconds)

    @property
    def spec(self) -> ToolSpec:
        """What the chat template shows to the model."""
        schema = self._arguments.model_json_schema()
        parameters = {"type": "object", "properties": schema.get("properties", {}), **_required(schema)}
        description = inspect.getdoc(self.function) or ""
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        """The answer to a call; a text that begins with ``Error:`` where it went wrong."""
        try:
            checked = self._arguments.model_validate(arguments)
            values = {name: getattr(checked, name) for name in type(checked).model_fields}
            result = await asyncio.wait_for(self._run(values), self.timeout_seconds)
        except TimeoutError:
            return _error(f"{self.name} took longer than {self.timeout_seconds:g} seconds")
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return _error(f"{self.name} was called with wrong arguments: {wrong}")
        except Exception as error:
            return _error(f"{type(error).__name__}: {error}")
        return result if isinstance(result, ToolResult) else ToolResult(str(result))

    async def _run(self, values: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**values)
        return await asyncio.to_thread(self.function, **values)


def tool(function: Callable[..., Any]) -> Tool:
    """Let a model call this function."""
    return Tool(function)


def _arguments_model(function: Callable[..., Any]) -> type[BaseModel]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidInput(f"the tool {function.__name__} takes {parameter}; arguments with names are accepted")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, Any), default)
    return create_model(f"{function.__name__}_arguments", __config__=ConfigDict(extra="forbid"), **fields)


def _required(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("required", "$defs") if key in schema}


def _error(text: str) -> ToolResult:
    return ToolResult(f"Error: {text}", metrics={"tool_error": 1})


def calls_of_template(message: Message) -> list[ToolCall]:
    """The calls that the renderer read in the form of the model's chat template."""
    return message.get("tool_calls", [])


class ToolEnv(Env):
    """A conversation in which the model may call tools until it answers without a call, or its turns are used up.

    The reward is ``reward(messages)`` of the whole conversation at its end, less ``format_coef`` where the last message
    had no end. A model whose chat template has no form for calls gets a form of its own by ``parse_calls``; the tools
    are then described to it by the messages.
    """

    def __init__(
        self,
        renderer: Renderer,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        reward: Reward,
        *,
        max_turns: int = 5,
        parse_calls: ParseCalls = calls_of_template,
        format_coef: float = 0.1,
    ) -> None:
        self.renderer, self.messages, self.reward = renderer, list(messages), reward
        self.tools = {tool.name: tool for tool in tools}
        self.max_turns, self.parse_calls, self.format_coef = max_turns, parse_calls, format_coef
        self._num_turns = 0
        self._specs = [tool.spec for tool in tools] if parse_calls is calls_of_template else None

    def prompt_messages(self) -> Sequence[Message]:
        # Tools that the chat template describes are in no message: turns are then read from the tokens.
        return () if self._specs else list(self.messages)

    def _observation(self) -> tuple[Observation, StopCondition]:
        prompt = self.renderer.build_generation_prompt(self.messages, tools=self._specs)
        return prompt, self.renderer.get_stop_sequences()

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        return self._observation()

    async def step(self, action: Action) -> StepResult:
        message, termination = self.renderer.parse_response(action)
        self.messages.append(message)
        self._num_turns += 1
        is_malformed = termination is Termination.MALFORMED
        answers = [] if is_malformed else await self._answer_calls(message)
        self.messages += [answer for answer, _, _ in answers]
        calls = [call for _, _, call in answers]
        metrics: Metrics = {"malformed": float(is_malformed), "tool_calls": len(answers), "tool_error": 0}
        for _, result, _ in answers:
            metrics |= result.metrics
        is_over = (
            not answers or self._num_turns >= self.max_turns or any(result.should_stop for _, result, _ in answers)
        )
        if not is_over:
            observation, stop = self._observation()
            return StepResult(0.0, False, observation, stop, metrics, tool_calls=calls)
        rewarded = self.reward(self.messages)
        reward = float(await rewarded if inspect.isawaitable(rewarded) else rewarded)
        metrics["correct"] = reward
        reward -= self.format_coef * is_malformed
        stop = self.renderer.get_stop_sequences()
        return StepResult(reward, True, ModelInput.empty(), stop, metrics, tool_calls=calls)

    async def _answer_calls(self, message: Message) -> list[tuple[Message, ToolResult, RolloutToolCall]]:
        calls = self.parse_calls(message)
        results = list(await asyncio.gather(*(self._call(call) for call in calls)))
        answers = [
            (
                _tool_message(call, result),
                result,
                _called(call["function"]["name"], call["function"]["arguments"], result),
            )
            for call, result in zip(calls, results, strict=True)
        ]
        for unparsed in message.get("unparsed_tool_calls", []):
            result = _error(f"this is no call: {unparsed['error']}")
            told: Message = {"role": "tool", "content": result.content}
            answers.append((told, result, _called("", unparsed["text"], result)))
        return answers

    async def _call(self, call: ToolCall) -> ToolResult:
        name = call["function"]["name"]
        if name not in self.tools:
            return _error(f"there is no tool {name!r}; there are {', '.join(self.tools)}")
        try:
            return await self.tools[name](call_arguments(call))
        except InvalidInput as error:
            return _error(str(error))


def _called(name: str, arguments: Any, result: ToolResult) -> RolloutToolCall:
    """Return a call with its answer, for the transcript."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    is_error = bool(result.metrics.get("tool_error"))
    return RolloutToolCall(
        name=name,
        arguments=text,
        result=None if is_error else result.content,
        error=result.content if is_error else None,
    )


def _tool_message(call: ToolCall, result: ToolResult) -> Message:
    message: Message = {"role": "tool", "content": result.content, "name": call["function"]["name"]}
    if "id" in call:
        message["tool_call_id"] = call["id"]
    return message
