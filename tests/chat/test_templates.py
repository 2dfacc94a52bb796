"""Chat templates render as transformers renders them, and cannot reach beyond what they are given."""

import json

import pytest
from transformers import AutoTokenizer

from lorimer.chat.templates import ChatTemplate, read_templates
from lorimer.errors import InvalidInput
from lorimer.models.debug import make_debug_model
from tests.server.openai.conftest import TOOL_TEMPLATE

FEATURES = """\
{{- bos_token if bos_token is defined else '' }}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{% endgeneration %}
    {% else %}
        {{ message | tojson }}
    {% endif %}
    {% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}
{{ {"é": "<&>", "n": [1, 2]} | tojson(indent=2) }} {{ strftime_now("%Y") }}
{% if add_generation_prompt %}{{ eos_token }}{% endif %}"""
CONVERSATION = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "Grüße & more"},
    {"role": "skip", "content": "unseen"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "and?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("templates") / "model"
    make_debug_model(made)
    return made


@pytest.mark.parametrize("source", [FEATURES, TOOL_TEMPLATE, None], ids=["features", "tools", "own"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "with-tools"])
def test_rendered_as_transformers_does(directory, source, tools):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    expected = tokenizer.apply_chat_template(
        CONVERSATION, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    template = read_templates(directory)["default"]
    if source is not None:
        template = ChatTemplate(source, template._tokens)
    assert template.render(CONVERSATION, tools) == expected


def test_templates_are_found_where_transformers_looks(tmp_path):
    config = {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    assert {name: found.source for name, found in read_templates(tmp_path).items()} == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}c", "utf-8")
    special = {"eos_token": {"content": "</s>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special), "utf-8")
    assert read_templates(tmp_path)["default"].render([], None) == "</s>c"


def test_variables_that_a_template_reads_are_known():
    template = ChatTemplate(TOOL_TEMPLATE, {})
    assert template.reads("tools") and template.reads("enable_thinking") and not template.reads("documents")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append('x') }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
    ids=["refusal", "change", "escape", "type", "range"],
)
def test_what_a_template_may_not_do_is_an_error_of_ours(source):
    with pytest.raises(InvalidInput, match="chat template refuses"):
        ChatTemplate(source, {}).render(CONVERSATION, None)
