"""The bundled tokenizer with chat templates in the manner of several families, written for these tests."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import lorimer.models

TINY = Path(lorimer.models.__file__).parent / "tiny"

LLAMA3 = """\
{{- bos_token }}{% for m in messages -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# Thoughts are written in the last message only, calls as JSON between marks, answers of tools as a user's.
QWEN3 = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set last = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% set thought = m.reasoning_content | default('') %}
{%- if loop.index0 > last.question and (loop.last or thought) %}<think>
{{ thought.strip('\\n') }}
</think>

{{ m.content.lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{ '\\n' }}{% endif %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

# The prompt itself opens the thought, and what was thought is kept.
THINKING_PROMPT = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>
{{ m.reasoning_content | default('') }}
</think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

# Calls are nothing but an object, and end with a token of their own.
BARE_CALLS = """\
{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>
{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{{- {'name': f.name, 'parameters': f.arguments} | tojson }}<|eom_id|>
{%- else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>
{% endif %}"""

# A text that is not going on ends with a second mark.
PHI = """\
{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}<|endoftext|>{% endif %}"""

NO_END = """\
{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

STRICT = """\
{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# An image between marks where it stands, and none in what the system says.
QWEN_VL = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}
{%- elif m.role != 'system' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Content is parts and nothing else, and the images come first.
LLAVA = """\
{%- for m in messages %}{{ m.role | upper ~ ':\\n' }}
{%- for part in m.content | selectattr('type', 'equalto', 'image') %}{{ '<|image_pad|>\\n' }}{% endfor %}
{%- for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:\\n' }}{% endif %}"""

VISION_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]

MARKS = {
    LLAMA3: ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    QWEN3: ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    THINKING_PROMPT: ["<think>", "</think>"],
    BARE_CALLS: ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
    PHI: ["<|user|>", "<|assistant|>", "<|end|>"],
    QWEN_VL: VISION_MARKS,
    LLAVA: VISION_MARKS,
}


@lru_cache
def tokenizer_with(template: str | None = None, eos: str | None = None) -> Any:
    """The bundled tokenizer; with another template, with the tokens it writes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    if template is not None:
        tokenizer.chat_template = template
        tokenizer.add_tokens(MARKS.get(template, []), special_tokens=True)
    if template == LLAMA3:
        tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    if eos is not None:
        tokenizer.eos_token = eos
    return tokenizer


def applied(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
    """What transformers makes of messages."""
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))
