"""``lorimer run rollouts``: what the policy of a run wrote, as a table, one of them in full, or exported."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.output import Column, examples, note, print_facts, print_json, print_table, printable
from lorimer.cli.run import LimitOption, RunArgument, note_rest, resolve
from lorimer.cli.run_changes import app as app
from lorimer.errors import InvalidInput

if TYPE_CHECKING:
    from lorimer.client.rest import RestClient
    from lorimer.types.rollouts import LoggedRollout

CONTENTS_PER_PAGE = 100
ROLLOUTS_PER_PAGE = 1000
COLUMNS: list[str | Column] = [
    *(Column(title, justify="right") for title in ("id", "step")),
    "split",
    "group",
    *(Column(title, justify="right") for title in ("reward", "tokens", "turns")),
    "stop",
    "answer",
]


@app.command(
    epilog=examples(
        "lorimer run rollouts RUN --step 20 --sort -reward",
        "lorimer run rollouts RUN --where 'reward<0.5' --where stop=length --where '\"I am sorry\"'",
        "lorimer run rollouts RUN --id 421",
        "lorimer run rollouts RUN --where split=test --export samples.jsonl",
    )
)
@cli_command
def rollouts(
    run: RunArgument,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only those of this step.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", help="A condition on step, group, kind, split, reward, length, stop, ...; or words."),
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", help="step, reward, length or advantage; -NAME sorts descending.")
    ] = "-step",
    limit: LimitOption = 20,
    number: Annotated[int | None, typer.Option("--id", min=1, help="Show the rollout of this id in full.")] = None,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write all that match, with their turns, a line of JSON each.")
    ] = None,
    *,
    options: ServerOptions,
) -> None:
    """Show the rollouts and samples of a run; JSON has their turns, tokens and logprobs."""
    client = options.rest_client()
    run_id = resolve(client, run)
    if number is not None:
        show_one(client.get_rollout(run_id, number).result(), options.is_json)
        return
    query = " ".join([*(where or []), *([] if step is None else [f"step={step}"])])
    if export is not None:
        count = write_lines(export, found(client, run_id, query, sort, None, content=True))
        note(f"{count} rollouts in {export}")
        return
    most = limit or None
    if options.is_json:
        rows = list(found(client, run_id, query, sort, most, content=True))
        print_json({"rollouts": [row.model_dump(mode="json", exclude_none=True) for row in rows]})
        return
    total = client.list_rollouts(run_id, query, limit=0).result().total_count or 0
    rows = list(found(client, run_id, query, sort, most, content=False))
    if rows:
        print_table(COLUMNS, [table_row(row) for row in rows])
    note_rest("rollouts", len(rows), total)


def found(
    client: "RestClient", run_id: str, query: str, sort: str, limit: int | None, *, content: bool
) -> Iterator["LoggedRollout"]:
    """Yield what matches, page by page."""
    cursor, num_found, largest = None, 0, CONTENTS_PER_PAGE if content else ROLLOUTS_PER_PAGE
    while limit is None or num_found < limit:
        size = largest if limit is None else min(limit - num_found, largest)
        page = client.list_rollouts(run_id, query, sort=sort, content=content, limit=size, after=cursor).result()
        yield from page.rollouts
        num_found += len(page.rollouts)
        cursor = page.next_cursor
        if cursor is None:
            return


def write_lines(path: Path, rows: Iterator["LoggedRollout"]) -> int:
    """Write a line of JSON for each rollout into a new file, which is complete or not there. Return their number."""
    if path.exists():
        raise InvalidInput(f"{str(path)!r} exists; name a new file")
    part = path.with_name(path.name + ".part")
    count = 0
    try:
        with part.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(row.model_dump_json(exclude_none=True) + "\n")
                count += 1
        part.rename(path)
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return count


def table_row(row: "LoggedRollout") -> list[object]:
    reward = "" if row.reward is None else f"{row.reward:.4g}"
    shown = [row.rollout_id, row.step, row.split, f"{row.group}/{row.number}" if row.group else row.number, reward]
    tokens = "" if row.num_tokens is None else row.num_tokens
    return [*shown, tokens, row.num_turns, row.stop_reason or "", row.answer]


def show_one(row: "LoggedRollout", is_json: bool) -> None:
    """Show a rollout turn by turn."""
    if is_json:
        print_json(row.model_dump(mode="json", exclude_none=True))
        return
    content = row.content
    parts = {} if content is None else content.reward_parts
    print_facts(
        {
            "rollout": row.rollout_id,
            "step": row.step,
            "kind": f"{row.kind}, {row.split}",
            "group": row.group,
            "number": row.number,
            "reward": row.reward,
            "of which": [f"{name} = {value:.4g}" for name, value in parts.items()],
            "advantage": row.advantage,
            "tokens": row.num_tokens,
            "stop": row.stop_reason,
            "errors": content.errors if content else None,
            "seconds": [f"{name} = {value:.3g}" for name, value in (content.seconds if content else {}).items()],
        }
    )
    for turn in content.turns if content else []:
        typer.echo(
            f"\n── {printable(turn.role)} " + (f"(reward {turn.reward:.4g}) " if turn.reward is not None else "")
        )
        typer.echo("\n".join(map(printable, turn.content.split("\n"))))
        calls = [f"{call.name}({call.arguments}) → {call.error or call.result or ''}" for call in turn.tool_calls]
        print_facts({"calls": calls, **turn.logs})
