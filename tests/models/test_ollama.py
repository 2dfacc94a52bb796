"""The Modelfile for Ollama: what its template renders is what the model's own chat template does, or it is refused."""

import json
import shutil
import subprocess

import pytest
from transformers import AutoTokenizer

from lorimer.errors import ModelRefused
from lorimer.models.export.export import Exported, export_ollama
from lorimer.models.export.ollama import ChatFormat, derive_turns, describe_model, go_template
from lorimer.models.gguf.reader import GGUFFile
from lorimer.models.sources import resolve
from tests.cookbook.chat_templates import LLAMA3, QWEN3
from tests.models.go_templates import GoError, read_modelfile, render

TINY = resolve("lorimer/tiny").directory
BOS = "<|endoftext|>"

DEFAULT_SYSTEM = """\
{% if messages[0].role != 'system' %}<|im_start|>system
You are {{ '{{' }}helpful}}.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GEMMA2 = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
GEMMA3 = """\
{{ bos_token }}{% set first, rest = ('', messages) %}
{%- if messages[0].role == 'system' %}{% set first, rest = (messages[0].content + '\n\n', messages[1:]) %}{% endif %}
{%- for m in rest %}{% if m.role == 'system' %}{{ raise_exception('roles') }}{% endif %}<start_of_turn>
{%- if m.role == 'assistant' %}model{% else %}{{ m.role }}{% endif %}
{{ (first if loop.first else '') + m.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
LLAMA2 = """\
{% set system, rest = ('', messages) %}
{%- if messages[0].role == 'system' %}
{%- set system, rest = ('<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n', messages[1:]) %}{% endif %}
{%- for m in rest %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content }}
{{- ' [/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"""
KNOWN = {
    "chatml": None,
    "default system": DEFAULT_SYSTEM,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "llama2": LLAMA2,
}

TALK = [
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "3 + 4 = 7"},
    {"role": "user", "content": 'Say "{{ .System }}"\n\nand é, please.'},
]
SYSTEM = {"role": "system", "content": "Answer in one line."}
TALKS = {"one": TALK[:1], "three": TALK, "system": [SYSTEM, *TALK[:1]], "long": [SYSTEM, *TALK, TALK[1], TALK[0]]}


def tokenizer_with(template):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.bos_token = BOS
    if template:
        tokenizer.chat_template = template
    return tokenizer


def template_for(source):
    tokenizer = tokenizer_with(source)
    return tokenizer, go_template(derive_turns(ChatFormat(tokenizer)))


def own(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **({"add_generation_prompt": True} | options))


@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
@pytest.mark.parametrize("source", KNOWN.values(), ids=KNOWN)
def test_template_renders_what_the_tokenizer_does(source, talk):
    tokenizer, template = template_for(source)
    if source == GEMMA2 and talk[0] == SYSTEM:
        with pytest.raises(GoError, match="takes no system message"):
            render(template, talk)
        return
    assert render(template, talk) == own(tokenizer, talk)


def test_last_answer_is_continued():
    tokenizer, template = template_for(None)
    assert render(template, TALK[:2]) == own(
        tokenizer, TALK[:2], add_generation_prompt=False, continue_final_message=True
    )


def test_roles_without_a_place_fail():
    _, template = template_for(GEMMA3)
    with pytest.raises(GoError, match="has no place in the template"):
        render(template, [*TALK, {"role": "tool", "content": "7"}])
    with pytest.raises(GoError, match="must come first"):
        render(template, [*TALK[:2], SYSTEM, TALK[2]])
    _, chatml = template_for(None)
    assert render(chatml, [*TALK[:2], SYSTEM, TALK[2]]).count("<|im_start|>system") == 1


REFUSED = {
    "the date": ("{{ strftime_now('%d %b') }}" + DEFAULT_SYSTEM, "writes today's date"),
    "system in the last message": (
        "{% for m in messages %}{% if m.role == 'user' %}[{% if loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }}|{% endif %}{{ m.content }}]{% elif m.role == 'assistant' %}{{ m.content }}."
        "{% endif %}{% endfor %}",
        r"writes 4 messages \(system, user, assistant, user\)",
    ),
    "numbered turns": (
        "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}\n{% endfor %}",
        "does not write fixed texts",
    ),
    "changed contents": ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not write fixed texts"),
    "one message": (
        "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}",
        "does not write fixed texts",
    ),
}


@pytest.mark.parametrize(("source", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_templates_are_refused(source, reason):
    with pytest.raises(ModelRefused, match=reason):
        derive_turns(ChatFormat(tokenizer_with(source)))


def model_directory(tmp_path, template=None, **generation):
    directory = shutil.copytree(TINY, tmp_path / "model")
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"bos_token": BOS}
    settings["chat_template"] = template or settings["chat_template"]
    file.write_text(json.dumps(settings))
    file = directory / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | generation))
    return directory


def gguf(tmp_path, **metadata):
    found = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return GGUFFile(path=tmp_path / "my.gguf", metadata=found, tensors=())


def test_modelfile_has_stops_and_parameters(tmp_path):
    directory = model_directory(tmp_path, temperature=0.6, top_k=20, repetition_penalty=1.1, do_sample=True)
    instructions = read_modelfile(describe_model(directory).modelfile(gguf(tmp_path, model="gpt2")))
    template = dict(instructions)["TEMPLATE"]
    assert instructions == [
        ("FROM", "./my.gguf"),
        ("TEMPLATE", template),
        ("PARAMETER stop", "<|endoftext|>"),
        ("PARAMETER stop", "<|im_end|>"),
        ("PARAMETER temperature", "0.6"),
        ("PARAMETER top_k", "20"),
        ("PARAMETER repeat_penalty", "1.1"),
    ]
    assert render(template, TALK) == own(AutoTokenizer.from_pretrained(TINY), TALK)


def test_model_without_a_chat_template_completes(tmp_path):
    directory = shutil.copytree(TINY, tmp_path / "model")
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    found = dict(read_modelfile(describe_model(directory).modelfile(gguf(tmp_path, model="gpt2"))))
    assert found["TEMPLATE"] == "{{ .Prompt }}"


def test_first_token_is_written_once(tmp_path):
    described = describe_model(model_directory(tmp_path, LLAMA3))
    for is_added in (True, False):
        instructions = read_modelfile(described.modelfile(gguf(tmp_path, model="gpt2", add_bos_token=is_added)))
        text = render(dict(instructions)["TEMPLATE"], TALK)
        assert (BOS * is_added + text) == own(tokenizer_with(LLAMA3), TALK)
    assert described.modelfile(gguf(tmp_path, model="gpt2")).startswith("# The model's own template also strips")


def test_first_token_that_the_template_lacks_is_refused(tmp_path):
    with pytest.raises(ModelRefused, match="does not begin with"):
        describe_model(model_directory(tmp_path)).modelfile(gguf(tmp_path, model="gpt2", add_bos_token=True))


@pytest.mark.parametrize("text", ['say """', "a\u200bzero-width space"])
def test_text_that_a_modelfile_cannot_hold_is_refused(tmp_path, text):
    described = describe_model(model_directory(tmp_path, f"{text} {DEFAULT_SYSTEM}"))
    with pytest.raises(ModelRefused, match="a Modelfile cannot hold"):
        described.modelfile(gguf(tmp_path, model="gpt2"))


def test_refusal_comes_before_the_work_and_leaves_nothing(tmp_path):
    directory = model_directory(tmp_path, REFUSED["the date"][0])

    def write(file) -> Exported:
        raise AssertionError("the weights were written")

    with pytest.raises(ModelRefused):
        export_ollama(directory, tmp_path / "out", write)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


GO = """
package main

import ("encoding/json"; "os"; "text/template")

type Message struct { Role, Content string }

func main() {
	var cases []struct { Template string; Messages []*Message }
	json.NewDecoder(os.Stdin).Decode(&cases)
	for _, c := range cases {
		t := template.Must(template.New("").Option("missingkey=zero").Parse(c.Template))
		if err := t.Execute(os.Stdout, map[string]any{"Messages": c.Messages}); err != nil {
			os.Stdout.WriteString(err.Error())
		}
		os.Stdout.WriteString("\\x00")
	}
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")
def test_go_renders_the_same(tmp_path):
    (tmp_path / "main.go").write_text(GO)
    cases = [
        (tokenizer, template, talk)
        for tokenizer, template in map(template_for, KNOWN.values())
        for talk in TALKS.values()
    ]
    given = [{"Template": template, "Messages": talk} for _, template, talk in cases]
    run = subprocess.run(
        ["go", "run", tmp_path / "main.go"], input=json.dumps(given), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    for (tokenizer, template, talk), text in zip(cases, run.stdout.split("\0")[:-1], strict=True):
        if "takes no system message" in template and talk[0] == SYSTEM:
            assert "error calling slice" in text and "this model takes no system message" in text
        else:
            assert text == own(tokenizer, talk)
