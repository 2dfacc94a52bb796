"""``lorimer cluster``: workers on the nodes of a Ray cluster (``cluster = "ray"``)."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import cli_command
from lorimer.cli.output import Column, Format, FormatOption, examples, note, print_json, print_table
from lorimer.cli.settings import ConfigOption, effective_settings
from lorimer.errors import InvalidInput, LorimerError

if TYPE_CHECKING:
    from lorimer.cluster.plan import Worker
    from lorimer.cluster.ray_workers import Placed, RayWorkers
    from lorimer.server.settings import Settings

app = typer.Typer(help="Place workers on the nodes of a Ray cluster.", no_args_is_help=True)

PLACE_SECONDS = 60.0
"""How long to wait at least for Ray to start workers that it has room for."""
LOOK_SECONDS = 1.0
COLUMNS: list[str | Column] = [
    Column("worker", whole=True),
    "state",
    "node",
    Column("pid", justify="right"),
    Column("exits", justify="right"),
    Column("last exit", whole=True),
]


@app.command(
    epilog=examples("lorimer cluster start --config lorimer.toml", "lorimer cluster start -c lorimer.toml --wait 600")
)
@cli_command
def start(
    config: ConfigOption = None,
    wait: Annotated[
        float, typer.Option(help="Longest wait, in seconds, for nodes that have room for the workers.", min=0)
    ] = 0.0,
    output: FormatOption = Format.table,
) -> None:
    """Make the workers those of the configuration: start what is missing, restart what changed, stop the rest.

    Run it on a node of the Ray cluster. Ray keeps the workers running when the command has ended.
    """
    settings, path = ray_settings(config)

    from lorimer.cluster.plan import namespace_of
    from lorimer.cluster.ray_workers import connected

    with connected(namespace_of(settings)) as workers:
        if workers.is_open():
            note("lorimer: whoever reaches a port of this Ray cluster can run programs on it; set RAY_AUTH_MODE=token")
        wanted = {worker.name: worker for worker in fitting_plan(workers, settings, path, wait)}
        there = workers.names()
        workers.stop([name for name in there if name not in wanted], settings.shutdown_seconds)
        for name, worker in wanted.items():
            if name not in there:
                workers.create(worker)
        placed = wait_for_places(workers, max(wait, PLACE_SECONDS))
    show(placed, output)
    if waiting := [one.name for one in placed if one.state == "waiting"]:
        raise LorimerError(f"no node has room now for {', '.join(waiting)}; Ray places them when one has")


def fitting_plan(workers: "RayWorkers", settings: "Settings", path: str, wait: float) -> "list[Worker]":
    """Return the plan. Refuse one with a worker that no node of the cluster could ever have."""
    from lorimer.cluster.plan import plan_workers

    deadline = time.monotonic() + wait
    while True:
        nodes = workers.nodes()
        plan = plan_workers(settings, path, has_gpus=any(node.num_gpus for node in nodes.values()))
        large = [worker for worker in plan if not any(worker.resources.fits(node) for node in nodes.values())]
        if not large:
            return plan
        if time.monotonic() >= deadline:
            raise InvalidInput(
                f"the worker of {', '.join(large[0].replicas)} needs {large[0].resources} on one node; the nodes have "
                + "; ".join(f"{name}: {node}" for name, node in nodes.items())
            )
        time.sleep(LOOK_SECONDS)


def wait_for_places(workers: "RayWorkers", seconds: float) -> "list[Placed]":
    deadline = time.monotonic() + seconds
    while True:
        placed = workers.placed()
        if time.monotonic() >= deadline or all(one.state != "waiting" for one in placed):
            return placed
        time.sleep(LOOK_SECONDS)


@app.command(epilog=examples("lorimer cluster status --config lorimer.toml", "lorimer cluster status -f json"))
@cli_command
def status(config: ConfigOption = None, output: FormatOption = Format.table) -> None:
    """List the workers with their nodes. `lorimer replica list` shows what they compute."""
    settings, _ = ray_settings(config)

    from lorimer.cluster.plan import namespace_of
    from lorimer.cluster.ray_workers import connected

    with connected(namespace_of(settings)) as workers:
        placed = workers.placed()
    show(placed, output)


@app.command(epilog=examples("lorimer cluster stop --config lorimer.toml"))
@cli_command
def stop(config: ConfigOption = None) -> None:
    """Stop all workers: each finishes its batch and takes snapshots. The Ray cluster stays."""
    settings, _ = ray_settings(config)

    from lorimer.cluster.plan import namespace_of
    from lorimer.cluster.ray_workers import connected

    with connected(namespace_of(settings)) as workers:
        names = workers.names()
        workers.stop(names, settings.shutdown_seconds)
    note(f"lorimer: stopped {len(names)} workers")


def ray_settings(config: Path | None) -> "tuple[Settings, str]":
    """Return the settings, and the path by which workers find their file."""
    import os

    effective = effective_settings({}, config, None)
    if effective.settings.cluster != "ray":
        raise InvalidInput("cluster is 'none'; set cluster = \"ray\" in the configuration file to place workers by Ray")
    path = str(config or os.environ.get("LORIMER_CONFIG", ""))
    return effective.settings, str(Path(path).expanduser().resolve()) if path else ""


def show(placed: "list[Placed]", output: Format) -> None:
    if output is Format.json:
        print_json([asdict(one) for one in placed])
    elif placed:
        print_table(COLUMNS, [row(one) for one in placed])
    else:
        note("no workers")


def row(one: "Placed") -> list[object]:
    node = f"{one.node} ({one.node_id[:8]})" if one.node else ""
    return [one.name, one.state, node, one.pid or "", one.num_exits, one.last_exit]
