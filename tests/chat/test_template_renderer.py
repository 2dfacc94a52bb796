"""Chat templates: token by token what transformers makes of a conversation, and weights where they belong."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorimer.chat.conversation import Termination, TrainOn, call_arguments, make_tool_call, text_of
from lorimer.cookbook.renderers import TemplateRenderer
from lorimer.errors import InvalidInput, Unsupported
from tests.cookbook.chat_templates import (
    BARE_CALLS,
    LLAMA3,
    NO_END,
    PHI,
    QWEN3,
    STRICT,
    THINKING_PROMPT,
    applied,
    tokenizer_with,
)

USER: Any = {"role": "user", "content": "What is 2 + 3?"}
CHAT: list[Any] = [
    {"role": "system", "content": "Answer briefly."},
    USER,
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 4 + 4?"},
    {"role": "assistant", "content": "It is 8."},
]
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
TOOL_CHAT: list[Any] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [make_tool_call("calculate", {"expression": "2 + 3"})]},
    {"role": "tool", "content": "5", "name": "calculate"},
    {"role": "assistant", "content": "It is 5."},
]
TEMPLATES = {"chatml": None, "llama3": LLAMA3, "qwen3": QWEN3, "thinking prompt": THINKING_PROMPT, "phi": PHI}


@pytest.fixture(params=TEMPLATES.values(), ids=list(TEMPLATES))
def renderer(request):
    return TemplateRenderer(tokenizer_with(request.param))


def trained_text(renderer, example):
    """The trained parts of an example, one after another."""
    tokens, weights = example
    return renderer.tokenizer.decode([t for t, w in zip(tokens.to_ints(), weights, strict=True) if w])


# ── prompts ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [2, 4])
def test_prompt_is_that_of_transformers(renderer, length):
    prompt = renderer.build_generation_prompt(CHAT[:length])
    assert prompt.to_ints() == applied(renderer.tokenizer, CHAT[:length], add_generation_prompt=True)


def test_prefill_begins_the_answer(renderer):
    prompt = renderer.build_generation_prompt(CHAT[:2], prefill="It is")
    text = renderer.tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, tokenize=False)
    assert renderer.tokenizer.decode(prompt.to_ints()) == text + "It is"


def test_prompt_for_another_role():
    renderer = TemplateRenderer(tokenizer_with())
    text = renderer.tokenizer.decode(renderer.build_generation_prompt(CHAT[1:3], role="user").to_ints())
    assert text.endswith("5<|im_end|>\n<|im_start|>user\n")


def test_tools_are_shown_or_refused():
    renderer = TemplateRenderer(tokenizer_with(QWEN3))
    prompt = renderer.build_generation_prompt(TOOL_CHAT[:1], tools=[CALCULATOR])
    expected = applied(renderer.tokenizer, TOOL_CHAT[:1], tools=[CALCULATOR], add_generation_prompt=True)
    assert prompt.to_ints() == expected
    with pytest.raises(Unsupported, match="no tool calls that can be read back"):
        TemplateRenderer(tokenizer_with()).build_generation_prompt([USER], tools=[CALCULATOR])


def test_options_reach_the_template():
    renderer = TemplateRenderer(tokenizer_with(QWEN3), enable_thinking=False)
    text = renderer.tokenizer.decode(renderer.build_generation_prompt([USER]).to_ints())
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    with pytest.raises(InvalidInput, match="no use for 'enable_thinking'"):
        TemplateRenderer(tokenizer_with(), enable_thinking=False)


def test_stop_sequences_are_what_ends_a_message():
    def stops(template, **options):
        tokenizer = tokenizer_with(template, **options)
        return tokenizer.convert_ids_to_tokens(TemplateRenderer(tokenizer).get_stop_sequences())

    assert stops(None) == ["<|im_end|>"]
    assert stops(LLAMA3) == ["<|eot_id|>"]
    assert stops(PHI, eos="<|endoftext|>") == ["<|end|>", "<|endoftext|>"]
    assert stops(BARE_CALLS, eos="<|eot_id|>") == ["<|eot_id|>", "<|eom_id|>"]


# ── training ──────────────────────────────────────────────────────────────────────────────────────────


def test_last_message_is_trained_after_its_prompt(renderer):
    tokens, weights = renderer.build_supervised_example(CHAT)
    assert tokens.to_ints() == applied(renderer.tokenizer, CHAT)
    prompt = applied(renderer.tokenizer, CHAT[:-1], add_generation_prompt=True)
    (end,) = [i for i in range(len(prompt), tokens.length) if tokens.to_ints()[i] == renderer.get_stop_sequences()[0]]
    expected = np.zeros(tokens.length, np.float32)
    expected[len(prompt) : end + 1] = 1
    np.testing.assert_array_equal(weights, expected)
    assert weights.dtype == np.float32


@pytest.mark.parametrize("template", [None, LLAMA3, PHI], ids=["chatml", "llama3", "phi"])
def test_all_messages_of_the_assistant_are_in_one_sequence(template):
    renderer = TemplateRenderer(tokenizer_with(template))
    end = renderer.tokenizer.decode(renderer.get_stop_sequences()[:1])
    example = renderer.build_supervised_example(CHAT, TrainOn.ALL_ASSISTANT_MESSAGES)
    assert example[0].to_ints() == applied(renderer.tokenizer, CHAT)
    assert trained_text(renderer, example) == f"5{end}It is 8.{end}"
    assert renderer.has_extension_property


@pytest.mark.parametrize(
    ("train_on", "expected"),
    {
        TrainOn.ALL_USER_AND_SYSTEM_MESSAGES: "Answer briefly.<|im_end|>What is 2 + 3?<|im_end|>And 4 + 4?<|im_end|>",
        TrainOn.ALL_MESSAGES: "<|im_end|>".join([*(message["content"] for message in CHAT), ""]),
        TrainOn.LAST_ASSISTANT_TURN: "It is 8.<|im_end|>",
    }.items(),
)
def test_other_choices(train_on, expected):
    renderer = TemplateRenderer(tokenizer_with())
    assert trained_text(renderer, renderer.build_supervised_example(CHAT, train_on)) == expected


def test_chosen_messages_and_all_tokens():
    renderer = TemplateRenderer(tokenizer_with(LLAMA3))
    chosen = [message | {"trainable": index in (2, 3)} for index, message in enumerate(CHAT)]
    example = renderer.build_supervised_example(chosen, TrainOn.CUSTOMIZED)
    assert trained_text(renderer, example) == "5<|eot_id|>And 4 + 4?<|eot_id|>"
    tokens, weights = renderer.build_supervised_example(CHAT, TrainOn.ALL_TOKENS)
    assert tokens.to_ints() == applied(renderer.tokenizer, CHAT)
    assert weights.all()


def test_trimmed_content_is_found_nevertheless():
    renderer = TemplateRenderer(tokenizer_with(LLAMA3))
    padded = [{"role": "user", "content": "  spaces \n"}, {"role": "assistant", "content": " \n answer  "}]
    example = renderer.build_supervised_example(padded, TrainOn.ALL_MESSAGES)
    assert example[0].to_ints() == applied(renderer.tokenizer, padded)
    assert trained_text(renderer, example) == "spaces<|eot_id|>answer<|eot_id|>"


def test_rewritten_messages_are_trained_in_sequences_of_their_own():
    renderer = TemplateRenderer(tokenizer_with(QWEN3))
    assert not renderer.has_extension_property
    with pytest.raises(InvalidInput, match="rewrites earlier messages"):
        renderer.build_supervised_example(CHAT, TrainOn.ALL_ASSISTANT_MESSAGES)
    examples = renderer.build_supervised_examples(CHAT, TrainOn.ALL_ASSISTANT_MESSAGES)
    assert [tokens.to_ints() for tokens, _ in examples] == [
        applied(renderer.tokenizer, CHAT[:3]),
        applied(renderer.tokenizer, CHAT),
    ]
    assert [trained_text(renderer, example) for example in examples] == [
        "<think>\n\n</think>\n\n5<|im_end|>",
        "<think>\n\n</think>\n\nIt is 8.<|im_end|>",
    ]


def test_messages_that_are_not_rewritten_stay_together():
    renderer = TemplateRenderer(tokenizer_with(QWEN3))
    thinking = [TOOL_CHAT[0], TOOL_CHAT[1] | {"thinking": "I should compute it."}, *TOOL_CHAT[2:]]
    example = renderer.build_supervised_example(thinking, TrainOn.LAST_ASSISTANT_TURN, tools=[CALCULATOR])
    assert trained_text(renderer, example) == (
        "<think>\nI should compute it.\n</think>\n\n<tool_call>\n"
        '{"name": "calculate", "arguments": {"expression": "2 + 3"}}\n</tool_call><|im_end|>'
        "<think>\n\n</think>\n\nIt is 5.<|im_end|>"
    )


def test_arguments_may_be_written_as_json():
    renderer = TemplateRenderer(tokenizer_with(QWEN3))
    as_text = json.loads(json.dumps(TOOL_CHAT))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"expression":"2 + 3"}'
    as_text[1]["content"] = None
    both = [renderer.build_supervised_example(chat[:2], tools=[CALCULATOR])[0] for chat in (TOOL_CHAT, as_text)]
    assert both[0].to_ints() == both[1].to_ints()


REFUSED = {
    "thoughts": (None, [USER, {"role": "assistant", "content": "5", "thinking": "hm"}], "message 1 thinks: 'hm'"),
    "calls": (None, TOOL_CHAT, "leaves out the tool 'calculate'"),
    "no prompt": (None, [{"role": "assistant", "content": "Hello"}], "no prompt comes before"),
    "no answer": (None, [USER], "no message is trained on with 'last_assistant_message'"),
    "an order of roles": (STRICT, [USER, USER, CHAT[2]], "roles must alternate"),
    "a sound": (None, [{"role": "user", "content": [{"type": "audio"}]}, CHAT[2]], "a part of type 'audio'"),
    "no end": (NO_END, CHAT, "no token of its own"),
}


@pytest.mark.parametrize(("template", "messages", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_a_template_cannot_express_is_refused(template, messages, reason):
    with pytest.raises(InvalidInput, match=reason):
        TemplateRenderer(tokenizer_with(template)).build_supervised_example(messages)


def test_tokenizer_without_template_is_refused():
    tokenizer = tokenizer_with("")
    with pytest.raises(InvalidInput, match="has no chat template"):
        TemplateRenderer(tokenizer)


WORDS = st.text(st.sampled_from("ab 7.\n\t\u00e9\u4e2d\U0001f600{}<>"), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORDS, min_size=1, max_size=3), st.data())
def test_trained_message_follows_the_prompt_it_is_sampled_from(renderer, answers, data):
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": data.draw(WORDS)}, {"role": "assistant", "content": answer}]
    tokens, weights = renderer.build_supervised_example(messages)
    prompt = renderer.build_generation_prompt(messages[:-1]).to_ints()
    assert tokens.to_ints()[: len(prompt)] == prompt
    assert not weights[: len(prompt)].any()
    assert weights[len(prompt)] == 1
    assert renderer.tokenizer.decode(tokens.to_ints()) == renderer.tokenizer.decode(
        applied(renderer.tokenizer, messages)
    )


# ── responses ─────────────────────────────────────────────────────────────────────────────────────────


def sampled(renderer, messages, tools=None):
    """The tokens of the last message as the model would have sampled them."""
    tokens, weights = renderer.build_supervised_example(messages, tools=tools)
    return [token for token, weight in zip(tokens.to_ints(), weights, strict=True) if weight]


PLAIN = WORDS.map(str.strip).filter(bool)
ARGUMENTS = st.dictionaries(
    st.text("abc", min_size=1), st.recursive(st.integers() | st.booleans() | st.none() | WORDS, st.lists, max_leaves=3)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PLAIN)
def test_parsing_is_the_inverse_of_rendering(renderer, content):
    message = {"role": "assistant", "content": content}
    assert renderer.parse_response(sampled(renderer, [USER, message])) == (message, Termination.STOP_SEQUENCE)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([QWEN3, THINKING_PROMPT]),
    PLAIN,
    st.text(st.sampled_from("ab \n.{"), min_size=1).filter(lambda text: text.strip("\n") == text),
)
def test_thoughts_are_parsed_back(template, content, thinking):
    renderer = TemplateRenderer(tokenizer_with(template))
    message = {"role": "assistant", "content": content, "thinking": thinking}
    assert renderer.parse_response(sampled(renderer, [USER, message]))[0] == message


@settings(max_examples=60, deadline=None)
@given(PLAIN | st.just(""), st.lists(st.tuples(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), ARGUMENTS), max_size=3))
def test_tool_calls_are_parsed_back(content, calls):
    renderer = TemplateRenderer(tokenizer_with(QWEN3))
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [make_tool_call(*call) for call in calls]
    assert renderer.parse_response(sampled(renderer, [USER, message]))[0] == message


def test_bare_calls_are_parsed_back():
    renderer = TemplateRenderer(tokenizer_with(BARE_CALLS, eos="<|eot_id|>"))
    message, termination = renderer.parse_response(sampled(renderer, TOOL_CHAT[:2], [CALCULATOR]))
    assert termination is Termination.STOP_SEQUENCE
    assert message["content"] == ""
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["calculate"]
    assert call_arguments(message["tool_calls"][0]) == {"expression": "2 + 3"}
    said = renderer.tokenizer.encode("{is no call}<|eot_id|>")
    assert renderer.parse_response(said)[0] == {"role": "assistant", "content": "{is no call}"}


BROKEN_CALLS = {
    "no JSON": ("<tool_call>\n{name}\n</tool_call>", "Expecting property name"),
    "no name": ('<tool_call>\n{"arguments": {}}\n</tool_call>', "it has no 'name'"),
    "arguments of another type": (
        '<tool_call>\n{"name": "f", "arguments": 3}\n</tool_call>',
        "an object of arguments",
    ),
    "no end": ('<tool_call>\n{"name": "f", "arguments": {}}', "does not end with '</tool_call>'"),
}


@pytest.mark.parametrize(("text", "reason"), BROKEN_CALLS.values(), ids=BROKEN_CALLS)
def test_broken_calls_are_kept_with_the_reason(text, reason):
    renderer = TemplateRenderer(tokenizer_with(QWEN3))
    message, termination = renderer.parse_response(renderer.tokenizer.encode(f"Well.\n{text}<|im_end|>"))
    assert termination is Termination.STOP_SEQUENCE
    assert text_of(message) == "Well."
    assert "tool_calls" not in message
    (unparsed,) = message["unparsed_tool_calls"]
    assert reason in unparsed["error"]


ENDINGS = {
    "none": ("5", Termination.MALFORMED, "5"),
    "more than one": ("5<|end|>\n<|user|>\nthanks<|end|>", Termination.MALFORMED, "5"),
    "end of text": ("5<|endoftext|>", Termination.EOS, "5"),
    "end of message": ("5<|end|>", Termination.STOP_SEQUENCE, "5"),
    "nothing said": ("<|end|>", Termination.STOP_SEQUENCE, ""),
}


@pytest.mark.parametrize(("text", "termination", "content"), ENDINGS.values(), ids=ENDINGS)
def test_how_a_response_ended(text, termination, content):
    renderer = TemplateRenderer(tokenizer_with(PHI, eos="<|endoftext|>"))
    assert renderer.parse_response(renderer.tokenizer.encode(text)) == (
        {"role": "assistant", "content": content},
        termination,
    )


@pytest.mark.parametrize(("template", "text"), [(QWEN3, "<think>\nLet me"), (THINKING_PROMPT, "Let me")])
def test_thought_that_was_cut_short_is_a_thought(template, text):
    renderer = TemplateRenderer(tokenizer_with(template))
    message, termination = renderer.parse_response(renderer.tokenizer.encode(text))
    assert (message, termination) == (
        {"role": "assistant", "content": "", "thinking": "Let me"},
        Termination.MALFORMED,
    )


# ── the tokenizers of real models ─────────────────────────────────────────────────────────────────────

ASSETS = os.environ.get("LORIMER_ASSETS")
needs_assets = pytest.mark.skipif(not ASSETS, reason="LORIMER_ASSETS names no directory with tokenizers")


@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def real(request):
    from transformers import AutoTokenizer

    return TemplateRenderer(AutoTokenizer.from_pretrained(Path(ASSETS or "") / "tokenizers" / request.param))


@needs_assets
def test_real_template_token_by_token(real):
    for length in (3, 5):
        tokens, weights = real.build_supervised_example(CHAT[:length])
        assert tokens.to_ints() == applied(real.tokenizer, CHAT[:length])
        prompt = applied(real.tokenizer, CHAT[: length - 1], add_generation_prompt=True)
        assert real.build_generation_prompt(CHAT[: length - 1]).to_ints() == prompt
        assert not weights[: len(prompt)].any()
        assert weights[len(prompt) : -1].all()  # all but the line break after the end
        assert not weights[-1]


@needs_assets
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PLAIN)
def test_real_template_is_parsed_back(real, content):
    message = {"role": "assistant", "content": content}
    assert real.parse_response(sampled(real, [USER, message])) == (message, Termination.STOP_SEQUENCE)


@needs_assets
def test_real_template_with_tools_and_thoughts(real):
    thinking = TOOL_CHAT[1] | {"thinking": "I should compute it."}
    if "qwen" not in real.tokenizer.name_or_path:
        with pytest.raises(Unsupported):
            real.build_generation_prompt([USER], tools=[CALCULATOR])
        return
    for messages in ([USER, thinking], [USER, thinking, *TOOL_CHAT[2:]]):
        as_template = [m | {"reasoning_content": m["thinking"]} if "thinking" in m else m for m in messages]
        tokens, _ = real.build_supervised_example(messages, tools=[CALCULATOR])
        assert tokens.to_ints() == applied(real.tokenizer, as_template, tools=[CALCULATOR])
        assert real.parse_response(sampled(real, messages, [CALCULATOR]))[0] == messages[-1]
