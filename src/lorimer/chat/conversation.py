"""Types of a conversation: messages, tool calls, tools, and which part of a conversation is trained on.

Messages are plain dictionaries in the format of OpenAI's chat API, so a line of a chat JSONL file needs no conversion.
``cookbook/renderers.py`` lists the renderers that turn them into tokens.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, NotRequired, Required, TypedDict

from lorimer.errors import InvalidInput, Unsupported

Role = str
"""``system``, ``user``, ``assistant``, ``tool``, or another role that the model's chat template accepts."""


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingPart(TypedDict):
    type: Literal["thinking"]
    thinking: str


class ImagePart(TypedDict):
    """An image in the format of the official cookbook."""

    type: Literal["image"]
    image: Any
    """A ``PIL.Image.Image``, or a URL that holds one: ``data:image/png;base64,...``."""


class ImageUrl(TypedDict):
    url: str


class ImageUrlPart(TypedDict):
    """An image in the format of OpenAI's API, as a ``data:`` URL."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = TextPart | ThinkingPart | ImagePart | ImageUrlPart
PART_TYPES = ("text", "thinking", "image", "image_url")
Content = str | list[ContentPart]


class FunctionCall(TypedDict):
    name: str
    arguments: dict[str, Any] | str
    """An object, or its JSON as OpenAI's API writes it."""


class ToolCall(TypedDict):
    """A call that the assistant asks for."""

    type: Literal["function"]
    function: FunctionCall
    id: NotRequired[str]


class UnparsedToolCall(TypedDict):
    """Text between the markers of a tool call that cannot be parsed as one."""

    text: str
    error: str


class FunctionSpec(TypedDict):
    name: str
    description: str
    parameters: dict[str, Any]
    """A JSON schema of an object."""


class ToolSpec(TypedDict):
    """A tool that the assistant may call."""

    type: Literal["function"]
    function: FunctionSpec


class Message(TypedDict, total=False):
    role: Required[Role]
    content: Required[Content]
    thinking: str
    """Reasoning before the answer; may instead be a part of ``content``."""
    tool_calls: list[ToolCall]
    unparsed_tool_calls: list[UnparsedToolCall]
    """Only in parsed responses."""
    tool_call_id: str
    """In a tool's message: the call that it answers."""
    name: str
    """In a tool's message: the name of the tool."""
    trainable: bool
    """Read with ``TrainOn.CUSTOMIZED`` only."""


class TrainOn(StrEnum):
    """Which tokens of a conversation have weight 1. An assistant's tokens are those it would have to sample."""

    LAST_ASSISTANT_MESSAGE = "last_assistant_message"
    LAST_ASSISTANT_TURN = "last_assistant_turn"
    """All messages of the assistant after the last one of a user: its tool calls and its answer."""
    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"
    ALL_MESSAGES = "all_messages"
    """The content of every role, without headers."""
    ALL_TOKENS = "all_tokens"
    ALL_USER_AND_SYSTEM_MESSAGES = "all_user_and_system_messages"
    CUSTOMIZED = "customized"
    """The messages whose ``trainable`` is true; each message must have the field."""


class Termination(StrEnum):
    """How a sampled response ended."""

    STOP_SEQUENCE = "stop_sequence"
    EOS = "eos"
    """By the tokenizer's end of text, where the template ends a message with another token."""
    MALFORMED = "malformed"
    """It has no end, or continues after its end."""

    @property
    def is_clean(self) -> bool:
        return self is not Termination.MALFORMED

    @property
    def is_stop_sequence(self) -> bool:
        return self is Termination.STOP_SEQUENCE


def make_tool_call(name: str, arguments: Mapping[str, Any], call_id: str | None = None) -> ToolCall:
    call: ToolCall = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    if call_id is not None:
        call["id"] = call_id
    return call


def add_calls(message: Message, calls: list[ToolCall], unparsed: list[UnparsedToolCall]) -> None:
    """Set ``tool_calls`` and ``unparsed_tool_calls`` of a parsed message, if there are any."""
    if calls:
        message["tool_calls"] = calls
    if unparsed:
        message["unparsed_tool_calls"] = unparsed


def call_arguments(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call as an object; parse them if they are JSON text."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise InvalidInput(f"the arguments {arguments!r} of a tool call are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidInput(f"the arguments of a tool call are {arguments!r}; a JSON object is accepted")
    return arguments


def text_of(message: Message) -> str:
    """Return the text of a message, without thinking and images."""
    return _joined(message, "text")


def thinking_of(message: Message) -> str:
    """Return the thinking of a message, from its field or from parts of its content; empty if there is none."""
    return message.get("thinking") or _joined(message, "thinking")


def _joined(message: Message, kind: str) -> str:
    content = message["content"]
    if content is None:  # as in OpenAI's API beside tool calls
        return ""
    if isinstance(content, str):
        return content if kind == "text" else ""
    for part in content:
        if part["type"] not in PART_TYPES:
            raise Unsupported(f"a message has a part of type {part['type']!r}; accepted are {', '.join(PART_TYPES)}")
    return "".join(str(part.get(kind, "")) for part in content)


def check_messages(messages: Sequence[Message]) -> None:
    """Validate a conversation; raise ``InvalidInput`` that names the offending message."""
    if not messages:
        raise InvalidInput("a conversation has no messages; at least one is needed")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise InvalidInput(f"message {index} is {message!r}; an object with role and content is accepted")
        if not isinstance(message["role"], str):
            raise InvalidInput(f"the role of message {index} is {message['role']!r}; a string is accepted")


def trained_indices(messages: Sequence[Message], train_on: TrainOn) -> list[int]:
    """Return the indices of the trained messages, in order; all of them for ``ALL_TOKENS``."""
    roles = [message["role"] for message in messages]
    assistant = [index for index, role in enumerate(roles) if role == "assistant"]
    match train_on:
        case TrainOn.LAST_ASSISTANT_MESSAGE:
            return assistant[-1:]
        case TrainOn.LAST_ASSISTANT_TURN:
            last_user = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
            return [index for index in assistant if index > last_user]
        case TrainOn.ALL_ASSISTANT_MESSAGES:
            return assistant
        case TrainOn.ALL_USER_AND_SYSTEM_MESSAGES:
            return [index for index, role in enumerate(roles) if role in ("user", "system")]
        case TrainOn.CUSTOMIZED:
            missing = [index for index, message in enumerate(messages) if "trainable" not in message]
            if missing:
                raise InvalidInput(f"message {missing[0]} has no field 'trainable', which TrainOn.CUSTOMIZED needs")
            return [index for index, message in enumerate(messages) if message["trainable"]]
    return list(range(len(messages)))
