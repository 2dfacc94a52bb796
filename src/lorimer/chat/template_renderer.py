"""The renderer of any chat model: the chat template of its tokenizer, token for token.

An assistant's tokens are found by rendering the conversation up to its message: they are what the template adds to the
prompt from which the message would have been sampled. A template may rewrite a message once the conversation continues
(Qwen3 drops its thinking); such a message is trained on in a sequence that ends with it.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lorimer.chat.conversation import (
    Content,
    Message,
    Termination,
    ToolSpec,
    TrainOn,
    call_arguments,
    check_messages,
    text_of,
    thinking_of,
    trained_indices,
)
from lorimer.chat.forms import MARK, WITH_IMAGE, TemplateForm, learn_form, wants_parts, writes
from lorimer.chat.images import has_images, images_of, marked_parts, parts_of, placeholder_of, spread
from lorimer.errors import InvalidInput, Unsupported
from lorimer.types import ImageChunk, ModelInput
from lorimer.types.images import places_of, with_images


class Span(NamedTuple):
    """A trained part of a rendered text."""

    begin: int
    end: int
    is_exact: bool
    """Whether a token that crosses ``begin`` is split there, as it is when the part is sampled after its prompt."""


class TemplateRenderer:
    """Renders with the tokenizer's chat template.

    ``template_options`` such as ``enable_thinking=False`` go to the template; one without effect is refused. The
    ``image_processor`` counts the tokens of images; without one, images can be sampled from but not trained on.
    """

    def __init__(self, tokenizer: Any, *, image_processor: Any = None, **template_options: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidInput(f"{tokenizer.name_or_path!r} has no chat template; TextRenderer needs none")
        self.tokenizer = tokenizer
        self._image_processor = image_processor
        self._options = template_options
        for name in template_options:
            others = {key: value for key, value in template_options.items() if key != name}
            if self._probes() == TemplateRenderer(tokenizer, **others)._probes():
                raise InvalidInput(f"the chat template of {tokenizer.name_or_path!r} has no use for {name!r}")

    @cached_property
    def form(self) -> TemplateForm:
        """What the template writes around an assistant's message."""
        return learn_form(self._render, self._marks_in)

    @property
    def has_extension_property(self) -> bool:
        return self.form.has_extension_property

    # ── prompts and responses ─────────────────────────────────────────────────────────────────────────

    def build_generation_prompt(
        self,
        messages: Sequence[Message],
        role: str = "assistant",
        prefill: str | None = None,
        *,
        tools: Sequence[ToolSpec] | None = None,
    ) -> ModelInput:
        check_messages(messages)
        images = [image for _, image in self._images(messages)]
        if tools and self.form.call is None:
            raise Unsupported(
                f"the chat template of {self.tokenizer.name_or_path!r} has no tool calls that can be read back; "
                "register a renderer that reads them"
            )
        if role == "assistant":
            text = self._prompt(messages, tools)
        else:
            text = self._render([*messages, {"role": role, "content": MARK}], tools=tools).partition(MARK)[0]
        self._check_shown(messages, tools, text)
        tokens = self._encode(text + (prefill or ""))
        return with_images(tokens, self._places(tokens, images), images)

    def get_stop_sequences(self) -> list[int] | list[str]:
        return list(self._stops)

    @cached_property
    def _stops(self) -> list[int]:
        ids = [self._id_of(end) for end in self.form.ends]
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or eos in ids else [*ids, eos]

    def parse_response(self, response: Sequence[int]) -> tuple[Message, Termination]:
        tokens = list(response)
        stops = self.get_stop_sequences()
        end = next((index for index, token in enumerate(tokens) if token in stops), None)
        message = self.form.parse(self._decode(tokens[:end]))
        if end is None or end != len(tokens) - 1:
            return message, Termination.MALFORMED
        is_stop = tokens[end] in stops[: len(self.form.ends)]
        return message, Termination.STOP_SEQUENCE if is_stop else Termination.EOS

    # ── training ──────────────────────────────────────────────────────────────────────────────────────

    def build_supervised_example(
        self,
        messages: Sequence[Message],
        train_on_what: TrainOn = TrainOn.LAST_ASSISTANT_MESSAGE,
        tools: Sequence[ToolSpec] | None = None,
    ) -> tuple[ModelInput, NDArray[np.float32]]:
        examples = self.build_supervised_examples(messages, train_on_what, tools)
        if len(examples) > 1:
            raise InvalidInput(
                f"the chat template of {self.tokenizer.name_or_path!r} rewrites earlier messages, so no sequence has "
                f"all that {str(TrainOn(train_on_what))!r} trains on; build_supervised_examples gives {len(examples)} "
                "that do, or train on 'last_assistant_message'"
            )
        return examples[0]

    def build_supervised_examples(
        self,
        messages: Sequence[Message],
        train_on_what: TrainOn = TrainOn.LAST_ASSISTANT_TURN,
        tools: Sequence[ToolSpec] | None = None,
    ) -> list[tuple[ModelInput, NDArray[np.float32]]]:
        """Return sequences, each the conversation up to the last message that is trained on in it."""
        check_messages(messages)
        images = self._images(messages)
        train_on = TrainOn(train_on_what)
        if train_on is TrainOn.ALL_TOKENS:
            text = self._render(messages, tools=tools)
            self._check_shown(messages, tools, text)
            return [self._example(text, [Span(0, len(text), True)], [image for _, image in images])]
        remaining = trained_indices(messages, train_on)
        if not remaining:
            raise InvalidInput(f"no message is trained on with {str(train_on)!r}; at least one is needed")
        examples = []
        while remaining:
            shown = list(messages[: remaining[-1] + 1])
            text = self._render(shown, tools=tools)
            self._check_shown(shown, tools, text)
            spans = {index: self._span(messages, index, shown, text, tools) for index in remaining}
            if spans[remaining[-1]] is None:
                raise InvalidInput(
                    f"the chat template does not write message {remaining[-1]}, {shown[-1]!s:.200}, so that "
                    "it can be found in the text; it cannot be trained on"
                )
            seen = [image for index, image in images if index < len(shown)]
            examples.append(self._example(text, [span for span in spans.values() if span], seen))
            remaining = [index for index in remaining if spans[index] is None]
        return examples[::-1]

    def _span(
        self,
        messages: Sequence[Message],
        index: int,
        shown: list[Message],
        text: str,
        tools: Sequence[ToolSpec] | None,
    ) -> Span | None:
        """Locate a message in the text of the shown ones; ``None`` if the text differs from when it was the last."""
        if messages[index]["role"] == "assistant":
            return self._assistant_span(messages, index, text, tools)
        return self._content_span(shown, index, text, tools)

    def _assistant_span(
        self, messages: Sequence[Message], index: int, text: str, tools: Sequence[ToolSpec] | None
    ) -> Span | None:
        if index == 0:
            raise InvalidInput("message 0 is the assistant's, which no prompt comes before; it cannot be trained on")
        prompt = self._prompt(messages[:index], tools)
        alone = self._render(messages[: index + 1], tools=tools)
        end = max(alone.rfind(mark) + len(mark) for mark in self.form.ends)
        if not alone.startswith(prompt) or end <= len(prompt):
            raise InvalidInput(
                f"the chat template does not continue the prompt {prompt[-80:]!r} with message {index}, but writes "
                f"{alone[-160:]!r}: what the assistant would sample is not what would be trained on"
            )
        self._check_written(messages[index], index, alone[len(prompt) : end])
        return Span(len(prompt), end, True) if text.startswith(alone[:end]) else None

    def _check_written(self, message: Message, index: int, written: str) -> None:
        parts = [("says", text_of(message)), ("thinks", thinking_of(message))]
        parts += [("calls", call["function"]["name"]) for call in message.get("tool_calls") or []]
        for what, part in parts:
            if part.strip() not in written:
                raise InvalidInput(f"the chat template does not write what message {index} {what}: {part!r}")

    def _content_span(
        self, shown: list[Message], index: int, text: str, tools: Sequence[ToolSpec] | None
    ) -> Span | None:
        """Return the span of the content, with the end of the message if it follows."""
        begins, ends = _marked_contents(shown[index])
        begin = self._find_mark(shown, index, begins, text, tools)
        end = self._find_mark(shown, index, ends, text, tools)
        if begin is None or end is None:
            return None
        rest = text[end:]
        for mark in self.form.ends:
            if rest.lstrip().startswith(mark):
                end += rest.index(mark) + len(mark)
                break
        return Span(begin, end, False)

    def _find_mark(
        self, shown: list[Message], index: int, contents: list[Content], text: str, tools: Sequence[ToolSpec] | None
    ) -> int | None:
        for content in contents:
            marked = [*shown]
            marked[index] = {**shown[index], "content": content}
            before, mark, after = self._render(marked, tools=tools).partition(MARK)
            if mark and before + after == text:
                return len(before)
        return None

    def _example(
        self, text: str, spans: Sequence[Span], images: Sequence[ImageChunk]
    ) -> tuple[ModelInput, NDArray[np.float32]]:
        tokens = self._encode(text)
        bounds = [self._token_bounds(text, tokens, span) for span in spans]
        if any(bound is None for bound in bounds):
            tokens, bounds = self._cut(text, spans)
        weights = np.zeros(len(tokens), np.float32)
        for bound in bounds:
            assert bound is not None
            weights[bound[0] : bound[1]] = 1
        places = self._places(tokens, images)
        return with_images(tokens, places, images), spread(weights, places, images)

    def _token_bounds(self, text: str, tokens: list[int], span: Span) -> tuple[int, int] | None:
        begin, end = self._num_tokens_to(text, tokens, span.begin), self._num_tokens_to(text, tokens, span.end)
        for shift in range(1, 0 if span.is_exact else len(text)):
            # A token that crosses a border belongs to the content.
            if begin is not None and end is not None:
                break
            begin = self._num_tokens_to(text, tokens, max(span.begin - shift, 0)) if begin is None else begin
            end = self._num_tokens_to(text, tokens, min(span.end + shift, len(text))) if end is None else end
        return None if begin is None or end is None else (begin, end)

    def _num_tokens_to(self, text: str, tokens: list[int], position: int) -> int | None:
        """Return the number of tokens up to a position; ``None`` if a token crosses it."""
        if position == len(text):
            return len(tokens)
        before = self._encode(text[:position])
        return len(before) if tokens[: len(before)] == before else None

    def _cut(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[tuple[int, int] | None]]:
        """Encode the text in pieces, so that each trained part follows its prompt as it does when sampled."""
        tokens: list[int] = []
        bounds: list[tuple[int, int] | None] = []
        done = 0
        for span in spans:
            tokens += self._encode(text[done : span.begin])
            begin = len(tokens)
            tokens += self._encode(text[span.begin : span.end])
            bounds.append((begin, len(tokens)))
            done = span.end
        tokens += self._encode(text[done:])
        if self._decode(tokens) != self._decode(self._encode(text)):
            raise InvalidInput(
                f"a token lies across the border of a trained message in {text[:200]!r}, and the tokenizer writes "
                "another text when it is cut there"
            )
        return tokens, bounds

    # ── the template and the tokenizer ────────────────────────────────────────────────────────────────

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None) -> str:
        return self._render(messages, prompt=True, tools=tools)

    def _render(
        self, messages: Sequence[Message], *, prompt: bool = False, tools: Sequence[ToolSpec] | None = None
    ) -> str:
        return self._apply([_for_template(message, self._wants_parts) for message in messages], prompt, tools)

    def _apply(
        self, messages: list[dict[str, Any]], prompt: bool = False, tools: Sequence[ToolSpec] | None = None
    ) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._options,
            )
        except (TemplateError, TypeError) as error:
            raise InvalidInput(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses the conversation "
                f"{[message['role'] for message in messages]}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def _check_shown(self, messages: Sequence[Message], tools: Sequence[ToolSpec] | None, text: str) -> None:
        """Refuse a template that silently omits tools or calls."""
        names = [tool["function"]["name"] for tool in tools or []]
        names += [call["function"]["name"] for message in messages for call in message.get("tool_calls") or []]
        for name in names:
            if name not in text:
                raise InvalidInput(
                    f"the chat template of {self.tokenizer.name_or_path!r} leaves out the tool {name!r}; "
                    "tools and tool calls cannot be used with it"
                )

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template writes content that is a list of parts, but omits content that is a string."""
        return wants_parts(self._render_content)

    @cached_property
    def _takes_images(self) -> bool:
        return writes(self._render_content, WITH_IMAGE)

    def _render_content(self, content: Any) -> str:
        return self._apply([{"role": "user", "content": content}])

    def _probes(self) -> list[str]:
        """Render what options may change: a question, and one with an image."""
        question = self._prompt([{"role": "user", "content": "?"}])
        return [question, self._render_content(WITH_IMAGE) if self._takes_images else ""]

    def _images(self, messages: Sequence[Message]) -> list[tuple[int, ImageChunk]]:
        images = images_of(messages, self._image_processor)
        if images and not self._takes_images:
            raise Unsupported(
                f"the chat template of {self.tokenizer.name_or_path!r} has no place for images; texts are accepted"
            )
        return images

    def _places(self, tokens: Sequence[int], images: Sequence[ImageChunk]) -> list[int]:
        """Return the positions of the images: one for each placeholder that the template wrote."""
        written = self._encode(self._render_content(WITH_IMAGE)) if images else []
        placeholder = placeholder_of(self.tokenizer, written)
        places = places_of(tokens, placeholder)
        if len(places) != len(images):
            mark = None if placeholder is None else self._decode([placeholder])
            raise Unsupported(
                f"the chat template of {self.tokenizer.name_or_path!r} has {len(places)} places {mark!r} for the "
                f"{len(images)} images of the conversation; images are accepted where it has one for each, and with "
                "texts that do not hold this mark"
            )
        return places

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _marks_in(self, text: str) -> list[str]:
        added: Mapping[int, Any] = self.tokenizer.added_tokens_decoder
        return [str(added[token]) for token in self._encode(text) if token in added]

    def _id_of(self, mark: str) -> int:
        (token,) = self._encode(mark)
        return token


def _for_template(message: Message, wants_parts: bool) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message["role"], "content": text_of(message)}
    if wants_parts or has_images(message):
        values["content"] = [part if part["type"] == "text" else {"type": "image"} for part in parts_of(message)]
    if thought := thinking_of(message):
        # Templates use one of three names for it and ignore the others.
        values |= {"reasoning_content": thought, "reasoning": thought, "thinking": thought}
    if calls := message.get("tool_calls"):
        functions = [{"name": call["function"]["name"], "arguments": call_arguments(call)} for call in calls]
        values["tool_calls"] = [
            {"type": "function", "function": function} | ({"id": call["id"]} if "id" in call else {})
            for call, function in zip(calls, functions, strict=True)
        ]
    return values | {key: message[key] for key in ("name", "tool_call_id") if key in message}


def _marked_contents(message: Message) -> tuple[list[Content], list[Content]]:
    """Return contents with the mark at the beginning and at the end; the first that fits is used."""
    if has_images(message):
        return marked_parts(message, MARK)
    content = text_of(message)
    inner = content.strip()
    lead = content[: len(content) - len(content.lstrip())]
    trail = content[len(lead) + len(inner) :]
    # A template may trim the content; then only a mark within the trimmed text does not change the rest.
    return [MARK + content, lead + MARK + inner + trail], [content + MARK, lead + inner + MARK + trail]
