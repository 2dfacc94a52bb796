"""``lorimer backup`` and ``lorimer restore``: copy a data directory and its database, and bring the copy back."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import DataOptions, cli_command
from lorimer.cli.failures import FAILED
from lorimer.cli.output import Format, examples, note, print_facts, print_json, size_text
from lorimer.cli.progress import progress_bar

if TYPE_CHECKING:
    from lorimer.server.backup import Manifest

BACKUP_EPILOG = examples("lorimer backup /mnt/backups/2026-01-31", "lorimer backup ./copy --data /srv/lorimer -f json")
RESTORE_EPILOG = examples(
    "lorimer restore /mnt/backups/2026-01-31 --data /srv/lorimer",
    "lorimer restore ./copy --data ./new --database postgresql://lorimer@db/lorimer",
)


@cli_command
def backup(
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A directory that does not exist yet.")],
    *,
    options: DataOptions,
) -> None:
    """Copy the data directory and its database, as they are at one moment, into DEST; the server may run meanwhile.

    DEST appears when it is complete. It holds what the data directory and the object store hold: keys as hashes, users'
    data and weights, and the secret that signs tokens. Exit code 1 if files were damaged or missing before.
    """
    settings = options.settings()

    from lorimer.server.backup import back_up

    with progress_bar() as report:
        manifest = back_up(settings, destination, report)
    show(manifest, {"backup": str(destination.absolute())}, options.output)
    if manifest.faults:
        note(f"lorimer: the backup is complete, but {len(manifest.faults)} files of the data directory are not whole")
        raise typer.Exit(FAILED)


@cli_command
def restore(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A directory that `lorimer backup` made.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Move what the data directory has aside; replace rows of PostgreSQL.")
    ] = False,
    *,
    options: DataOptions,
) -> None:
    """Bring a backup back: verify every byte of SOURCE, then fill the data directory and the database with it.

    Refused while a server runs there, and for a directory or database that is not empty unless --replace is given.
    A backup of SQLite can be restored into PostgreSQL and the other way round. With the setting objects, weights,
    snapshots and large payloads are uploaded to that object store first.
    """
    settings = options.settings()

    from lorimer.server.restore import restore as bring_back

    with progress_bar() as report:
        manifest, aside = bring_back(settings, source, report, replace=replace)
    place = {"data": str(settings.data.expanduser().absolute()), "replaced": str(aside) if aside else None}
    show(manifest, place, options.output)


def show(manifest: "Manifest", place: dict[str, str | None], output: Format) -> None:
    facts = {
        **place,
        "created_at": manifest.created_at.isoformat(),
        "lorimer": manifest.lorimer,
        "schema": manifest.schema,
        "source": manifest.source,
        "files": len(manifest.files),
        "rows": sum(manifest.rows.values()),
        "size_bytes": manifest.size_bytes,
        "faults": manifest.faults,
    }
    if output is Format.json:
        print_json(facts)
    else:
        print_facts({**facts, "size_bytes": size_text(manifest.size_bytes)})
