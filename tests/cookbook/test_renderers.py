"""Renderers by name."""

import pytest

from lorimer.cookbook.renderers import TemplateRenderer, TextRenderer, get_renderer, register_renderer
from lorimer.errors import InvalidInput
from tests.cookbook.chat_templates import QWEN3, tokenizer_with


def test_auto_takes_the_template_where_there_is_one():
    assert isinstance(get_renderer("auto", tokenizer_with()), TemplateRenderer)
    assert isinstance(get_renderer("auto", tokenizer_with("")), TextRenderer)


def test_no_thinking_is_an_option_of_the_template():
    renderer = get_renderer("no_thinking", tokenizer_with(QWEN3))
    prompt = renderer.build_generation_prompt([{"role": "user", "content": "Hello"}])
    assert renderer.tokenizer.decode(prompt.to_ints()).endswith("</think>\n\n")


def test_names_are_given_once():
    register_renderer("shouting", lambda tokenizer: TextRenderer(tokenizer))
    assert isinstance(get_renderer("shouting", tokenizer_with()), TextRenderer)
    with pytest.raises(ValueError, match="'shouting' is there already"):
        register_renderer("shouting", TextRenderer)
    with pytest.raises(InvalidInput, match=r"no renderer 'whispering'; accepted are auto, .*shouting"):
        get_renderer("whispering", tokenizer_with())
