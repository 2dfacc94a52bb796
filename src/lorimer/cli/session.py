"""``lorimer session``: the sessions in which programs trained and sampled."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.moments import ago
from lorimer.cli.output import (
    Column,
    examples,
    metadata_text,
    note,
    print_facts,
    print_json,
    print_table,
    size_text,
)
from lorimer.cli.run import LimitOption
from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from lorimer.client.rest import RestClient
    from lorimer.types import SessionSummary
    from lorimer.types.sessions import SessionStatus

app = typer.Typer(help="Look at sessions, and export what they did when.", no_args_is_help=True)

SESSIONS_PER_PAGE = 200
COLUMNS: list[str | Column] = [
    Column("session", whole=True),
    "name",
    "state",
    "created",
    Column("checkpoints", justify="right"),
    Column("size", justify="right"),
    "metadata",
]

ERROR_COLUMNS: list[str | Column] = ["failed", "request", "run", Column("error", whole=True)]

SessionArgument = Annotated[str, typer.Argument(metavar="SESSION", help="Id of the session.")]


@app.command(name="list", epilog=examples("lorimer session list", "lorimer session list --name 'sql rl' -f json"))
@cli_command
def list_(
    limit: LimitOption = 20,
    name: Annotated[str | None, typer.Option("--name", help="Words that all occur in the session's name.")] = None,
    *,
    options: ServerOptions,
) -> None:
    """List sessions, newest first."""
    client = options.rest_client()
    sessions = search(client, limit, name)
    if options.is_json:
        print_json({"sessions": [session.model_dump(mode="json") for session in sessions]})
    elif sessions:
        print_table(COLUMNS, [row(session) for session in sessions])
    else:
        note("no sessions")


@app.command(epilog=examples("lorimer session info SESSION"))
@cli_command
def info(
    session_id: SessionArgument,
    *,
    options: ServerOptions,
) -> None:
    """Show the runs and samplers of a session, how it ended, and the requests that failed."""
    found = options.rest_client().get_session(session_id, "accessible").result()
    if options.is_json:
        print_json({"session_id": session_id} | found.model_dump(mode="json"))
        return
    print_facts(
        {
            "session": session_id,
            "name": found.display_name,
            "state": state(found.status),
            "metadata": metadata_text(found.user_metadata),
            "runs": found.training_run_ids,
            "samplers": found.sampler_ids,
        }
    )
    if found.errors:
        print()
        print_table(ERROR_COLUMNS, [[ago(one.at), one.kind, one.run_id or "", one.error] for one in found.errors])


@app.command(
    name="export-trace",
    epilog=examples(
        "lorimer session export-trace SESSION -o trace.json   # open it at https://ui.perfetto.dev",
        "lorimer session export-trace SESSION --url-only",
    ),
)
@cli_command
def export_trace(
    session_id: SessionArgument,
    file: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; SESSION.json is the default.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    url_only: Annotated[bool, typer.Option("--url-only", help="Print the address of the file instead.")] = False,
    *,
    options: ServerOptions,
) -> None:
    """Write what a session did when, for https://ui.perfetto.dev or chrome://tracing."""
    target = file or Path(f"{session_id.replace('/', '_')}.json")
    if not url_only and not force and target.exists():
        raise InvalidInput(f"{str(target)!r} is there already; --force replaces it")
    client = options.rest_client()
    if url_only and client.holder.is_local:
        raise InvalidInput("--url-only needs a server with an address: `lorimer serve`, and --base-url")
    url = client.export_session_trace(session_id).result()
    if not url_only:
        from lorimer.cli.download import download_file

        download_file(client.holder, url, target)
    if options.is_json:
        print_json({"session_id": session_id, "url" if url_only else "destination": url if url_only else str(target)})
    else:
        print(url if url_only else target)


def search(client: "RestClient", limit: int, name: str | None) -> list["SessionSummary"]:
    """The newest ``limit`` sessions, or all, a page at a time."""
    from lorimer.client.errors import ExperimentalWarning
    from lorimer.types import SessionSearchRequest

    found: list[SessionSummary] = []
    cursor = None
    while True:
        wanted = min(SESSIONS_PER_PAGE, limit - len(found)) if limit else SESSIONS_PER_PAGE
        request = SessionSearchRequest(display_name=name or None, limit=wanted, cursor=cursor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            page = client.search_sessions(request).result()
        found += page.sessions
        cursor = page.next_cursor
        if cursor is None or not page.sessions or len(found) == limit:
            return found


def row(session: "SessionSummary") -> list[object]:
    return [
        session.session_id,
        session.display_name or "",
        state(session.status),
        ago(session.created_at),
        session.checkpoints_count or "",
        size_text(session.checkpoint_storage_bytes or None),
        metadata_text(session.user_metadata),
    ]


def state(status: "SessionStatus | None") -> str:
    """Return how a session ended, with the error text that its program or the server gave."""
    if status is None:
        return ""
    name = status.reason.type if status.type == "client_finished" else status.type
    detail = getattr(status, "detail", None) or getattr(status, "message", None)
    return f"{name}: {detail}" if detail else name
