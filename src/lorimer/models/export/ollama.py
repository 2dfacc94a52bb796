"""Write the Modelfile with which Ollama serves a GGUF file: its template, stop strings and sampling parameters.

Ollama renders a Go template, models come with a Jinja template. `derive_turns` renders probe conversations with the
latter and takes apart what it writes around each message; `render` puts a conversation together again. A template that
does anything else (tools aside, which Ollama then refuses itself) is refused, because a model that gets another prompt
than in training answers worse and nobody sees why. Contents are written as they are: Go templates cannot trim them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoConfig

from lorimer.engine.model.base_model import eos_token_ids, load_tokenizer
from lorimer.errors import ModelRefused
from lorimer.models.gguf.reader import GGUFFile

Messages = Sequence[Mapping[str, str]]

_DATE = "4 Thermidor"
_SYSTEM, _USER, _ASSISTANT, _NEXT = "Be brief, 1.", "Why 2?", "Because 3.", "And 4?"
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
_PROBES = (
    ("user",),
    ("user", "assistant", "user"),
    ("user", "assistant", "user", "assistant", "user"),
)
_CONTENTS = ('One {{ .System }} {% raw %} "two"', "Line one\n\nline two\tand é 日本 <b>", "\\n \\t `x` '''", "4", "5")


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A chat format in which each message stands between two fixed texts."""

    start: str
    """The token that begins the text, or nothing."""
    default_system: str
    """What follows it if the first message is not of the system."""
    system: tuple[str, str] | None
    """The texts around a system message; None if the model has none."""
    is_system_in_user: bool
    """Whether the system message is written within the first message of the user."""
    is_system_anywhere: bool
    """Whether a system message may come later than first."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str
    """What asks for the next message."""

    def render(self, messages: Messages) -> str:
        """Return the prompt for the next message."""
        is_first_system = messages[0]["role"] == "system"
        text = self.start + ("" if is_first_system else self.default_system)
        for index, message in enumerate(messages):
            before, after = {"system": self.system or ("", ""), "user": self.user, "assistant": self.assistant}[
                message["role"]
            ]
            if self.is_system_in_user and is_first_system and index == 1:
                before = ""
            text += before + message["content"] + after
        return text + self.prompt


class ChatFormat:
    """A model's chat template, rendered by transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._source: str = tokenizer.get_chat_template()
        if "strftime_now" in self._source:  # a fixed date shows whether the template writes it
            macro = f"{{% macro lorimer_now(form) %}}{_DATE}{{% endmacro %}}"
            self._source = macro + self._source.replace("strftime_now", "lorimer_now")
        self.bos_token: str = tokenizer.bos_token or ""

    def render(self, messages: Messages, *, is_open: bool = True) -> str:
        """Return the text of the messages, followed by the beginning of an answer if ``is_open``."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._source,
                tokenize=False,
                add_generation_prompt=is_open,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise _NotFixed from error
        if _DATE in text:
            raise ModelRefused(f"{_REFUSED} writes today's date, which no template of Ollama can")
        return text


_TRIMMED = "# The model's own template also strips white space around the content of messages; Ollama passes it on."
_REFUSED = "--to ollama is refused: the model's chat template"
_INSTEAD = "--to gguf writes the file without a template"


def derive_turns(chat: ChatFormat) -> Turns:
    """Take the chat template apart; raise `ModelRefused` if it does more than write fixed texts around messages."""
    alone = [_message("user", _USER)]
    answered = [*alone, _message("assistant", _ASSISTANT)]
    try:
        head, after_user = _split(chat.render(alone, is_open=False), _USER)
        _, after_assistant = _split(chat.render(answered, is_open=False), _ASSISTANT)
        _, rest = _split(chat.render([*answered, _message("user", _NEXT)]), _USER)
        to_assistant, rest = _split(rest, _ASSISTANT)
        to_user, end = _split(rest, _NEXT)
        before_user = _without_start(to_user, after_assistant)
        before = _without_end(head, before_user)
        start = chat.bos_token if chat.bos_token and before.startswith(chat.bos_token) else ""
        system, is_in_user = _system_marks(chat, start, before_user)
        turns = Turns(
            start=start,
            default_system=before.removeprefix(start),
            system=system,
            is_system_in_user=is_in_user,
            is_system_anywhere=False,
            user=(before_user, after_user),
            assistant=(_without_start(to_assistant, after_user), after_assistant),
            prompt=_without_start(end, after_user),
        )
    except _NotFixed as error:
        raise ModelRefused(f"{_REFUSED} does not write fixed texts around the messages; {_INSTEAD}") from error
    _check(chat, turns)
    later = [*answered, _message("system", _SYSTEM), _message("user", _NEXT)]
    return replace(turns, is_system_anywhere=turns.system is not None and _is_same(chat, turns, later))


def _system_marks(chat: ChatFormat, start: str, before_user: str) -> tuple[tuple[str, str] | None, bool]:
    """Return the texts around a system message, if the template takes one, and whether the user's message holds it."""
    try:
        text = chat.render([_message("system", _SYSTEM), _message("user", _USER)])
    except _NotFixed:
        return None, False
    before, rest = _split(text, _SYSTEM)
    between, _ = _split(rest, _USER)
    is_in_user = not between.endswith(before_user)
    return (_without_start(before, start), between if is_in_user else _without_end(between, before_user)), is_in_user


def _check(chat: ChatFormat, turns: Turns) -> None:
    for roles in _PROBES:
        messages = [_message(role, content) for role, content in zip(roles, _CONTENTS, strict=False)]
        for given in [messages, [_message("system", "Be\nkind."), *messages]] if turns.system else [messages]:
            if not _is_same(chat, turns, given):
                raise ModelRefused(
                    f"{_REFUSED} writes {len(given)} messages ({', '.join(m['role'] for m in given)}) in a way that"
                    f" fixed texts around each do not give; {_INSTEAD}"
                )


def _is_same(chat: ChatFormat, turns: Turns, messages: Messages) -> bool:
    try:
        return chat.render(messages) == turns.render(messages)
    except _NotFixed:
        return False


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class _NotFixed(Exception):
    """A template refuses messages, or its text lacks a part that a fixed format would have."""


def _split(text: str, content: str) -> tuple[str, str]:
    before, found, after = text.partition(content)
    if not found:
        raise _NotFixed
    return before, after


def _without_start(text: str, start: str) -> str:
    if not text.startswith(start):
        raise _NotFixed
    return text.removeprefix(start)


def _without_end(text: str, end: str) -> str:
    if not text.endswith(end):
        raise _NotFixed
    return text.removesuffix(end)


# ── the Go template ───────────────────────────────────────────────────────────────────────────────────


def go_template(turns: Turns) -> str:
    """Return the template of Ollama that writes what ``turns.render`` does.

    A last message of the assistant is left open, to be continued, as in Ollama's own templates.
    """
    system, before_user = _system_branch(turns), _literal(turns.user[0])
    if turns.is_system_in_user:
        before_user = f'{{{{ if or (ne $i 1) (ne (index $.Messages 0).Role "system") }}}}{before_user}{{{{ end }}}}'
    default = _literal(turns.default_system)
    if default:
        default = f'{{{{ if ne (index .Messages 0).Role "system" }}}}{default}{{{{ end }}}}'
    return (
        f"{_literal(turns.start)}{default}"
        "{{ range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}"
        f'{{{{ if eq .Role "system" }}}}{system}'
        f'{{{{ else if eq .Role "user" }}}}{before_user}{{{{ .Content }}}}{_literal(turns.user[1])}'
        f'{{{{ else if eq .Role "assistant" }}}}{_literal(turns.assistant[0])}{{{{ .Content }}}}'
        f"{{{{ if not $last }}}}{_literal(turns.assistant[1])}{{{{ end }}}}"
        f"{{{{ else }}}}{_failure('this role has no place in the template')}{{{{ end }}}}"
        f'{{{{ if and $last (ne .Role "assistant") }}}}{_literal(turns.prompt)}{{{{ end }}}}'
        "{{ end }}"
    )


def _system_branch(turns: Turns) -> str:
    if turns.system is None:
        return _failure("this model takes no system message")
    text = f"{_literal(turns.system[0])}{{{{ .Content }}}}{_literal(turns.system[1])}"
    if turns.is_system_anywhere:
        return text
    return f"{{{{ if $i }}}}{_failure('the system message must come first')}{{{{ end }}}}{text}"


def _failure(reason: str) -> str:
    """Return an action that fails and shows its text: a slice beyond the end of a string."""
    return f'{{{{ slice "{reason}" 0 999 }}}}'


def _literal(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')


# ── the Modelfile ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class OllamaModel:
    """What Ollama needs to know about a model beside its weights."""

    turns: Turns | None
    """None for a model without a chat template, which completes text."""
    stops: tuple[str, ...]
    parameters: Mapping[str, float]
    bos_token: str
    is_trimmed: bool
    """Whether the chat template strips white space around contents, which a Go template cannot."""

    def modelfile(self, content: GGUFFile) -> str:
        """Return the Modelfile beside a GGUF file; raise `ModelRefused` if Ollama would begin texts differently."""
        template = "{{ .Prompt }}"
        if self.turns is not None:
            template = go_template(self._without_double_start(self.turns, content))
        lines = [_TRIMMED] if self.is_trimmed else []
        lines += [f"FROM ./{content.path.name}", f"TEMPLATE {_quoted(template)}"]
        lines += [f"PARAMETER stop {_quoted(stop)}" for stop in self.stops]
        lines += [f"PARAMETER {name} {value}" for name, value in self.parameters.items()]
        return "\n".join(lines) + "\n"

    def _without_double_start(self, turns: Turns, content: GGUFFile) -> Turns:
        is_added = content.metadata.get("tokenizer.ggml.add_bos_token")
        if is_added is None:
            is_added = content.metadata.get("tokenizer.ggml.model") == "llama"
        if is_added and not turns.start:
            raise ModelRefused(
                f"{_REFUSED} does not begin with {self.bos_token!r}, which Ollama writes before every prompt of this"
                f" tokenizer; {_INSTEAD}"
            )
        return replace(turns, start="") if is_added else turns


def describe_model(directory: Path) -> OllamaModel:
    """Read the chat template, the stop tokens and the sampling parameters of a Hugging Face directory."""
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ModelRefused(f"--to ollama is refused: {str(directory)!r} has no tokenizer")
    chat = ChatFormat(tokenizer) if tokenizer.chat_template else None
    turns = derive_turns(chat) if chat else None
    ends = eos_token_ids(directory, AutoConfig.from_pretrained(directory, local_files_only=True), tokenizer)
    stops = [tokenizer.decode([token]) for token in ends]
    if turns is not None:
        after = tokenizer.encode(turns.assistant[1].lstrip(), add_special_tokens=False)
        stops += [tokenizer.decode(after[:1])] if after and after[0] in tokenizer.all_special_ids else []
    return OllamaModel(
        turns=turns,
        stops=tuple(dict.fromkeys(stops)),
        parameters=_parameters(directory),
        bos_token=tokenizer.bos_token or "",
        is_trimmed=bool(chat and turns and not _is_same(chat, turns, [_message("user", " 1 \n")])),
    )


def _parameters(directory: Path) -> dict[str, float]:
    file = directory / "generation_config.json"
    found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return {theirs: found[ours] for ours, theirs in _PARAMETERS.items() if isinstance(found.get(ours), int | float)}


def _quoted(text: str) -> str:
    """Quote a value so that Ollama's parser reads it back unchanged; its parser drops what is not printable."""
    if '"""' in text or text.endswith('"') or not all(char.isprintable() or char in "\n\t" for char in text):
        raise ModelRefused(f"--to ollama is refused: a Modelfile cannot hold {text!r}; {_INSTEAD}")
    return f'"""{text}"""'
