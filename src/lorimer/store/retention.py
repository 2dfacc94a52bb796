"""Lists the entries of the data directory that the database refers to; all others are leftovers of a crashed server."""

from sqlalchemy import Connection, select, union_all

from lorimer.store.tables import blobs, runs, weights


def known_names(c: Connection) -> set[str]:
    """Return the names of all weights, snapshots and blob files, for `DataDirectory.sweep_orphans`."""
    snapshots = [select(name).where(name.is_not(None)) for name in (runs.c.snapshot_name, runs.c.newest_name)]
    files = select(blobs.c.file).where(blobs.c.file.is_not(None))
    return set(c.execute(union_all(select(weights.c.name), *snapshots, files)).scalars())
