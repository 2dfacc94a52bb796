"""Chat completions: messages through the model's template, answers taken apart again, whole or in chunks."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from lorimer import types
from lorimer.chat.parsing import END_THINK, THINK, AnswerFormat, AnswerParser, Part, joined, merged
from lorimer.chat.templates import RESERVED, ChatTemplate
from lorimer.chat.tools import Call
from lorimer.scheduler.streaming import Piece
from lorimer.server.context import context_of
from lorimer.server.openai import generating
from lorimer.server.openai.generating import Choice, Record, Source, TokenScore, Wanted, check_room, find_source
from lorimer.server.openai.grammars import answer_grammar, chosen_tools, tool_syntax
from lorimer.server.openai.images import images_of, prompt_with
from lorimer.server.openai.parameters import BadParameter
from lorimer.server.openai.schemas import ChatRequest, ImagePart, Message
from lorimer.server.openai.usage import Usage
from lorimer.server.settings import Settings
from lorimer.types.stops import StopMatcher


@dataclass(frozen=True)
class ChatJob:
    """A request that can be sampled."""

    body: ChatRequest
    source: Source
    wanted: Wanted
    form: AnswerFormat
    record: Record | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    answer_id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.body.model}

    def choices(self) -> "list[ChatChoice]":
        marked = (self.source.text.added_token(marker) for marker in self.form.markers)
        shown = [token for token in marked if token is not None]
        stops = StopMatcher(self.body.stops)
        return [
            ChatChoice(Choice.begin(i, self.source, self.wanted.tokens, stops, shown), self.form)
            for i in range(self.body.n)
        ]


async def prepare(request: Request, body: ChatRequest, source: Source | None = None) -> ChatJob:
    """Render and encode the messages; everything that can be refused before sampling is refused here.

    Without a ``source`` the model that the body names answers.
    """
    source = source or await find_source(request, body.model)
    return await asyncio.to_thread(_prepare, body, source, context_of(request).settings)


def _prepare(body: ChatRequest, source: Source, settings: Settings) -> ChatJob:
    tools = chosen_tools(body)
    template = source.text.template(bool(tools))
    images = images_of(body.messages, source.text, template, settings)
    syntax = tool_syntax(source.text, template) if tools else None
    grammar = answer_grammar(body, tools, syntax, source.text)
    sent = [tool.model_dump(exclude_unset=True) for tool in tools.values()] or None
    prompt = template.render(template_messages(body.messages, template), sent, template_values(body))
    tokens = source.text.encode(prompt, add_special_tokens=False)
    max_tokens = body.max_completion_tokens or body.max_tokens
    check_room(source.text, len(tokens), max_tokens)
    has_thoughts = END_THINK in template.source
    form = AnswerFormat(
        has_thoughts=has_thoughts,
        # A grammar begins with the answer itself, so the thought that the prompt opens stays empty.
        thinks_first=has_thoughts and not grammar and prompt.rstrip().endswith(THINK),
        syntax=syntax,
        tools={name: tool.function.parameters for name, tool in tools.items()},
        max_calls=None if body.parallel_tool_calls else 1,
    )
    topk = (body.top_logprobs or 0) if body.logprobs else 0
    seen = prompt_with(images, tokens, source.text) if images else None
    return ChatJob(body, source, Wanted(tokens, max_tokens, topk, grammar=grammar, prompt=seen), form)


def template_messages(messages: list[Message], template: ChatTemplate) -> list[dict[str, Any]]:
    """Messages in the words of chat templates: arguments of calls are objects, and text is never missing."""
    has_developer = "developer" in template.source
    made = [_template_message(message, index, has_developer) for index, message in enumerate(messages)]
    for message, one in zip(messages, made, strict=True):
        if template.wants_parts or any(isinstance(part, ImagePart) for part in message.parts):
            one["content"] = [
                {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
                for part in message.parts
            ]
    return made


def _template_message(message: Message, index: int, has_developer: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and not has_developer else message.role
    made: dict[str, Any] = {"role": role, "content": message.text}
    if message.name:
        made["name"] = message.name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if thought := message.reasoning_content or message.reasoning:
        made |= {"reasoning_content": thought, "thinking": thought}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        call.function.arguments, f"messages[{index}].tool_calls[{number}].function.arguments"
                    ),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return made


def _arguments(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadParameter(place, f"{place} is {text[:100]!r}; a JSON object is accepted")
    return value


def template_values(body: ChatRequest) -> dict[str, Any]:
    """What the caller tells the template besides the messages."""
    reserved = sorted(RESERVED & body.chat_template_kwargs.keys())
    if reserved:
        raise BadParameter(
            "chat_template_kwargs", f"chat_template_kwargs has {reserved[0]!r}, which callers cannot set"
        )
    values: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        values = {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"}
    return values | body.chat_template_kwargs


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────


class ChatChoice:
    """One sequence as it becomes a message."""

    def __init__(self, choice: Choice, form: AnswerFormat) -> None:
        self.choice = choice
        self.parser = AnswerParser(form)
        self.num_thought = 0
        """Tokens of thoughts."""

    def add(self, piece: Piece) -> list[Part]:
        parts: list[Part] = []
        for text in self.choice.add(piece):
            self.num_thought += self.parser.is_thinking
            parts += self.parser.add(text)
        if piece.stop_reason is not None:
            parts += self.parser.finish()
        return merged(parts)

    @property
    def finish_reason(self) -> str | None:
        reason = self.choice.finish_reason
        return "tool_calls" if reason == "stop" and self.parser.num_calls else reason

    def scores(self) -> list[dict[str, Any]]:
        """Of the tokens since the last time; the end of the sequence is none of the answer."""
        end = self.choice.source.text.eos_token_ids
        return [shown_score(score) for score in self.choice.take_scores() if score.token not in end]


def shown_score(score: TokenScore) -> dict[str, Any]:
    top = [_shown_token(data, logprob) for _, data, logprob in score.top]
    return {**_shown_token(score.data, score.logprob), "top_logprobs": top}


def _shown_token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def shown_call(call: Call) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def shown_message(parts: list[Part]) -> dict[str, Any]:
    calls = [shown_call(part.call) for part in parts if part.call is not None]
    content = joined(parts, "content")
    message: dict[str, Any] = {"role": "assistant", "content": content if content.strip() or not calls else None}
    message["refusal"] = None
    if thought := joined(parts, "reasoning").rstrip():
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


async def answer(request: Request, job: ChatJob) -> dict[str, Any]:
    """The whole answer, when it is there."""
    samples = generating.start(request, job.source, job.body, [job.wanted])
    (response,) = await generating.whole(samples, job.record)
    return completion(job, response, samples[0].tokens)


def completion(job: ChatJob, response: types.SampleResponse, num_prompt: int) -> dict[str, Any]:
    choices, shown = job.choices(), []
    for choice, piece in zip(choices, generating.whole_pieces(response), strict=True):
        message = shown_message(choice.add(piece))
        shown.append(
            {
                "index": piece.index,
                "message": message,
                "finish_reason": choice.finish_reason,
                "logprobs": {"content": choice.scores(), "refusal": None} if job.body.logprobs else None,
            }
        )
    return {**job.head("chat.completion"), "choices": shown, "usage": usage(choices, response, num_prompt).shown()}


def usage(choices: list[ChatChoice], response: types.SampleResponse, num_prompt: int) -> Usage:
    """``num_prompt`` as the engine counts, which alone knows how long an image is."""
    return Usage(
        num_prompt=num_prompt,
        num_cached=response.prompt_cache_hit_tokens,
        num_sampled=sum(choice.choice.num_tokens for choice in choices),
        num_thought=sum(choice.num_thought for choice in choices),
    )


async def chunks(request: Request, job: ChatJob) -> AsyncGenerator[Mapping[str, Any]]:
    """The answer in chunks, the first of which comes with the first tokens."""
    choices, begun = job.choices(), set()
    samples = generating.start(request, job.source, job.body, [job.wanted])
    head = job.head("chat.completion.chunk")
    options = job.body.stream_options
    with_usage = options is not None and options.include_usage
    if with_usage:
        head["usage"] = None
    async with aclosing(generating.streamed(samples, job.record)) as pieces:
        async for _, piece in pieces:
            choice = choices[piece.index]
            deltas = [] if piece.index in begun else [{"role": "assistant", "content": ""}]
            begun.add(piece.index)
            num_before = choice.parser.num_calls
            deltas += _deltas(choice.add(piece), num_before)
            logprobs = {"content": choice.scores(), "refusal": None} if job.body.logprobs else None
            if choice.finish_reason is not None or (logprobs and not deltas):
                deltas.append({})
            for number, delta in enumerate(deltas):
                is_last = number == len(deltas) - 1
                shown = {
                    "index": piece.index,
                    "delta": delta,
                    "finish_reason": choice.finish_reason if is_last else None,
                    "logprobs": logprobs if is_last else None,
                }
                yield {**head, "choices": [shown]}
    if with_usage:
        used = usage(choices, samples[0].answer.result(), samples[0].tokens)
        yield {**head, "choices": [], "usage": used.shown()}


def _deltas(parts: list[Part], num_calls: int) -> list[dict[str, Any]]:
    """Changes to a message that has ``num_calls`` calls already."""
    deltas: list[dict[str, Any]] = []
    for part in parts:
        if part.call is not None:
            deltas.append({"tool_calls": [{"index": num_calls, **shown_call(part.call)}]})
            num_calls += 1
        else:
            deltas.append({"content" if part.kind == "content" else "reasoning_content": part.text})
    return deltas
