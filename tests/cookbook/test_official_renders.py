"""The renderers that the official cookbook names: its calls, its tokens, its weights, its reading of responses.

``official_renders.json`` is what ``tinker-cookbook`` 0.5.8 makes with the bundled tokenizer; see
``tools/official_renders.py``. ``make cookbook-official`` compares with the tokenizers of real models too.
"""

import json
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

import official_renders as official
from lorimer.cookbook import model_info, renderers
from lorimer.cookbook.datums import conversation_to_datum, conversation_to_datums
from lorimer.errors import InvalidInput, Unsupported
from tests.cookbook.chat_templates import tokenizer_with

OFFICIAL = official.read_record()
QUESTION: Any = {"role": "user", "content": "What is 2 + 3?"}
WRAPPED_TOOLS: Any = [{"type": "function", "function": tool} for tool in official.TOOLS]
"""Tools as OpenAI's API has them; the official cookbook has what is inside."""
ANSWER: Any = {"role": "assistant", "content": "5"}


@pytest.fixture(scope="module")
def tokenizer():
    return official.tokenizer_of(official.BUNDLED)


def test_every_recorded_name_is_compared():
    assert tuple(OFFICIAL) == official.NAMES


@pytest.mark.parametrize("name", official.NAMES)
def test_tokens_weights_and_parsed_responses_are_the_official_ones(name, tokenizer):
    ours = json.loads(json.dumps(official.record(renderers, tokenizer, [name])[name]))
    for part, expected in OFFICIAL[name].items():
        if not isinstance(expected, dict):
            assert ours[part] == expected, part
            continue
        assert ours[part].keys() == expected.keys()
        for case in expected:
            assert ours[part][case] == expected[case], (part, case)


@pytest.mark.parametrize("name", official.NAMES)
def test_names_recommended_for_a_model_are_accepted(name, tokenizer):
    assert renderers.get_renderer(name, tokenizer, None, model_name="any").tokenizer is tokenizer
    assert renderers.get_renderer(name=name, tokenizer=tokenizer, image_processor=None).tokenizer is tokenizer


def test_recommended_renderers():
    assert model_info.get_recommended_renderer_name("Qwen/Qwen3-8B") == "qwen3"
    assert model_info.get_recommended_renderer_names("Qwen/Qwen3-8B:tuned") == ["qwen3", "qwen3_disable_thinking"]
    assert model_info.get_recommended_renderer_name("meta-llama/Llama-3.2-1B") == "role_colon"
    assert model_info.get_recommended_renderer_name("lorimer/tiny") == "auto"
    with pytest.raises(InvalidInput, match="None"):
        model_info.get_recommended_renderer_name(None)  # type: ignore[arg-type]


def test_the_official_name_that_is_not_here_is_refused_with_the_reason(tokenizer):
    with pytest.raises(
        Unsupported, match=r"'tml_v0' is not here: .* tml_renderers, .*; accepted are auto, deepseekv3,"
    ):
        renderers.get_renderer("tml_v0", tokenizer)


def test_tokenizer_of_another_family_is_refused():
    with pytest.raises(InvalidInput, match=r"has no token '<\|eot_id\|>'.*'auto'"):
        renderers.get_renderer("llama3", tokenizer_with()).get_stop_sequences()
    with pytest.raises(InvalidInput, match=r"has no token '<｜begin▁of▁sentence｜>'.*'auto'"):
        renderers.get_renderer("deepseekv3", tokenizer_with())


@pytest.mark.parametrize("name", official.WITHOUT_TOOLS)
def test_calls_are_refused_where_the_format_has_none(name, tokenizer):
    renderer = renderers.get_renderer(name, tokenizer)
    calling: list[Any] = [QUESTION, {**ANSWER, "tool_calls": [official.CLOCK]}]
    with pytest.raises(Unsupported, match="no form for tool calls"):
        renderer.build_supervised_example(calling)
    with pytest.raises(Unsupported, match="no form for tools"):
        renderer.build_generation_prompt([QUESTION], tools=WRAPPED_TOOLS)


def test_tools_of_either_form_are_written_alike(tokenizer):
    renderer = renderers.get_renderer("qwen3", tokenizer)
    system: Any = {"role": "system", "content": "Be brief."}
    flat = [*renderer.create_conversation_prefix_with_tools(official.TOOLS, "Be brief."), QUESTION]
    assert renderer.build_generation_prompt(
        [system, QUESTION], tools=WRAPPED_TOOLS
    ) == renderer.build_generation_prompt(flat)


def test_calls_and_thoughts_of_either_form_are_written_alike(tokenizer):
    renderer = renderers.get_renderer("qwen3", tokenizer)
    function = official.CLOCK["function"]
    call = SimpleNamespace(id=None, function=SimpleNamespace(**function))
    forms: list[Any] = [
        {"role": "assistant", "content": "5", "thinking": "Hm.", "tool_calls": [official.CLOCK]},
        {"role": "assistant", "content": [official.thought("Hm."), official.text("5")], "tool_calls": [call]},
    ]
    first, second = (renderer.build_supervised_example([QUESTION, form])[0] for form in forms)
    assert first == second


def test_images_and_unknown_parts_are_refused(tokenizer):
    image: Any = {"type": "image", "image": "data:image/png;base64,AAAA"}
    for name in official.NAMES:
        with pytest.raises(Unsupported, match="image"):
            renderers.get_renderer(name, tokenizer).build_generation_prompt([{"role": "user", "content": [image]}])
        with pytest.raises(Unsupported, match=rf"{name!r} has no form for images"):
            renderers.get_renderer(name, tokenizer, image_processor=object())
    sound: Any = {"role": "user", "content": [{"type": "sound"}]}
    for name in ("qwen3", "qwen3_5", "qwen3_vl", "nemotron3"):
        with pytest.raises(Unsupported, match="'sound'"):
            renderers.get_renderer(name, tokenizer).build_generation_prompt([sound])


def test_tools_that_typescript_cannot_declare_are_refused(tokenizer):
    renderer = renderers.get_renderer("kimi_k25", tokenizer)
    for parameters, found in (({"$defs": {}}, "'\\$defs'"), ({"properties": {"a": {"$ref": "#"}}}, "'\\$ref'")):
        with pytest.raises(Unsupported, match=found):
            renderer.create_conversation_prefix_with_tools([{"name": "a", "parameters": parameters}])


@pytest.mark.parametrize("role", ["system", "developer"])
def test_roles_that_deepseek_has_no_form_for_are_refused(role, tokenizer):
    renderer = renderers.get_renderer("deepseekv3", tokenizer)
    with pytest.raises(Unsupported, match=f"message 1 has the role '{role}'; accepted are user, assistant and tool"):
        renderer.build_generation_prompt([QUESTION, {"role": role, "content": "Be brief."}])


def test_the_result_of_a_tool_without_a_name_is_refused_by_gpt_oss(tokenizer):
    renderer = renderers.get_renderer("gpt_oss_no_sysprompt", tokenizer)
    with pytest.raises(InvalidInput, match="message 1 is of a tool and has no 'name'"):
        renderer.build_generation_prompt([QUESTION, {"role": "tool", "content": "noon"}])


def test_the_system_message_of_gpt_oss_states_the_date_of_today(tokenizer):
    renderer = renderers.get_renderer("gpt_oss_low_reasoning", tokenizer)
    before = datetime.now()
    prompt = tokenizer.decode(renderer.build_generation_prompt([QUESTION]).to_ints())
    assert any(f"Current date: {day:%Y-%m-%d}\n" in prompt for day in (before, datetime.now()))


def test_less_effort_is_asked_for_in_a_text_only(tokenizer):
    parts: Any = [{"role": "user", "content": [official.text("2 + 3?")]}]
    with pytest.raises(Unsupported, match="only a text is accepted"):
        renderers.get_renderer("nemotron3_low_thinking", tokenizer).build_generation_prompt(parts)


def test_arguments_that_are_no_object_are_not_a_call(tokenizer):
    renderer = renderers.get_renderer("deepseekv3", tokenizer)
    call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>[1]<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    message, _ = renderer.parse_response(tokenizer.encode(call + "<｜end▁of▁sentence｜>", add_special_tokens=False))
    assert message["unparsed_tool_calls"][0]["error"] == "an object of arguments is needed"


def test_thinking_after_a_prompt_without_is_refused(tokenizer):
    renderer = renderers.get_renderer("qwen3_disable_thinking", tokenizer)
    thinking: Any = {**ANSWER, "thinking": "Hm."}
    with pytest.raises(InvalidInput, match="message 1 thinks"):
        renderer.build_supervised_example([QUESTION, thinking])


def test_trainable_belongs_to_customized(tokenizer):
    renderer = renderers.get_renderer("qwen3", tokenizer)
    trainable: Any = {**ANSWER, "trainable": True}
    with pytest.raises(InvalidInput, match="message 1 has the field 'trainable'; with 'all_tokens'"):
        renderer.build_supervised_example([QUESTION, trainable], renderers.TrainOnWhat.ALL_TOKENS)
    with pytest.raises(InvalidInput, match="message 0 has no field 'trainable'; with 'customized'"):
        renderer.build_supervised_example([QUESTION, ANSWER], renderers.TrainOnWhat.CUSTOMIZED)


def test_datums_are_made_with_official_names(tokenizer):
    renderer = renderers.get_renderer("qwen3", tokenizer)
    datum = conversation_to_datum([QUESTION, ANSWER], renderer, reduction="sum")
    tokens, weights = renderer.build_supervised_example([QUESTION, ANSWER])
    assert datum.model_input.to_ints() == tokens.to_ints()[:-1]
    assert datum.loss_fn_inputs["weights"].to_numpy().tolist() == weights[1:].tolist()
    with pytest.raises(InvalidInput, match="no message is trained on"):
        conversation_to_datums([QUESTION], renderer)
