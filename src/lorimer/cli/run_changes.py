"""``lorimer run rename`` and the other commands that change runs: notes, tags, archiving, deletion."""

from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.output import Format, examples
from lorimer.cli.run import RunArgument, resolve
from lorimer.cli.run import app as app
from lorimer.cli.selection import change
from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from concurrent.futures import Future

    from lorimer.client.rest import RestClient
    from lorimer.types.runs import RunDetails

RunsArgument = Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids or names of runs.")]


@app.command(epilog=examples("lorimer run rename amber-heron-17 'kettle, rank 16'"))
@cli_command
def rename(
    run: RunArgument,
    name: Annotated[str, typer.Argument(help="The new name.")],
    *,
    options: ServerOptions,
) -> None:
    """Give a run another name."""
    client = options.rest_client()
    report(options, client.update_run(resolve(client, run), name=name), f"is now {name}")


@app.command(epilog=examples("lorimer run note amber-heron-17 'learns too slowly'", "lorimer run note RUN ''"))
@cli_command
def note(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="The notes, which replace the old ones.")],
    *,
    options: ServerOptions,
) -> None:
    """Write the notes of a run."""
    client = options.rest_client()
    report(options, client.update_run(resolve(client, run), notes=text), "noted")


@app.command(epilog=examples("lorimer run tag amber-heron-17 baseline", "lorimer run tag RUN --remove baseline"))
@cli_command
def tag(
    run: RunArgument,
    add: Annotated[list[str] | None, typer.Argument(metavar="TAG...", help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="A tag to remove.")] = None,
    *,
    options: ServerOptions,
) -> None:
    """Add tags to a run, or remove some."""
    client = options.rest_client()
    run_id = resolve(client, run)
    known = client.get_run(run_id).result().tags
    if missing := sorted(set(remove or []) - set(known)):
        raise InvalidInput(f"the run has no tag {missing[0]!r}; it has {', '.join(known) or 'none'}")
    tags = [one for one in dict.fromkeys([*known, *(add or [])]) if one not in (remove or [])]
    report(options, client.update_run(run_id, tags=tags), f"has the tags {', '.join(tags)}" if tags else "has no tags")


@app.command(epilog=examples("lorimer run archive amber-heron-17", "lorimer run archive RUN --undo"))
@cli_command
def archive(
    runs: RunsArgument,
    undo: Annotated[bool, typer.Option("--undo", help="Take them out of the archive.")] = False,
    *,
    options: ServerOptions,
) -> None:
    """Take runs out of the list without deleting anything."""
    client = options.rest_client()

    def start(run_id: str) -> "Future[RunDetails]":
        return client.update_run(run_id, is_archived=not undo)

    change(resolved(client, runs), start, options.output, "unarchived" if undo else "archived")


@app.command(epilog=examples("lorimer run delete amber-heron-17", "lorimer run delete RUN --yes"))
@cli_command
def delete(
    runs: RunsArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    *,
    options: ServerOptions,
) -> None:
    """Delete runs that are not running, with their checkpoints and metrics."""
    client = options.rest_client()
    ids = resolved(client, runs)
    if not yes:
        if options.output is Format.json:
            raise InvalidInput("-f json cannot ask; --yes is needed")
        typer.confirm(f"Delete {len(ids)} run(s) with all their checkpoints?", abort=True, err=True)
    change(ids, client.delete_run, options.output, "deleted")


def resolved(client: "RestClient", runs: list[str]) -> list[str]:
    return list(dict.fromkeys(resolve(client, run) for run in runs))


def report(options: ServerOptions, started: "Future[RunDetails]", word: str) -> None:
    from lorimer.cli.output import print_json, printable

    found = started.result()
    if options.is_json:
        print_json(found.model_dump(mode="json"))
    else:
        print(f"{printable(found.run_id)}: {printable(word)}")
