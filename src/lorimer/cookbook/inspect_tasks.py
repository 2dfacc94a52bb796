"""Tasks of ``inspect-ai`` as evaluators: a training loop measures the weights it has on any of them.

The model that a task asks is the sampling client itself, through the renderer of its base, so that no address and no
checkpoint is needed. Finished models are better asked from inspect's own command line: see ``docs/evaluation.md``.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lorimer import SamplingClient, SamplingParams
from lorimer.chat.conversation import Message, Termination, call_arguments, make_tool_call, text_of, thinking_of
from lorimer.cookbook.evaluation import Evaluator
from lorimer.cookbook.renderers import Renderer
from lorimer.errors import InvalidInput, LorimerError


def inspect_tasks(
    tasks: Any,
    renderer: Renderer,
    *,
    log_dir: Path | str,
    max_tokens: int = 512,
    temperature: float = 0.0,
    name: str = "inspect",
    **options: Any,
) -> Evaluator:
    """``name/<task>/<scorer>/<metric>`` of tasks as ``inspect_ai.eval`` takes them, and its other ``options``."""
    inspect_ai = _load("inspect_ai")

    async def evaluate(sampling_client: SamplingClient, /) -> dict[str, float]:
        config = _load("inspect_ai.model").GenerateConfig(max_tokens=max_tokens, temperature=temperature)
        model = inspect_model(sampling_client, renderer, config)
        logs = await inspect_ai.eval_async(tasks, model=model, log_dir=str(log_dir), **options)
        return {key: value for log in logs for key, value in _metrics(log, name).items()}

    return evaluate


def _metrics(log: Any, name: str) -> dict[str, float]:
    if log.status != "success":
        raise LorimerError(f"the task {log.eval.task!r} ended with {log.status!r}: {log.error and log.error.message}")
    return {
        f"{name}/{log.eval.task.rpartition('/')[2]}/{score.name}/{metric.name}": float(metric.value)
        for score in log.results.scores
        for metric in score.metrics.values()
    }


def inspect_model(sampling_client: SamplingClient, renderer: Renderer, config: Any) -> Any:
    """A model for ``inspect_ai.eval`` that samples from a sampling client."""
    models = _load("inspect_ai.model")

    class LorimerAPI(models.ModelAPI):  # type: ignore[misc, name-defined]
        async def generate(self, input: Sequence[Any], tools: Sequence[Any], tool_choice: Any, config: Any) -> Any:
            if tool_choice not in ("auto", "none"):
                raise InvalidInput(f"tool_choice is {tool_choice!r}; 'auto' and 'none' are accepted")
            specs = [_tool(tool) for tool in tools] if tool_choice == "auto" else []
            prompt = renderer.build_generation_prompt([_message(one) for one in input], tools=specs or None)
            params = SamplingParams(
                max_tokens=config.max_tokens,
                temperature=1.0 if config.temperature is None else config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=-1 if config.top_k is None else config.top_k,
                seed=config.seed,
                stop=renderer.get_stop_sequences(),
            )
            sampled = await sampling_client.sample_async(prompt, config.num_choices or 1, params)
            choices = [_choice(models, renderer, sequence) for sequence in sampled.sequences]
            written = sum(len(sequence.tokens) for sequence in sampled.sequences)
            usage = models.ModelUsage(
                input_tokens=prompt.length, output_tokens=written, total_tokens=prompt.length + written
            )
            return models.ModelOutput(model=self.model_name, choices=choices, usage=usage)

    registered = models.modelapi(name="lorimer")(LorimerAPI)
    return models.Model(registered("sampling_client", config=config), config)


def _choice(models: Any, renderer: Renderer, sequence: Any) -> Any:
    message, termination = renderer.parse_response(sequence.tokens)
    calls = [
        _load("inspect_ai.tool").ToolCall(
            id=call.get("id", f"call_{index}"), function=call["function"]["name"], arguments=call_arguments(call)
        )
        for index, call in enumerate(message.get("tool_calls", []))
    ]
    content: Any = text_of(message)
    if thought := thinking_of(message):
        content = [models.ContentReasoning(reasoning=thought), models.ContentText(text=content)]
    ended = "stop" if termination is not Termination.MALFORMED else "max_tokens"
    return models.ChatCompletionChoice(
        message=models.ChatMessageAssistant(content=content, tool_calls=calls or None, source="generate"),
        stop_reason="tool_calls" if calls else ended,
    )


def _message(message: Any) -> Message:
    ours: Message = {"role": message.role, "content": message.text}
    if message.role == "assistant" and message.tool_calls:
        ours["tool_calls"] = [make_tool_call(call.function, call.arguments, call.id) for call in message.tool_calls]
    if message.role == "tool":
        ours["tool_call_id"], ours["name"] = message.tool_call_id or "", message.function or ""
    return ours


def _tool(tool: Any) -> Any:
    parameters = tool.parameters.model_dump(exclude_none=True)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InvalidInput(
            "tasks of inspect need the package inspect-ai, which is not installed: pip install inspect-ai"
        ) from None
