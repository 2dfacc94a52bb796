"""Conversations as plain text, for base models without a chat template: ``User: ...``, ``Assistant: ...``.

A message ends with an empty line. A sampled response ends where the model names the next role, so the stop sequence is
a string, and the empty line before it does not belong to the message.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lorimer.chat.conversation import (
    Message,
    Termination,
    ToolSpec,
    TrainOn,
    check_messages,
    text_of,
    thinking_of,
    trained_indices,
)
from lorimer.chat.images import has_images
from lorimer.errors import InvalidInput, Unsupported
from lorimer.types import ModelInput

END = "\n\n"
STOP = END + "User:"


class TextRenderer:
    has_extension_property = False
    """The stop sequence of a sampled response is longer than the end of a message in a prompt."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def build_generation_prompt(
        self,
        messages: Sequence[Message],
        role: str = "assistant",
        prefill: str | None = None,
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ModelInput:
        _check(messages, tools)
        tokens = self._beginning() + [
            token for message in messages for part in _parts(message) for token in self._encode(part)
        ]
        return ModelInput.from_ints(
            tokens + self._encode(_header(role)) + self._encode(f" {prefill}" if prefill else "")
        )

    def build_supervised_example(
        self,
        messages: Sequence[Message],
        train_on_what: TrainOn = TrainOn.LAST_ASSISTANT_MESSAGE,
        tools: Sequence[ToolSpec] | None = None,
    ) -> tuple[ModelInput, NDArray[np.float32]]:
        """Return one sequence; ``User:`` follows a trained last message, so that the model learns to stop."""
        _check(messages, tools)
        train_on = TrainOn(train_on_what)
        trained = set(trained_indices(messages, train_on))
        if not trained:
            raise InvalidInput(f"no message is trained on with {str(train_on)!r}; at least one is needed")
        tokens = self._beginning()
        weights = [float(train_on is TrainOn.ALL_TOKENS)] * len(tokens)
        for index, message in enumerate(messages):
            header, said = map(self._encode, _parts(message))
            if index == len(messages) - 1 and message["role"] == "assistant":
                said += self._encode("User:")
            # The model must write ``User:`` after a trained answer, because that stops it.
            ends_answer = (
                message["role"] == "user" and index - 1 in trained and messages[index - 1]["role"] == "assistant"
            )
            tokens += header + said
            weights += [float(ends_answer or train_on is TrainOn.ALL_TOKENS)] * len(header)
            weights += [float(index in trained)] * len(said)
        return ModelInput.from_ints(tokens), np.array(weights, np.float32)

    def build_supervised_examples(
        self,
        messages: Sequence[Message],
        train_on_what: TrainOn = TrainOn.LAST_ASSISTANT_TURN,
        tools: Sequence[ToolSpec] | None = None,
    ) -> list[tuple[ModelInput, NDArray[np.float32]]]:
        return [self.build_supervised_example(messages, train_on_what, tools)]

    def get_stop_sequences(self) -> list[int] | list[str]:
        return [STOP]

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        tokens = list(response)
        eos = self.tokenizer.eos_token_id
        ended = bool(tokens) and tokens[-1] == eos
        text = self.tokenizer.decode(tokens[:-1] if ended else tokens)
        said, stop, after = text.partition(STOP)
        if stop:
            termination = Termination.MALFORMED if after.strip() or ended else Termination.STOP_SEQUENCE
        else:
            termination = Termination.EOS if ended else Termination.MALFORMED
        return {"role": "assistant", "content": said.strip()}, termination

    def _beginning(self) -> list[int]:
        """Return the token that begins every text, if the tokenizer has one."""
        return [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _header(role: str) -> str:
    return f"{role.capitalize()}:"


def _parts(message: Message) -> tuple[str, str]:
    return _header(message["role"]), f" {text_of(message).strip()}{END}"


def _check(messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> None:
    check_messages(messages)
    if tools or any(message.get("tool_calls") for message in messages):
        raise Unsupported("plain text has no form for tools and tool calls; a model with a chat template may have one")
    if any(has_images(message) for message in messages):
        raise Unsupported("plain text has no form for images; a model with a chat template may have one")
    if any(thinking_of(message) for message in messages):
        raise Unsupported("plain text has no form for thinking; a model with a chat template may have one")
