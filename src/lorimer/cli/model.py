"""``lorimer model``: which base models there are, fetching one, and what can be said of one without loading it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.connection import find_server, named_server, served_address
from lorimer.cli.failures import NoServer
from lorimer.cli.output import Column, Format, FormatOption, examples, note, print_facts, print_json, print_table
from lorimer.cli.output import size_text as size
from lorimer.cli.progress import progress_bar
from lorimer.cli.settings import ConfigOption, effective_settings

if TYPE_CHECKING:
    from lorimer.models.catalogue import LocalModel
    from lorimer.models.description import ModelDescription
    from lorimer.types import SupportedModel

app = typer.Typer(help="List, fetch and describe base models.", no_args_is_help=True)

LOCAL = "local"


@app.command(
    name="list",
    epilog=examples("lorimer model list", "lorimer model list --local", "lorimer model list --base-url URL -f json"),
)
@cli_command
def list_(
    is_local: Annotated[bool, typer.Option("--local", help="What this machine has, even if a server runs.")] = False,
    config: ConfigOption = None,
    *,
    options: ServerOptions,
) -> None:
    """List what the server serves or, without one, the models this machine has: aliases and the hub cache."""
    url = None if is_local else served_url(options.base_url, options.data)
    if url is None:
        show_local(cache_directory(config), options.output)
    else:
        show_served(url, options.api_key, options.output)


@app.command(epilog=examples("lorimer model pull smollm2-135m-instruct", "lorimer model pull Qwen/Qwen3-0.6B"))
@cli_command
def pull(
    name: Annotated[str, typer.Argument(help="An alias or a hub id; a .gguf file is converted.")],
    config: ConfigOption = None,
    output: FormatOption = Format.table,
) -> None:
    """Fetch a base model, so that serving it needs no network."""
    from lorimer.models.catalogue import directory_bytes
    from lorimer.models.sources import resolve

    source = source_named(name, config)
    with progress_bar() as report:
        found = resolve(source, cache_directory=cache_directory(config), progress=report)
    facts = {
        "name": name,
        "kind": found.kind,
        "directory": str(found.directory),
        "size_bytes": directory_bytes(found.directory),
    }
    if output is Format.json:
        print_json(facts)
    else:
        print_facts(facts | {"size_bytes": None, "size": size(directory_bytes(found.directory))})


@app.command(epilog=examples("lorimer model info lorimer/tiny", "lorimer model info ./my-model -f json"))
@cli_command
def info(
    source: Annotated[str, typer.Argument(metavar="SOURCE|NAME", help="A directory, .gguf file, alias or hub id.")],
    config: ConfigOption = None,
    output: FormatOption = Format.table,
) -> None:
    """Describe a base model: its size, what LoRA trains in it, and the memory that takes; loads no weights."""
    from lorimer.models.sources import resolve

    with progress_bar() as report:
        report("looking for the model", None)
        found = resolve(
            source_named(source, config),
            cache_directory=cache_directory(config),
            progress=report,
            needs_weights=False,
        )
        report("reading its settings", None)
        from lorimer.models.description import describe_model

        described = describe_model(found.directory)
    if output is Format.json:
        print_json({"name": source, "kind": found.kind, "directory": str(found.directory)} | asdict(described))
    else:
        print_facts({"name": source, "directory": f"{found.directory} ({found.kind})"} | facts_of(described))
        if described.trouble:
            note(f"lorimer: the engine refuses it: {described.trouble}")


# ── where ─────────────────────────────────────────────────────────────────────────────────────────────


def served_url(base_url: str | None, data: Path | None) -> str | None:
    """The server that is meant, or that runs on the data directory; none if there is none."""
    named = named_server(base_url, data)
    if named and named != LOCAL:
        return find_server(base_url, data)
    try:
        found = served_address(data)
    except NoServer:
        return None
    return None if found == LOCAL else found


def source_named(name: str, config: Path | None) -> str:
    """What `lorimer serve` would open under a name: its settings may say NAME=SOURCE."""
    served = effective_settings({}, config, None).settings.engine_configs()
    return served[name].model if name in served else name


def cache_directory(config: Path | None) -> Path | None:
    """Where converted models are kept; none for the usual place."""
    configured = effective_settings({}, config, None).settings.cache_directory
    return Path(configured).expanduser() if configured else None


# ── how they are shown ────────────────────────────────────────────────────────────────────────────────


def show_served(url: str, api_key: str | None, output: Format) -> None:
    models = served_models(url, api_key)
    if output is Format.json:
        print_json({"server": url, "models": [model.model_dump(mode="json") for model in models]})
        return
    columns = [Column("model", whole=True), Column("context", justify="right"), Column("train"), Column("sample")]
    rows = [[m.model_name, m.max_context_length or "", yes(m.trainable), yes(m.sampleable)] for m in models]
    print_table(columns, rows)


def served_models(url: str, api_key: str | None) -> list["SupportedModel"]:
    from lorimer.client.connection import Connection
    from lorimer.types import GetServerCapabilitiesResponse

    connection = Connection(url, api_key)
    asked = connection.transport.ask(GetServerCapabilitiesResponse, "GET", "/api/v1/get_server_capabilities")
    return connection.run(asked).result().supported_models


def yes(value: bool | None) -> str:
    return "no" if value is False else "yes"


def show_local(cache: Path | None, output: Format) -> None:
    from lorimer.models.catalogue import local_models

    models = local_models(cache)
    if output is Format.json:
        print_json({"server": None, "models": [asdict(model) for model in models]})
        return
    columns = [Column("model", whole=True), Column("kind"), Column("state"), Column("size", justify="right")]
    print_table(columns, [[m.name, m.kind, state(m), size(m.size_bytes) if m.size_bytes else ""] for m in models])
    note("`lorimer serve --model NAME` serves one; directories and .gguf files work too")


def state(model: "LocalModel") -> str:
    if model.trouble:
        return f"refused: {model.trouble}"
    if model.directory is None:
        return "made on first use" if model.kind == "debug" else "not fetched"
    return "here"


def facts_of(model: "ModelDescription") -> dict[str, object]:
    head = "tied to the embedding" if model.is_tied else "of its own"
    return {
        "architecture": f"{model.architecture} ({model.model_type})",
        "parameters": f"{model.num_parameters:,}",
        "layers": f"{model.num_layers} of size {model.hidden_size}; output head {head}",
        "vocabulary": f"{model.vocab_size:,} tokens",
        "context": f"{model.max_context:,} tokens",
        "stored as": ", ".join(model.stored_dtypes) or "weights are not fetched",
        "chat template": "yes" if model.has_chat_template else "no",
        "LoRA targets": [f"{group}: {', '.join(names)}" for group, names in model.lora_targets.items()],
        "LoRA size": [
            f"rank {rank}: {count:,} parameters, {size(model.run_bytes[rank])} in training"
            for rank, count in model.lora_parameters.items()
            if count
        ],
        "memory, about": [
            *(f"{size(count)} for the base in {dtype} on a CPU" for dtype, count in model.weights_bytes.items()),
            f"{size(model.cache_bytes_per_token)} for each token that is sampled or kept of a prompt",
        ],
    }
