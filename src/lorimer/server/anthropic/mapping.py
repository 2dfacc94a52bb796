"""Between Anthropic's messages and the chat of ``server/openai``: requests one way, answers and events the other."""

import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from lorimer.chat.parsing import Part
from lorimer.server.anthropic.schemas import (
    CountRequest,
    ImageBlock,
    Message,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from lorimer.server.openai import chat, generating
from lorimer.server.openai.chat import ChatChoice, ChatJob
from lorimer.server.openai.parameters import BadParameter, check_parameters
from lorimer.server.openai.schemas import ChatRequest
from lorimer.server.openai.sse import Event

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: CountRequest) -> ChatRequest:
    """The same request as chat has it."""
    if body.messages[-1].role == "assistant":
        raise BadParameter("messages", "the last message is the assistant's; beginning its answer is not available")
    told = "".join(text_of(body.system))
    messages = [{"role": "system", "content": told}] if told else []
    for message in body.messages:
        messages += chat_messages(message)
    made: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.tools:
        made["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in body.tools
        ]
    made |= _tool_choice(body) | _thinking(body)
    if isinstance(body, MessagesRequest):
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        made |= {name: getattr(body, name) for name in names} | {"stop": body.stop_sequences}
    return check_parameters(made, ChatRequest)


def _tool_choice(body: CountRequest) -> dict[str, Any]:
    if (choice := body.tool_choice) is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    chosen = named if choice.type == "tool" else CHOICES[choice.type]
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(body: CountRequest) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        values["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None:
        values["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    return values


def text_of(content: str | Sequence[TextBlock]) -> list[str]:
    return [content] if isinstance(content, str) else [block.text for block in content]


def chat_content(content: str | Sequence[TextBlock | ImageBlock]) -> str | list[dict[str, Any]]:
    """Text is joined; where images stand between, everything is a part."""
    if isinstance(content, str):
        return content
    if not any(isinstance(block, ImageBlock) for block in content):
        return "".join(block.text for block in content if isinstance(block, TextBlock))
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else {
            "type": "image_url",
            "image_url": {"url": f"data:{block.source.media_type};base64,{block.source.data}"},
        }
        for block in content
    ]


def chat_messages(message: Message) -> list[dict[str, Any]]:
    """One message of theirs is several of chat where it holds results of tools."""
    results: list[dict[str, Any]] = []
    said = [block for block in message.blocks if isinstance(block, TextBlock | ImageBlock)]
    made: dict[str, Any] = {"role": message.role, "content": chat_content(said)}
    calls: list[dict[str, Any]] = []
    for block in message.blocks:
        match block:
            case ThinkingBlock(thinking=thinking):
                made["reasoning_content"] = made.get("reasoning_content", "") + thinking
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                content = chat_content(block.content)
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    if calls:
        made["tool_calls"] = calls
    return results + ([made] if made["content"] or calls or not results else [])


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────


def stop_reason(choice: ChatChoice) -> dict[str, Any]:
    found = choice.choice.stop.found
    reason = STOP_REASONS.get(choice.finish_reason or "", "end_turn")
    return {"stop_reason": "stop_sequence" if found is not None else reason, "stop_sequence": found}


def shown_message(job: ChatJob, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": job.body.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": shown_usage(len(job.wanted.tokens), 0, 0),
    }


def shown_usage(num_prompt: int, num_cached: int, num_sampled: int) -> dict[str, int]:
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_sampled,
    }


def begun_block(part: Part) -> dict[str, Any]:
    """The block of a part, before its text."""
    if part.call is not None:
        return {"type": "tool_use", "id": part.call.call_id, "name": part.call.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def whole_block(part: Part) -> dict[str, Any]:
    if part.call is not None:
        return begun_block(part) | {"input": json.loads(part.call.arguments)}
    return begun_block(part) | {"thinking" if part.kind == "reasoning" else "text": part.text}


async def answer(request: Request, job: ChatJob) -> dict[str, Any]:
    """The whole answer, when it is there."""
    samples = generating.start(request, job.source, job.body, [job.wanted])
    (response,) = await generating.whole(samples)
    (choice,), (piece,) = job.choices(), generating.whole_pieces(response)
    blocks = [whole_block(part) for part in choice.add(piece)]
    used = shown_usage(samples[0].tokens, response.prompt_cache_hit_tokens, choice.choice.num_tokens)
    return shown_message(job, blocks) | stop_reason(choice) | {"usage": used}


async def events(request: Request, job: ChatJob) -> AsyncGenerator[Event]:
    """The answer in events, the first of which comes with the first tokens."""
    (choice,) = job.choices()
    blocks = Blocks()
    samples = generating.start(request, job.source, job.body, [job.wanted])
    async with aclosing(generating.streamed(samples)) as pieces:
        is_begun = False
        async for _, piece in pieces:
            if not is_begun:
                is_begun = True
                yield named({"type": "message_start", "message": shown_message(job, [])})
            for part in choice.add(piece):
                for event in blocks.add(part):
                    yield named(event)
    for event in blocks.end():
        yield named(event)
    cached = samples[0].answer.result().prompt_cache_hit_tokens
    used = shown_usage(samples[0].tokens, cached, choice.choice.num_tokens)
    yield named({"type": "message_delta", "delta": stop_reason(choice), "usage": used})
    yield named({"type": "message_stop"})


class Blocks:
    """Parts as events of blocks: neighbours of one kind share a block, every call has its own."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def add(self, part: Part) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        if part.call is not None or part.kind != self._kind:
            made += self.end()
            self._index, self._kind = self._index + 1, part.kind
            made.append({"type": "content_block_start", "index": self._index, "content_block": begun_block(part)})
        if part.call is not None:
            delta = {"type": "input_json_delta", "partial_json": part.call.arguments}
        elif part.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            delta = {"type": "text_delta", "text": part.text}
        return [*made, {"type": "content_block_delta", "index": self._index, "delta": delta}]

    def end(self) -> list[dict[str, Any]]:
        """Close the block that is open."""
        was_open, self._kind = bool(self._kind), ""
        return [{"type": "content_block_stop", "index": self._index}] if was_open else []


def named(event: dict[str, Any]) -> Event:
    return event["type"], event


async def count(request: Request, body: CountRequest) -> dict[str, int]:
    """How many tokens the prompt has."""
    job = await chat.prepare(request, chat_request(body))
    if job.wanted.prompt is not None:
        raise BadParameter(
            "messages", "messages hold an image, whose tokens only the engine counts; texts are accepted"
        )
    return {"input_tokens": len(job.wanted.tokens)}
