"""Records what the official cookbook's renderers write and read, for the conversations of this file.

``python tools/official_renders.py`` writes ``tests/cookbook/official_renders.json``, with the bundled tokenizer and the
marks that the formats need. It runs itself in the environment of ``make cookbook-official``, where the official
cookbook is. ``tests/cookbook/test_official_renders.py`` calls the same functions with our renderers, so that the same
calls run with both, and ``tests/official_cookbook/test_renderers.py`` compares with the tokenizers of real models.
The conversations and the responses are our own.
"""

import argparse
import importlib
import itertools
import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "cookbook" / "official_renders.json"
BUNDLED = ROOT / "src" / "lorimer" / "models" / "tiny"
NAMES = (
    *("role_colon", "llama3", "qwen3", "qwen3_disable_thinking", "qwen3_instruct"),
    *("qwen3_5", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking", "qwen3_vl", "qwen3_vl_instruct"),
    *("qwen3_8_xhigh_reasoning", "qwen3_8_medium_reasoning", "qwen3_8_low_reasoning", "qwen3_8_disable_thinking"),
    *("nemotron3", "nemotron3_low_thinking", "nemotron3_disable_thinking", "nemotron3_preserve_thinking"),
    *("nemotron3_ultra", "nemotron3_ultra_medium_thinking"),
    *("nemotron3_ultra_disable_thinking", "nemotron3_ultra_preserve_thinking"),
    *("deepseekv3", "deepseekv3_disable_thinking", "deepseekv3_thinking"),
    *("deepseekv4_1", "deepseekv4_1_low_reasoning", "deepseekv4_1_max_reasoning"),
    *("deepseekv4_1_disable_thinking", "deepseekv4_1_preserve_thinking"),
    *("glm5_3_low_reasoning", "glm5_3_high_reasoning", "glm5_3_max_reasoning"),
    *("kimi_k2", "kimi_k25", "kimi_k25_disable_thinking"),
    *("kimi_k26", "kimi_k26_disable_thinking", "kimi_k26_preserve_thinking"),
    *("gpt_oss_no_sysprompt", "gpt_oss_low_reasoning", "gpt_oss_medium_reasoning", "gpt_oss_high_reasoning"),
)
SPECIAL_MARKS = ["<|im_start|>", "<|im_end|>"]
SPECIAL_MARKS += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL_MARKS += ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
SPECIAL_MARKS += ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
PLAIN_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PLAIN_MARKS += ["<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"]
PLAIN_MARKS += ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"]
"""Tokens of their own that are no special ones, as in the tokenizers of Qwen3 and DeepSeek V3."""
LATER_MARKS = ["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]
LATER_MARKS += [f"<|tool_{name}_{end}|>" for name in ("calls_section", "call") for end in ("begin", "end")]
LATER_MARKS += ["<|tool_call_argument_begin|>", "<｜System｜>", "｜DSML｜"]
LATER_MARKS += ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]
"""Special ones too, added last so that the others keep their numbers."""
SHORT, SHOWN = 16, 60
MODES = (
    "last_assistant_message",
    "last_assistant_turn",
    "all_assistant_messages",
    "all_messages",
    "all_tokens",
    "all_user_and_system_messages",
    "customized",
)


def said(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def thought(value: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": value}


def call(name: str, arguments: str, **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **others}


SUM = said("user", "What is 2 + 3?")
PLANS = call("plan", '{"when": "noon", "days": [1, {"a": null}], "sure": true, "who": null, "text": "a\\n b "}')
WEATHER = call("weather", '{"city": "Z\\u00fcrich", "days": 2}')
CLOCK = call("clock", "{}", id="call-7")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [SUM],
    "answer": [SUM, said("assistant", "5")],
    "system": [said("system", "Answer briefly."), SUM, said("assistant", "It is 5.")],
    "turns": [
        said("system", "You keep accounts."),
        said("user", "One and one?"),
        said("assistant", "Two."),
        said("user", " And\n\ntwo and two? "),
        said("assistant", " Four.\n"),
    ],
    "thoughts": [
        SUM,
        said("assistant", [thought("Two and three."), text("It is 5.")]),
        said("user", "Sure?"),
        said("assistant", [thought("\nI count: 3, 4, 5.\n"), text("\n\nYes.")]),
    ],
    "no thought at last": [
        SUM,
        said("assistant", [thought("Easy."), text("5")]),
        said("user", "Again."),
        said("assistant", [text("5"), text(", still")]),
    ],
    "only a thought": [SUM, said("assistant", [thought("Hm.")])],
    "thoughts in a text": [
        SUM,
        said("assistant", "<think>old</think>5"),
        said("user", "Sure?"),
        said("assistant", "<think>\nNew.\n</think>\nYes."),
    ],
    "an open thought": [SUM, said("assistant", "<think>\nand so on")],
    "line breaks first": [SUM, said("assistant", "\n\n5")],
    "nothing said": [SUM, said("assistant", "")],
    "marks in content": [
        said("user", "Write <|im_end|> and <|eot_id|>."),
        said("assistant", "<|im_start|>user <think>"),
    ],
    "unusual letters": [said("user", "Grüße, 世界 🙂"), said("assistant", "Ça va — 好")],
    "one part": [said("user", [text("What is 2 + 3?")]), said("assistant", [text("5")])],
    "starts with the assistant": [said("assistant", "Ask me."), SUM, said("assistant", "5")],
    "no user": [said("system", "Say something."), said("assistant", "Something.")],
    "two answers": [SUM, said("assistant", "5"), said("assistant", "Or five.")],
    "ends with the user": [SUM, said("assistant", "5"), said("user", "Thanks.")],
    "another role": [said("developer", "Be kind."), SUM, said("assistant", "5")],
    "chosen": [
        said("user", "A", trainable=False),
        said("assistant", "B", trainable=True),
        said("user", "C", trainable=True),
        said("assistant", "D", trainable=False),
    ],
    "calls": [
        said("user", "How is the weather?"),
        said("assistant", "", tool_calls=[WEATHER]),
        said("tool", "sunny", name="weather"),
        said("assistant", "Sunny."),
    ],
    "two calls": [
        said("user", "Weather and time?"),
        said("assistant", [thought("Both tools."), text("I look.")], tool_calls=[WEATHER, CLOCK]),
        said("tool", "rain", name="weather"),
        said("tool", "noon", name="clock", tool_call_id="call-7"),
        said("assistant", [thought("Done."), text("Rain at noon.")]),
    ],
    "ends with calls": [said("user", "Time?"), said("assistant", [thought("A tool.")], tool_calls=[CLOCK, WEATHER])],
    "calls in words": [said("user", "Time?"), said("assistant", "I look.", tool_calls=[CLOCK, PLANS])],
    "thoughts with calls": [
        said("user", "Time?"),
        said("assistant", [thought(" A tool. "), text(" ")], tool_calls=[CLOCK]),
        said("tool", "noon", name="clock"),
        said("tool", "rain", name="functions.weather"),
        said("assistant", [text(" "), thought("So. "), text("\n Noon. "), text(" ")]),
        said("user", "And?"),
    ],
    "results in another order": [
        said("user", "Weather and time?"),
        said("assistant", "I look.", tool_calls=[call("weather", '{"city": "Rome"}', id="call-6"), CLOCK]),
        said("tool", "noon", name="clock", tool_call_id="call-7"),
        said("tool", [text("rain")], name="weather", tool_call_id="call-6"),
        said("user", "And?"),
        said("assistant", [thought("Both."), text("Rain at noon.")]),
    ],
    "a system message later": [
        SUM,
        said("assistant", [thought("Easy."), text("5")]),
        said("system", "Be brief."),
        said("assistant", "Five."),
    ],
    "two parts of a user": [said("user", [text("2"), text(" + 3?")]), said("assistant", "5")],
    "no calls": [said("user", "Time?"), said("assistant", "Noon.", tool_calls=[])],
}
WITHOUT_TOOLS = ("role_colon", "llama3")
"""Formats that have no place for calls; the official renderers leave them out in silence, ours refuse them."""

TOOLS = [
    {"name": "clock", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}},
    {
        "name": "weather",
        "description": "Forecasts, für Städte.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {
        "name": "plan",
        "description": " Plans a day. ",
        "parameters": {
            "type": "object",
            "description": "A day.",
            "properties": {
                "when": {"type": "string", "enum": ["noon"], "description": " Time. ", "default": None},
                "who": {"title": "Who", "type": ["string", "null"], "examples": ["me"]},
                "how": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]},
                "where": {"type": "object", "properties": {"x": {"type": "number", "nullable": True}, "y": {}}},
            },
            "required": ["when"],
            "additionalProperties": False,
        },
        "strict": True,
    },
]

RESPONSES = [
    "It is 5.{end}",
    " It is 5.\n\n{end}",
    "It is 5.",
    "",
    "{end}",
    "It is{end} 5.",
    "<think>\nTwo and three.\n</think>\n\nIt is 5.{end}",
    "<think>Two.</think>5{end}",
    "<think>\n\n</think>\n\n5{end}",
    "<think></think>\n5{end}",
    "<think>\nand so on{end}",
    "<think>\ncut short",
    "a<think>b</think>c<think>d</think>\ne{end}",
    '<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>{end}',
    '<think>\nTime.\n</think>\n\n<tool_call>{{"name": "clock", "arguments": {{"a": [1]}}, "id": "x"}}</tool_call>{end}',
    'I look.\n<tool_call>{{"name": "clock"}}</tool_call>\n<tool_call>[1]</tool_call><tool_call>{{</tool_call>{end}',
    '<tool_call>{{"name": "clock", "arguments": {{}}}}</tool_call><tool_call>{{"name": "we{end}',
    "Two and three.\n</think>\n\n It is 5.{end}",
    " a </think>b<think> c </think>d{end}",
    "<tool_call>\n<function=clock>\n</function>\n</tool_call>{end}",
    "\n</think>\n\n<tool_call>\n<function=plan>\n<parameter=a>\n[1]\n</parameter>\n<parameter=b>\n x\ny \n</parameter>"
    '\n</function>\n</tool_call><tool_call>{{"name": "clock", "arguments": {{}}}}</tool_call>{end}',
    "<tool_call><function=plan>a<parameter=a>1</parameter></function></tool_call>{end}",
    "<tool_call><function= ></function></tool_call>"
    "<tool_call><function=a><parameter= >1</parameter></function></tool_call>"
    "<tool_call><function=clock>\n</function>{end}",
    "\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁call▁begin｜>plan"
    '<｜tool▁sep｜> {{"a": [1]}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{end}',
    "I look.</think> Now. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>{end}",
    "<think>Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{}}{end}",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁calls▁end｜>{end}",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 5.{end}",
    "<|channel|>analysis<|message|> <|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>"
    "assistant to=functions.clock<|channel|>commentary <|constrain|>json<|message|>{{}} <|call|>",
    " to=functions.clock<|channel|>commentary <|constrain|>json<|message|>{{<|call|>",
    "<|channel|>final<|message|>5<|call|>6{end}",
    "<|start|>assistant to=functions.clock<|channel|>commentary{end}",
    "<|channel|>other<|message|>5{end}",
    "<|channel|>final<|message|>5",
    "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{{}}"
    '<|tool_call_end|><|tool_call_begin|> plan:1 <|tool_call_argument_begin|> {{"a": [1]}} <|tool_call_end|>'
    "<|tool_calls_section_end|>{end}",
    "Hm.</think><|tool_call_section_begin|><|tool_call_begin|>clock:0<|tool_call_argument_begin|>{{<|tool_call_end|>"
    "<|tool_call_section_end|>{end}",
    "<|tool_calls_section_begin|><|tool_call_begin|>clock:0<|tool_call_argument_begin|>{{}}{end}",
    'Hm.</think>I look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="plan">\n<｜DSML｜ parameter name="a" string="true">'
    'x</｜DSML｜ parameter>\n<｜DSML｜ parameter name="b" string="false">[1]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="clock">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>{end}',
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="plan">\n<｜DSML｜ parameter name="a" string="false">x'
    '</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n<｜DSML｜ invoke name="plan">\nx</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    " and more{end}",
    "<｜DSML｜ calls>clock</｜DSML｜ calls>{end}",
    "I look. <｜DSML｜ calls>\n{end}",
    "I look. <｜DSML｜ invoke>{end}",
    "Hm.</think>I look.<tool_call>plan<arg_key>a</arg_key><arg_value>[1]</arg_value>\n<arg_key> b </arg_key>"
    "<arg_value>x y</arg_value></tool_call><tool_call>clock</tool_call>{end}",
    "<tool_call>plan<arg_key>a</arg_key>b<arg_value>1</arg_value></tool_call><tool_call> </tool_call>{end}",
    "It is 5.<|observation|>",
    "It is 5.<|endoftext|>",
    "It is 5.{eos}",
    "It is 5.\n\nUser: Thanks.\n\nUser: Bye.",
    "It is 5.\n\nUser:{eos}",
]


# ── with either cookbook ──────────────────────────────────────────────────────────────────────────────


def tokenizer_of(directory: Path) -> Any:
    """A tokenizer; the bundled one gets the marks of every format."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    if directory == BUNDLED:
        tokenizer.add_tokens(list(SPECIAL_MARKS), special_tokens=True)
        tokenizer.add_tokens(PLAIN_MARKS)
        tokenizer.add_tokens(list(LATER_MARKS), special_tokens=True)
    return tokenizer


def record(renderers: Any, tokenizer: Any, names: list[str]) -> dict[str, Any]:
    """All that the renderers of a cookbook write and read with a tokenizer, by name."""
    return {name: recorded(renderers, renderers.get_renderer(name, tokenizer), name) for name in names}


def recorded(renderers: Any, renderer: Any, name: str) -> dict[str, Any]:
    tokenizer = renderer.tokenizer
    if hasattr(renderer, "current_date"):
        renderer.current_date = "2026-01-31"
    stops = renderer.get_stop_sequences()
    ends = {
        "end": stops[0] if isinstance(stops[0], str) else tokenizer.decode(stops[:1]),
        "eos": tokenizer.eos_token or "",
    }
    conversations = {
        title: [with_calls(renderers, message) for message in messages]
        for title, messages in CONVERSATIONS.items()
        if name not in WITHOUT_TOOLS or not any("tool_calls" in message for message in messages)
    }
    found = {
        "stop": stops,
        "extends": renderer.has_extension_property,
        "prompts": {title: prompts(renderer, messages) for title, messages in conversations.items()},
        "examples": {title: examples(renderers, renderer, messages) for title, messages in conversations.items()},
        "responses": {one: parsed(renderer, tokenizer, one.format(**ends)) for one in RESPONSES},
    }
    if name not in WITHOUT_TOOLS:
        prefixes = [renderer.create_conversation_prefix_with_tools(TOOLS, system) for system in ("", "Be brief.")]
        prefixes.append(renderer.create_conversation_prefix_with_tools([], "Be brief."))
        found["tools"] = [
            rendered(renderer, lambda one=one: renderer.build_generation_prompt([*one, SUM])) for one in prefixes
        ]
    return found


def with_calls(renderers: Any, message: dict[str, Any]) -> dict[str, Any]:
    """The message, with calls as the cookbook has them: objects in the official one."""
    if "tool_calls" not in message or not hasattr(renderers.ToolCall, "model_validate"):
        return message
    return {**message, "tool_calls": [renderers.ToolCall.model_validate(one) for one in message["tool_calls"]]}


def prompts(renderer: Any, messages: list[Any]) -> list[Any]:
    return [
        rendered(renderer, lambda: renderer.build_generation_prompt(messages)),
        rendered(renderer, lambda: renderer.build_generation_prompt(messages, "user")),
        rendered(renderer, lambda: renderer.build_generation_prompt(messages, role="assistant", prefill="Well,")),
    ]


def examples(renderers: Any, renderer: Any, messages: list[Any]) -> dict[str, Any]:
    found = {}
    for mode in MODES:
        what = renderers.TrainOnWhat(mode)
        found[mode] = [
            rendered(renderer, lambda what=what: renderer.build_supervised_example(messages, train_on_what=what)),
            rendered(renderer, lambda what=what: renderer.build_supervised_examples(messages, train_on_what=what)),
        ]
    found["default"] = [
        rendered(renderer, lambda: renderer.build_supervised_example(messages)),
        rendered(renderer, lambda: renderer.build_supervised_examples(messages)),
    ]
    return found


def rendered(renderer: Any, build: Any) -> Any:
    """The end of the text, a checksum of its tokens, and the weights of what is built; ``refused`` if nothing is."""
    try:
        built = build()
    except Exception:
        return "refused"
    return [shown(renderer, one) for one in built] if isinstance(built, list) else shown(renderer, built)


def shown(renderer: Any, built: Any) -> list[Any]:
    tokens, weights = built if isinstance(built, tuple) else (built, None)
    ids = [int(token) for token in tokens.to_ints()]
    text = f"{shortened(renderer.tokenizer.decode(ids))} #{zlib.crc32(json.dumps(ids).encode()):08x}"
    return [text] if weights is None else [text, stretches([float(weight) for weight in weights])]


def shortened(text: str) -> str:
    """The text, or its end if it is long; the checksum beside it covers all of its tokens."""
    return text if len(text) <= SHOWN else f"… {text[-SHOWN:]}"


def stretches(weights: list[float]) -> str:
    """The weights, each with how often it comes in a row."""
    return " ".join(f"{weight:g}x{len(list(run))}" for weight, run in itertools.groupby(weights))


def parsed(renderer: Any, tokenizer: Any, response: str) -> Any:
    try:
        message, termination = renderer.parse_response(tokenizer.encode(response, add_special_tokens=False))
    except Exception:
        return "refused"
    calls = [plain_call(one) for one in message.get("tool_calls", [])]
    unparsed = [
        one["text"] if isinstance(one, dict) else one.raw_text for one in message.get("unparsed_tool_calls", [])
    ]
    return [message["role"], message["content"], calls, unparsed, str(termination)]


def plain_call(one: Any) -> list[Any]:
    if isinstance(one, dict):
        return [one["function"]["name"], one["function"]["arguments"], one.get("id")]
    return [one.function.name, json.loads(one.function.arguments), one.id]


# ── the record ────────────────────────────────────────────────────────────────────────────────────────


def official(directory: Path, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """What the official cookbook makes of all this with a tokenizer, from a process of its environment."""
    sys.path.insert(0, str(ROOT))
    environment = importlib.import_module("tests.official_cookbook.environment")
    command = [environment.cookbook_python(), __file__, "--tokenizer", directory, "--names", ",".join(names)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def packed(value: Any, pool: dict[str, int]) -> Any:
    """The value with texts, lists and objects that come again and again replaced by their numbers in the pool."""
    if isinstance(value, dict):
        value = {key: packed(one, pool) for key, one in value.items()}
    elif isinstance(value, list):
        value = [packed(one, pool) for one in value]
    text = compact(value)
    return {"#": pool.setdefault(text, len(pool))} if len(text) > SHORT else value


def unpacked(value: Any, pool: list[Any]) -> Any:
    if isinstance(value, dict):
        return (
            unpacked(pool[value["#"]], pool) if "#" in value else {k: unpacked(one, pool) for k, one in value.items()}
        )
    return [unpacked(one, pool) for one in value] if isinstance(value, list) else value


def read_record() -> dict[str, Any]:
    found = json.loads(RECORD.read_text("utf-8"))
    return dict(unpacked(found["renders"], found["pool"]))


def record_text(found: dict[str, Any]) -> str:
    """JSON with a line for each part of a renderer, and for each value of the pool."""
    pool: dict[str, int] = {}
    lines = [
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {compact(packed(part, pool))}" for key, part in parts.items())
        + "\n }"
        for name, parts in found.items()
    ]
    return '{"renders": {\n' + ",\n".join(lines) + '\n},\n"pool": [\n' + ",\n".join(pool) + "\n]}\n"


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="print what this interpreter's tinker_cookbook makes with it")
    parser.add_argument("--names", default=",".join(NAMES))
    options = parser.parse_args()
    if options.tokenizer is None:
        RECORD.write_text(record_text(official(BUNDLED)), "utf-8")
        return
    renderers = importlib.import_module("tinker_cookbook.renderers")
    print(json.dumps(record(renderers, tokenizer_of(options.tokenizer), options.names.split(","))))


if __name__ == "__main__":
    main()
