"""Base class of renderers with a hard-coded chat format: each message is a header and content, encoded separately.

The tokens and weights are those of the official cookbook's renderers of the same names. ``TemplateRenderer`` uses the
chat template of a tokenizer instead and encodes a conversation as one text, so tokens may differ where pieces meet. The
formats themselves are in ``formats.py`` and the modules named like a family of models.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorimer.chat.conversation import (
    Content,
    ContentPart,
    Message,
    Termination,
    ToolSpec,
    TrainOn,
    check_messages,
    text_of,
)
from lorimer.chat.images import has_images
from lorimer.errors import InvalidInput, Unsupported
from lorimer.types import ModelInput


class Place(NamedTuple):
    """The position of a message in its conversation."""

    position: int
    is_last: bool
    last_user: int
    """The index of the last message of a user; -1 if there is none."""
    follows_tool: bool = False
    precedes_tool: bool = False
    previous: Message | None = None
    following: Message | None = None
    keeps_thoughts: bool = True
    """Whether the message belongs to the turn that keeps its thoughts, in formats that drop those of earlier turns."""


class Written(NamedTuple):
    """The tokens of one message."""

    header: list[int]
    """Tokens that name the role; never sampled."""
    output: list[int]
    """Tokens of the content and of the end of the message."""
    overlap: tuple[int, ...] = ()
    """Tokens that complete the stop sequence after the last message, in place of the next header."""


class FormatRenderer(ABC):
    has_extension_property = True
    is_told_not_to_think = False
    """Whether prompts end with a closed block of thoughts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def write(self, message: Message, place: Place) -> Written: ...

    @abstractmethod
    def get_stop_sequences(self) -> list[int] | list[str]: ...

    @abstractmethod
    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]: ...

    def create_conversation_prefix_with_tools(self, tools: Sequence[Any], system_prompt: str = "") -> list[Message]:
        """Return the messages that begin a conversation with these tools."""
        raise Unsupported(f"{type(self).__name__} has no form for tools; 'qwen3' and 'template' have one")

    # ── prompts ───────────────────────────────────────────────────────────────────────────────────────

    def build_generation_prompt(
        self,
        messages: Sequence[Message],
        role: str = "assistant",
        prefill: str | None = None,
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ModelInput:
        tokens = self._prompt(self._prepared(messages, tools), role)
        return ModelInput.from_ints(tokens + (self._encode(prefill) if prefill else []))

    def _prompt(self, messages: Sequence[Message], role: str = "assistant", first_kept: int | None = None) -> list[int]:
        """Return the prompt; thoughts are kept from message ``first_kept`` on, if given."""
        first_kept = self._first_kept(messages, is_prompt=True) if first_kept is None else first_kept
        tokens = self._beginning()
        for message, place in _places(messages, first_kept):
            written = self.write(message, place)
            tokens += written.header + written.output
        count, previous = len(messages), messages[-1] if messages else None
        place = Place(
            count,
            True,
            last_user(messages),
            follows_tool=previous is not None and previous["role"] == "tool",
            previous=previous,
            keeps_thoughts=count >= first_kept,
        )
        return tokens + self._prompt_header(role, place)

    def _prompt_before(self, messages: list[Message], position: int) -> list[int]:
        """Return the prompt from which a message of an example would be sampled."""
        return self._prompt(messages[:position])

    def _turn_start(self, messages: Sequence[Message]) -> int:
        """Return the index of the first message of the turn that the model is to produce."""
        return last_user(messages) + 1

    def _first_kept(self, messages: Sequence[Message], *, is_prompt: bool) -> int:
        """Return the index of the first message that keeps its thoughts, where a format drops those of earlier ones."""
        return self._turn_start(messages if is_prompt else messages[:-1])

    def _prompt_header(self, role: str, place: Place) -> list[int]:
        return self.write({"role": role, "content": ""}, place).header

    def _beginning(self) -> list[int]:
        return []

    # ── training ──────────────────────────────────────────────────────────────────────────────────────

    def build_supervised_example(
        self,
        messages: Sequence[Message],
        train_on_what: TrainOn = TrainOn.LAST_ASSISTANT_MESSAGE,
        tools: Sequence[ToolSpec] | None = None,
    ) -> tuple[ModelInput, NDArray[np.float32]]:
        return self._example(self._prepared(messages, tools), TrainOn(train_on_what))

    def build_supervised_examples(
        self,
        messages: Sequence[Message],
        train_on_what: TrainOn = TrainOn.LAST_ASSISTANT_TURN,
        tools: Sequence[ToolSpec] | None = None,
    ) -> list[tuple[ModelInput, NDArray[np.float32]]]:
        """Return one sequence, or one for each trained message if the format rewrites earlier messages."""
        prepared, train_on_what = self._prepared(messages, tools), TrainOn(train_on_what)
        if self.has_extension_property:
            return [self._example(prepared, train_on_what)]
        match train_on_what:
            case TrainOn.LAST_ASSISTANT_MESSAGE:
                first = len(prepared) - 1
            case TrainOn.LAST_ASSISTANT_TURN:
                first = self._turn_start(prepared)
            case TrainOn.ALL_ASSISTANT_MESSAGES:
                first = 0
            case _:
                raise Unsupported(
                    f"{type(self).__name__} writes earlier messages otherwise, so {str(train_on_what)!r} cannot be "
                    "split into sequences; accepted are last_assistant_message, last_assistant_turn and "
                    "all_assistant_messages, or build_supervised_example"
                )
        return [
            self._example(prepared[: index + 1], TrainOn.LAST_ASSISTANT_MESSAGE)
            for index in range(max(first, 0), len(prepared))
            if prepared[index]["role"] == "assistant"
        ]

    def _example(self, messages: list[Message], train_on: TrainOn) -> tuple[ModelInput, NDArray[np.float32]]:
        _check_trainable(messages, train_on)
        tokens = self._beginning()
        weights = [0.0] * len(tokens)
        turn = self._turn_start(messages[:-1])
        for message, place in _places(messages, self._first_kept(messages, is_prompt=False)):
            written = self.write(message, place)
            said = written.output + (list(written.overlap) if place.is_last else [])
            tokens += written.header + said
            weights += [float(train_on is TrainOn.ALL_TOKENS)] * len(written.header)
            weights += [float(_is_trained(message, place, train_on, turn))] * len(said)
        untrained = self._num_given(messages, train_on, tokens)
        weights[:untrained] = [0.0] * untrained
        return ModelInput.from_ints(tokens), np.array(weights, np.float32)

    def _num_given(self, messages: list[Message], train_on: TrainOn, tokens: list[int]) -> int:
        """Return the length of the prompt from which the first trained message would be sampled; 0 if unknown."""
        if train_on is TrainOn.LAST_ASSISTANT_MESSAGE:
            first = len(messages) - 1
        elif train_on is TrainOn.LAST_ASSISTANT_TURN:
            first = last_user(messages) + 1
        else:
            return 0
        if not 0 <= first < len(messages) or messages[first]["role"] != "assistant":
            return 0
        prompt = self._prompt_before(messages, first)
        if tokens[: len(prompt)] == prompt:
            return len(prompt)
        if self.is_told_not_to_think:
            raise InvalidInput(
                f"message {first} thinks, {messages[first]['content']!s:.200}, after a prompt that tells the model not "
                "to; a renderer that lets it think is accepted, or the message without its thoughts"
            )
        return 0

    # ── messages and tokens ───────────────────────────────────────────────────────────────────────────

    def _prepared(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> list[Message]:
        """Return the messages with thinking as parts of their content, after a system message with the tools."""
        if messages:
            check_messages(messages)
        prepared = [_with_thoughts_in_parts(message) for message in messages]
        if not tools:
            return prepared
        system = text_of(prepared.pop(0)) if prepared and prepared[0]["role"] == "system" else ""
        return [*self.create_conversation_prefix_with_tools(tools, system), *prepared]

    def _encode(self, text: str, **options: Any) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, **options))

    def _token(self, mark: str) -> int:
        """Return the token of a marker; refuse a tokenizer without it, whose model was trained on another format."""
        tokens = self._encode(mark)
        if len(tokens) != 1:
            name = getattr(self.tokenizer, "name_or_path", "the tokenizer")
            raise InvalidInput(
                f"{name!r} has no token {mark!r}, which {type(self).__name__} needs; 'auto' takes the format of the "
                "tokenizer's own chat template"
            )
        return tokens[0]

    def _until(self, response: Sequence[int], end: int) -> tuple[str, Termination]:
        """Return the text before the token that ends a message, and how the response ended."""
        tokens = list(response)
        if (count := tokens.count(end)) > 1:
            raise InvalidInput(
                f"a response has the end of a message {count} times, at most once is accepted; sample with "
                "stop=renderer.get_stop_sequences()"
            )
        is_ended = count == 1
        text = str(self.tokenizer.decode(tokens[: tokens.index(end)] if is_ended else tokens))
        return text, Termination.STOP_SEQUENCE if is_ended else Termination.MALFORMED


def _places(messages: Sequence[Message], first_kept: int) -> list[tuple[Message, Place]]:
    roles = [message["role"] for message in messages]
    user = last_user(messages)
    return [
        (
            message,
            Place(
                index,
                index == len(messages) - 1,
                user,
                follows_tool=roles[max(index - 1, 0) : index] == ["tool"],
                precedes_tool=roles[index + 1 : index + 2] == ["tool"],
                previous=messages[index - 1] if index else None,
                following=messages[index + 1] if index + 1 < len(messages) else None,
                keeps_thoughts=index >= first_kept,
            ),
        )
        for index, message in enumerate(messages)
    ]


def last_user(messages: Sequence[Message]) -> int:
    return max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _is_trained(message: Message, place: Place, train_on: TrainOn, turn: int) -> bool:
    role = message["role"]
    match train_on:
        case TrainOn.LAST_ASSISTANT_MESSAGE:
            return place.is_last and role == "assistant"
        case TrainOn.LAST_ASSISTANT_TURN:
            return role == "assistant" and place.position >= turn
        case TrainOn.ALL_ASSISTANT_MESSAGES:
            return role == "assistant"
        case TrainOn.ALL_USER_AND_SYSTEM_MESSAGES:
            return role in ("user", "system")
        case TrainOn.CUSTOMIZED:
            return bool(message["trainable"])
    return True


def _check_trainable(messages: Sequence[Message], train_on: TrainOn) -> None:
    is_customized = train_on is TrainOn.CUSTOMIZED
    for index, message in enumerate(messages):
        if ("trainable" in message) != is_customized:
            wanted = "each message needs one" if is_customized else "no message may have one"
            has = "has no" if is_customized else "has the"
            raise InvalidInput(f"message {index} {has} field 'trainable'; with {str(train_on)!r} {wanted}")


def _with_thoughts_in_parts(message: Message) -> Message:
    content: Content = "" if message["content"] is None else message["content"]
    if thought := message.get("thinking"):
        parts: list[ContentPart] = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
        content = [{"type": "thinking", "thinking": thought}, *parts]
    if has_images(message):
        raise Unsupported("this renderer has no form for images; 'template' has one where the model reads them")
    return {**message, "content": content}


def has_thought(content: Content) -> bool:
    """Return whether content has thinking, as a part or as a block within a text, closed or not."""
    if isinstance(content, str):
        return "<think>" in content
    return any(part["type"] == "thinking" for part in content)


def only_text(message: Message) -> str:
    """Return the text of a message; refuse a message that holds anything else."""
    content = message["content"]
    if message.get("tool_calls"):
        raise Unsupported("this renderer has no form for tool calls; 'qwen3' and 'template' have one")
    if isinstance(content, str):
        return content
    if len(content) == 1 and content[0]["type"] == "text":
        return content[0]["text"]
    raise InvalidInput(f"the content {content!s:.200} is not one text, which is all that this renderer accepts")
