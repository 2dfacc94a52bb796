"""``lorimer checkpoint``: list, describe, publish, keep, delete, download and share saved weights.

How files get here is in ``download.py``, how they get to the Hugging Face hub in ``push.py``.
"""

from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.export import (
    BaseOption,
    CheckOption,
    Conversion,
    Dtype,
    DtypeOption,
    LlamaCppOption,
    PushedForm,
    check_form,
)
from lorimer.cli.moments import moment_text, parse_duration, parse_moment
from lorimer.cli.output import (
    examples,
    metadata_text,
    print_facts,
    print_json,
    print_table,
    printable,
    size_text,
)
from lorimer.cli.run import CHECKPOINT_COLUMNS, LimitOption, checkpoint_row, note_rest, run_id_of
from lorimer.cli.selection import Failures, Kind, all_of, change, checked, confirm, matching
from lorimer.cli.settings import ConfigOption
from lorimer.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from lorimer.cli.download import FetchedFile

app = typer.Typer(
    help="List, publish, keep, delete, download and share saved weights.",
    no_args_is_help=True,
    epilog="A checkpoint is named by its path, tinker://RUN/weights/NAME; `lorimer checkpoint list` shows them.",
)

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="Path of the checkpoint, tinker://…", show_default=False)
]
PathsArgument = Annotated[
    list[str], typer.Argument(metavar="PATH", help="Paths of checkpoints, tinker://…", show_default=False)
]
RunOption = Annotated[str | None, typer.Option("--run-id", "--run", metavar="RUN", help="Only those of this run.")]
KindOption = Annotated[
    Kind | None, typer.Option("--type", "-t", help="Only those of this kind: training, sampler or external.")
]


@app.command(
    name="list",
    epilog=examples(
        "lorimer checkpoint list",
        "lorimer checkpoint list --run-id RUN --type sampler",
        "lorimer checkpoint list --limit 0 -f json",
    ),
)
@cli_command
def list_(
    run_id: RunOption = None,
    kind: KindOption = None,
    limit: LimitOption = 20,
    *,
    options: ServerOptions,
) -> None:
    """List checkpoints, newest first: yours, or those of one run."""
    client = options.rest_client()
    if run_id is None and kind is None:
        found, total = all_of(client, limit)
    else:
        everything = matching(client, run_id, kind)
        found, total = everything[: limit or None], len(everything)
    if options.is_json:
        listed = [checkpoint.model_dump(mode="json") for checkpoint in found]
        print_json({"checkpoints": listed, "total_count": total})
        return
    if found:
        print_table(CHECKPOINT_COLUMNS, [checkpoint_row(checkpoint) for checkpoint in found])
    note_rest("checkpoints", len(found), total)


@app.command(epilog=examples("lorimer checkpoint info tinker://RUN/weights/final"))
@cli_command
def info(
    path: PathArgument,
    *,
    options: ServerOptions,
) -> None:
    """Show one checkpoint: its size, its end, and the adapter in it."""
    (parsed,) = checked([path])
    client = options.rest_client()
    weights = client.get_weights_info_by_tinker_path(path).result()
    listed = client.list_checkpoints(run_id_of(path)).result().checkpoints
    found = next((one for one in listed if one.tinker_path == parsed), None)
    if found is None:
        raise NotFound(f"{path!r} is not among the checkpoints of its run")
    if options.is_json:
        print_json(found.model_dump(mode="json") | {"weights": weights.model_dump(mode="json")})
        return
    trained = {"attention": weights.train_attn, "mlp": weights.train_mlp, "output head": weights.train_unembed}
    trained |= {"embedding": weights.train_embed, "norms": weights.train_norms}
    print_facts(
        {
            "path": found.tinker_path,
            "type": found.checkpoint_type,
            "base model": weights.base_model,
            "method": weights.method,
            "rank": weights.lora_rank,
            "trained": ", ".join(name for name, is_trained in trained.items() if is_trained),
            "size": size_text(found.size_bytes),
            "saved": moment_text(found.time),
            "expires": moment_text(found.expires_at) or "never",
            "published": "yes" if found.public else "no",
            "metadata": metadata_text(found.user_metadata),
        }
    )


@app.command(
    epilog=examples(
        "lorimer checkpoint delete tinker://RUN/weights/000010 tinker://RUN/weights/000020",
        "lorimer checkpoint delete --run-id RUN --type training --before 7d --yes",
    )
)
@cli_command
def delete(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH", help="Paths of checkpoints, tinker://…", show_default=False),
    ] = None,
    run_id: RunOption = None,
    kind: KindOption = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="TIME", help="Only older ones: a date, or 7d for a week ago.")
    ] = None,
    after: Annotated[str | None, typer.Option("--after", metavar="TIME", help="Only newer ones.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    *,
    options: ServerOptions,
) -> None:
    """Delete checkpoints, by path or all of a run that match, after a question.

    Samplers that use them go on; what is deleted cannot be brought back.
    """
    if bool(paths) == bool(run_id):
        raise InvalidInput(
            "nothing is named: give paths, or --run-id" if not paths else "give paths or --run-id, not both"
        )
    if paths and (kind or before or after):
        raise InvalidInput("--type, --before and --after choose among the checkpoints of --run-id")
    chosen = checked(paths or [])
    times = (parse_moment(before) if before else None, parse_moment(after) if after else None)
    client = options.rest_client()
    if run_id:
        chosen = [one.tinker_path for one in matching(client, run_id, kind, *times)]
    if chosen and not yes:
        confirm(chosen)
    change(chosen, client.delete_checkpoint_from_tinker_path, options.output, "deleted")


@app.command(epilog=examples("lorimer checkpoint publish tinker://RUN/sampler_weights/final"))
@cli_command
def publish(
    paths: PathsArgument,
    *,
    options: ServerOptions,
) -> None:
    """Let every user of the server load, sample and download checkpoints."""
    chosen = checked(paths)
    client = options.rest_client()
    change(chosen, client.publish_checkpoint_from_tinker_path, options.output, "published")


@app.command(epilog=examples("lorimer checkpoint unpublish tinker://RUN/sampler_weights/final"))
@cli_command
def unpublish(
    paths: PathsArgument,
    *,
    options: ServerOptions,
) -> None:
    """Keep checkpoints to yourself again."""
    chosen = checked(paths)
    client = options.rest_client()
    change(chosen, client.unpublish_checkpoint_from_tinker_path, options.output, "unpublished")


@app.command(
    name="set-ttl",
    epilog=examples(
        "lorimer checkpoint set-ttl tinker://RUN/weights/000010 --ttl 7d",
        "lorimer checkpoint set-ttl tinker://RUN/weights/final --remove",
    ),
)
@cli_command
def set_ttl(
    paths: PathsArgument,
    ttl: Annotated[
        str | None, typer.Option("--ttl", metavar="TIME", help="How long from now: seconds, or 90m, 12h, 7d, 4w.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Keep them for ever.")] = False,
    *,
    options: ServerOptions,
) -> None:
    """Give checkpoints an end, counted from now, or take it away."""
    if (ttl is None) != remove:
        raise InvalidInput("one of --ttl and --remove is accepted, and one is needed")
    seconds = parse_duration(ttl) if ttl is not None else None
    chosen = checked(paths)
    client = options.rest_client()

    def start(path: str) -> "Future[None]":
        return client.set_checkpoint_ttl_from_tinker_path(path, seconds)

    change(chosen, start, options.output, "kept for ever" if seconds is None else f"expires in {ttl}")


@app.command(
    epilog=examples(
        "lorimer checkpoint download tinker://RUN/sampler_weights/final -o adapters",
        "lorimer checkpoint download tinker://RUN/weights/final --force",
    )
)
@cli_command
def download(
    paths: PathsArgument,
    directory: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the directory of each checkpoint is made.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace directories that are there.")] = False,
    *,
    options: ServerOptions,
) -> None:
    """Download checkpoints as PEFT adapter directories, each into one of its own.

    Sizes are checked, and a directory appears when it is complete. What an interrupted download of an export left in
    DIR/….partial is completed by the next one; other checkpoints begin anew.
    """
    chosen = checked(paths)
    client = options.rest_client()
    from lorimer.cli.download import directory_name, download_checkpoint

    done, failed = [], Failures()
    for path in chosen:
        target = directory / directory_name(path)
        with failed.noted(path):
            files = download_checkpoint(client, path, target, force=force)
            listed = [asdict(file) for file in files]
            done.append({"tinker_path": path, "destination": str(target), "files": listed})
            if not options.is_json:
                print_download(target, files)
    if options.is_json:
        print_json({"downloads": done, "failed": failed.plain()})
    failed.end()


@app.command(
    name="push-hf",
    epilog=examples(
        "lorimer checkpoint push-hf tinker://RUN/sampler_weights/final --repo me/my-adapter",
        "lorimer checkpoint push-hf tinker://RUN/sampler_weights/final --as gguf --dtype q8_0 --repo me/my-model",
        "HF_TOKEN=hf_… lorimer checkpoint push-hf tinker://RUN/weights/final --public",
    ),
)
@cli_command
def push_hf(
    path: PathArgument,
    repo: Annotated[
        str | None,
        typer.Option("--repo", "-r", metavar="USER/NAME", help="Repository; made from the run if not given."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public; private is the default.")
    ] = False,
    revision: Annotated[str | None, typer.Option("--revision", metavar="BRANCH", help="Branch to push to.")] = None,
    message: Annotated[
        str | None, typer.Option("--commit-message", "-m", metavar="TEXT", help="Of the commit.")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of a commit.")] = False,
    card: Annotated[bool, typer.Option("--model-card/--no-model-card", help="Write a README.md.")] = True,
    form: Annotated[
        PushedForm, typer.Option("--as", help="The adapter, the model with merged weights, or a file for llama.cpp.")
    ] = PushedForm.adapter,
    base: BaseOption = None,
    dtype: DtypeOption = Dtype.auto,
    is_checked: CheckOption = True,
    llama_cpp: LlamaCppOption = None,
    config: ConfigOption = None,
    *,
    options: ServerOptions,
) -> None:
    """Upload a checkpoint to the Hugging Face hub: a PEFT adapter, a merged model or a GGUF file.

    Log in before with `hf auth login`, or set HF_TOKEN. Merged models and GGUF files are made as by `lorimer export`.
    """
    checked([path])
    check_form(form, base, dtype)
    how = Conversion(base=base, dtype=dtype, is_checked=is_checked, llama_cpp=llama_cpp, config=config)
    client = options.rest_client()
    from lorimer.cli.push import push_checkpoint

    pushed = push_checkpoint(
        client,
        path,
        repo,
        form,
        how,
        public=public,
        revision=revision,
        message=message,
        create_pr=create_pr,
        with_card=card,
    )
    if options.is_json:
        print_json({"tinker_path": path} | asdict(pushed))
    else:
        print(pushed.url)


def print_download(target: Path, files: list["FetchedFile"]) -> None:
    print(printable(str(target)))
    for file in files:
        print(f"  {printable(file.name)}  {size_text(file.size_bytes)}  sha256 {file.sha256[:16]}…")
