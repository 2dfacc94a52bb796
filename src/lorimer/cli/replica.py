"""``lorimer replica``: the replicas of base models, and the processes that compute them."""

from typing import TYPE_CHECKING

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.moments import ago
from lorimer.cli.output import Column, examples, note, print_json, print_table

if TYPE_CHECKING:
    from lorimer.types.replicas import ReplicaEntry

app = typer.Typer(help="Look at the replicas of base models.", no_args_is_help=True)

COLUMNS: list[str | Column] = [
    Column("replica", whole=True),
    "state",
    "owner",
    "node",
    Column("lease", justify="right"),
    "since",
    *(Column(title, justify="right") for title in ("runs", "samples", "operations", "tokens/s", "deaths")),
]


@app.command(
    name="list",
    epilog=examples(
        "lorimer replica list", "lorimer replica list -f json | jq -r '.replicas[] | select(.state == \"lost\").name'"
    ),
)
@cli_command
def list_(*, options: ServerOptions) -> None:
    """List the replicas of base models: who computes them, since when, and how busy they are.

    Samples are running + waiting, tokens/s trained + sampled in the last minute. JSON also has recent moves of your
    runs from one replica to another.
    """
    found = options.rest_client().list_replicas().result()
    if options.is_json:
        print_json(found.model_dump(mode="json"))
    elif found.replicas:
        print_table(COLUMNS, [row(replica) for replica in found.replicas])
        for replica in found.replicas:
            if replica.error:
                note(f"{replica.name}: {replica.error}")
    else:
        note("no replicas")


def row(replica: "ReplicaEntry") -> list[object]:
    rates = replica.tokens_per_second
    return [
        replica.name,
        f"{replica.state}: {replica.stage}" if replica.stage else replica.state,
        replica.owner_id or "",
        replica.node or "",
        "" if replica.lease_seconds is None else f"{replica.lease_seconds:.0f} s",
        ago(replica.changed_at),
        replica.num_loaded_runs,
        f"{replica.num_running_samples} + {replica.num_waiting_samples}",
        replica.num_open_operations,
        f"{rates.training:.0f} + {rates.sampling:.0f}",
        replica.num_deaths,
    ]
