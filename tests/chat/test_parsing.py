"""Answers taken apart: the same parts however the text is cut, and what is no call stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorimer.chat.parsing import AnswerFormat, AnswerParser, merged
from lorimer.chat.templates import ChatTemplate
from lorimer.chat.tools import syntax_of
from tests.server.openai.conftest import TOOL_TEMPLATE

TOOLS = {"add": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}, "stop": {}}
TAGGED = syntax_of(ChatTemplate(TOOL_TEMPLATE, {}))
ELEMENTS = syntax_of(ChatTemplate("{{ tools }}<tool_call><function=name>", {}))
ARRAY = syntax_of(ChatTemplate("{{ tools }}[TOOL_CALLS]", {}))
BARE = syntax_of(ChatTemplate("""{{ tools }} ipython {"name": x, "parameters": y}""", {}))

ADD = '{"name": "add", "arguments": {"a": 1}}'
CASES = {
    "text": (TAGGED, "Just < text.", [("content", "Just < text.")]),
    "call": (TAGGED, f"<tool_call>\n{ADD}\n</tool_call>", [("add", {"a": 1})]),
    "text and calls": (
        TAGGED,
        f"Sure.<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>",
        [("content", "Sure."), ("add", {"a": 1}), ("add", {"a": 1})],
    ),
    "not closed": (TAGGED, f"<tool_call>{ADD}", [("add", {"a": 1})]),
    "a list for a name": (
        TAGGED,
        '<tool_call>{"name": ["add"]}</tool_call>',
        [("content", '<tool_call>{"name": ["add"]}</tool_call>')],
    ),
    "cut off": (TAGGED, '<tool_call>{"name": "ad', [("content", '<tool_call>{"name": "ad')]),
    "unknown tool": (
        TAGGED,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>!',
        [("content", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>!')],
    ),
    "elements": (
        ELEMENTS,
        "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=note>\n4\n</parameter>\n</function>\n"
        "</tool_call>",
        [("add", {"a": 3, "note": "4"})],
    ),
    "array": (ARRAY, f"[TOOL_CALLS][{ADD}, {ADD}]", [("add", {"a": 1}), ("add", {"a": 1})]),
    "bare": (BARE, '{"name": "add", "parameters": {"a": 2}}', [("add", {"a": 2})]),
    "bare several": (
        BARE,
        '<|python_tag|>{"name": "add", "parameters": {"a": 2}}; {"name": "stop", "parameters": {}}',
        [("add", {"a": 2}), ("stop", {})],
    ),
    "bare JSON that is no call": (BARE, '{"x": 1}', [("content", '{"x": 1}')]),
    "bare text": (BARE, "Hello {you}", [("content", "Hello {you}")]),
    "thought": (TAGGED, "<think>\nHm.\n</think>\n\nYes.", [("reasoning", "Hm.\n"), ("content", "Yes.")]),
    "thought and call": (
        TAGGED,
        f"<think>x</think><tool_call>{ADD}</tool_call>",
        [("reasoning", "x"), ("add", {"a": 1})],
    ),
    "thought that does not end": (TAGGED, "<think>on and on", [("reasoning", "on and on")]),
    "marker in the text": (TAGGED, "a <think> b", [("content", "a <think> b")]),
}


def parse(form: AnswerFormat, pieces: list[str]) -> list[tuple[str, object]]:
    parser = AnswerParser(form)
    parts = [part for piece in pieces for part in parser.add(piece)] + parser.finish()
    return [
        (part.kind, part.text) if part.call is None else (part.call.name, json.loads(part.call.arguments))
        for part in merged(parts)
    ]


@pytest.mark.parametrize(("syntax", "text", "expected"), CASES.values(), ids=CASES)
@given(data=st.data())
def test_parts_are_the_same_however_the_text_is_cut(syntax, text, expected, data):
    form = AnswerFormat(has_thoughts=True, syntax=syntax, tools=TOOLS)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert parse(form, pieces) == expected


def test_a_thought_that_the_prompt_has_begun():
    form = AnswerFormat(has_thoughts=True, thinks_first=True)
    assert parse(form, ["I ", "see</th", "ink>", "\n\nSo."]) == [("reasoning", "I see"), ("content", "So.")]


def test_no_more_calls_than_wanted():
    form = AnswerFormat(syntax=TAGGED, tools=TOOLS, max_calls=1)
    assert parse(form, [f"<tool_call>{ADD}</tool_call>" * 3]) == [("add", {"a": 1})]


def test_a_template_without_a_known_way_has_no_syntax():
    assert syntax_of(ChatTemplate("{{ messages }}<tool_call>", {})) is None
    assert syntax_of(ChatTemplate("{{ tools }}<|call|>", {})) is None
    assert syntax_of(ChatTemplate("{{ tools }}<tool_call>f<arg_key>", {})) is None
