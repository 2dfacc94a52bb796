"""Render a model's chat template as transformers does: Jinja in a sandbox, with the filters and tags templates use.

The template comes with the model, which the operator has chosen; its input comes from users and is plain data.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorimer.chat.forms import WITH_IMAGE, wants_parts, writes
from lorimer.errors import InvalidInput

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RESERVED = {
    *("messages", "tools", "documents", "add_generation_prompt", *SPECIAL_NAMES),
    *("raise_exception", "strftime_now", "self", "conversation", "chat_template", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
"""Names that callers may not set: variables we pass to templates, and parameters of ``apply_chat_template``, which have
no effect here."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
_SHOWN_CHARS = 300


class Generation(jinja2.ext.Extension):
    """Parses ``{% generation %}``, which marks an assistant's content for training, and renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads a set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """One template. ``tokens`` are the special tokens that it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self._tokens = dict(tokens)
        environment = _environment()
        self._template = environment.from_string(source)
        self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template writes content that is a list of parts, but omits content that is a string."""
        return wants_parts(self._render_content)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether content may hold images."""
        return writes(self._render_content, WITH_IMAGE)

    def _render_content(self, content: object) -> str:
        return self.render([{"role": "user", "content": content}], None)

    def reads(self, name: str) -> bool:
        """Return whether the template reads a variable of this name."""
        return name in self._variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for the next message."""
        given = (
            self._tokens | dict(values or {}) | {"messages": messages, "tools": tools, "add_generation_prompt": True}
        )
        try:
            return self._template.render(given)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            reason = str(error)[:_SHOWN_CHARS] or type(error).__name__
            raise InvalidInput(f"the model's chat template refuses these messages: {reason}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def read_templates(directory: Path) -> dict[str, ChatTemplate]:
    """Read the templates of a model's directory by name; without any, the model has no chat format."""
    config = _read_json(directory / "tokenizer_config.json")
    tokens = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    sources = _sources(config.get("chat_template"))
    sources |= _sources(_read_json(directory / "chat_template.json").get("chat_template"))
    file = directory / "chat_template.jinja"
    if file.is_file():
        sources[DEFAULT] = file.read_text("utf-8")
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[extra.stem] = extra.read_text("utf-8")
    return {name: ChatTemplate(source, tokens) for name, source in sources.items()}


def _sources(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        return {item["name"]: item["template"] for item in value}
    return {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: config.get(name) for name in SPECIAL_NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return value if isinstance(value, dict) else {}
