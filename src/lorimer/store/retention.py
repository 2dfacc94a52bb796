"""Lists what the database refers to in the data directory or the object store; all else is left by a crashed server.

The leftovers in the data directory are deleted at start, those in an object store by `sweep_objects`: other servers
may be writing there, so only what is older than a day counts.
"""

from collections.abc import Awaitable, Callable
from datetime import timedelta

from sqlalchemy import Connection, select, union_all

from lorimer.store.objects import Objects
from lorimer.store.tables import blobs, runs, weights

ORPHAN_AGE = timedelta(days=1)
SWEPT = ("weights/", "snapshots/", "blobs/", "check/", "archives/")


def known_names(c: Connection) -> set[str]:
    """Return the names of all weights, snapshots and large blobs."""
    snapshots = [select(name).where(name.is_not(None)) for name in (runs.c.snapshot_name, runs.c.newest_name)]
    files = select(blobs.c.file).where(blobs.c.file.is_not(None))
    return set(c.execute(union_all(select(weights.c.name), *snapshots, files)).scalars())


async def sweep_objects(
    objects: Objects, known: Callable[[], Awaitable[set[str]]], older_than: timedelta = ORPHAN_AGE
) -> list[str]:
    """Delete objects that no row names and that are older than a day. Return their names."""
    old = [name for prefix in SWEPT async for name in objects.names(prefix, older_than)]
    # Read after the listing: what was named meanwhile is kept, and a new object is too young.
    named = await known() if old else set()
    orphans = [name for name in old if name.startswith("archives/") or name.partition("/")[2] not in named]
    await objects.delete(orphans)
    return orphans
