"""Makes ``docs/configuration.md``: ``python -m lorimer.server.settings_page > docs/configuration.md``."""

import sys
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin

from lorimer.server.settings import SETTINGS, TYPES, Settings

SECTIONS = {
    "models": "What is served, and where",
    "role": "Several processes",
    "device": "The engine of each base model",
    "trainings": "Trainings on the server",
    "max_body_bytes": "Limits of one request",
    "max_sessions_per_user": "Limits of a user, and of all",
    "poll_seconds": "Time",
    "durability": "Durability and retention",
}
"""Titles, each at the first setting below it."""

SHARES = """\
Users share `max_incoming_bytes`, `max_open_bytes` and `max_concurrent_requests`: a user gets more only while at least
as much as they then hold stays free. So one user alone reaches half of such a limit, two reach a third each, and
whoever comes next finds room.

Quotas (`max_stored_bytes`, `requests_per_second`) hold for each user, whichever key they show. `lorimer key create` and
`lorimer key quota` give a user quotas of their own; `lorimer key list`, `lorimer usage` and the console show them.
"""
TABLES = """\
One base model may differ from the others, in a table of the TOML file. A model with a table is served without being
named in `models`:

```toml
[model."Qwen/Qwen3-8B"]
source = "/models/qwen3-8b"   # a directory, a .gguf file or a hub id; by default the name
replicas = 2                  # engines that share its runs and samples, each with the whole base
ranks = 1                     # processes of each engine, which share the base; more than one train, but do not sample
quantize = "nf4"              # or int8, int4: the base in 4 or 8 bits (quantization.md)
dtype = "bfloat16"            # and device, num_threads, memory_bytes, max_context, token_budget, max_sampling_rows
sampler = { kind = "vllm", python = "/opt/vllm/bin/python" }
```

With `sampler`, [vLLM servers](scaling.md#vllm-samplers) sample beside the engines:

| field of `sampler` | default | meaning |
|---|---|---|
| `kind` | `vllm` | What samples. |
| `python` | | Python interpreter of the environment that has vLLM; empty takes that of Lorimer. |
| `replicas` | `1` | Number of vLLM servers. |
| `max_loras` | `8` | Most adapters that one server holds, and computes in one batch, besides the base. |
| `max_lora_rank` | `32` | Highest rank of an adapter that it takes; the engine samples those of a higher rank. |
| `tensor_parallel` | `1` | Devices of one server. |
| `ignore_seeds` | `false` | Let vLLM also sample for clients that chose a seed, which it does not use. |
| `arguments` | `[]` | Further command-line arguments of vLLM's server. |
"""
NOTES = {"max_sessions_per_user": [SHARES], "device": [TABLES]}
"""What is said above a table, by the first setting below."""

INTRODUCTION = """# Configuration

Every setting can be given in four places; the first that has it wins:

1. a flag of `lorimer serve`: `--port 9000`, or for any setting `--set poll_seconds=10`;
2. an environment variable, the name in capitals after `LORIMER_`: `LORIMER_PORT=9000`; lists are separated by commas;
3. a TOML file named by `--config` or `LORIMER_CONFIG`: `port = 9000`;
4. the default below.

A name that does not exist is refused. `lorimer config` prints the effective configuration, as a TOML file, with where
each value comes from. Other variables: `LORIMER_CACHE` (directory of converted models), `LORIMER_BASE_URL` and
`LORIMER_API_KEY` (of clients), `LORIMER_DEBUG` (tracebacks of errors). This page is generated from the code.
"""


def settings_page() -> str:
    """The page, as Markdown."""
    lines = [INTRODUCTION.rstrip()]
    declared = {item.name: item for item in fields(Settings)}
    for item in map(declared.__getitem__, TYPES):
        if item.name in SECTIONS:
            lines += ["", f"## {SECTIONS[item.name]}", "", *NOTES.get(item.name, [])]
            lines += ["| setting | default | meaning |", "|---|---|---|"]
        lines.append(f"| `{item.name}` | {default_text(item)} | {meaning_text(item.name)} |")
    return "\n".join(lines) + "\n"


def default_text(item: Field[Any]) -> str:
    if item.default is MISSING:
        return "`~/.local/share/lorimer`" if item.name == "data" else ""
    value = ", ".join(item.default) if isinstance(item.default, tuple) else item.default
    return "" if value == "" else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def meaning_text(name: str) -> str:
    choices = get_args(TYPES[name]) if get_origin(TYPES[name]) is Literal else ()
    listed = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    return SETTINGS[name].text.replace("|", "\\|") + listed


if __name__ == "__main__":
    sys.stdout.write(settings_page())
