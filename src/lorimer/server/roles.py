"""What differs between the processes of one installation: how they open the store, and what they must agree on."""

import asyncio
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from lorimer.errors import InvalidInput, StorageError
from lorimer.server.settings import Settings
from lorimer.store import owners
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.scratch import Scratch

MAX_CLOCK_SECONDS = 5.0
"""How far the clocks of this machine and of the database may be apart: they date tokens, links and what expires."""
MIN_SECRET_BYTES = 32
OBJECTS_SECONDS = 5.0
"""The longest time of one request when an object store is only checked."""


def shares_directory(settings: Settings) -> bool:
    """Return whether other processes use the data directory too: weights and payloads are not in an object store."""
    return settings.role != "all" and not settings.objects


def open_store(
    settings: Settings, directory: DataDirectory, scratch: Scratch | None = None, *, is_shared: bool = False
) -> Store:
    """Open the database of the locked data directory, or the configured one.

    Several processes of one installation share it. Raise ``InUse`` if a server of another holds it.
    """
    store = Store.open(settings.database or None, directory, durability=settings.durability, scratch=scratch)
    try:
        store.lock(is_shared=is_shared or settings.role != "all")
        if settings.role != "all":
            agree(settings, directory, store)
    except BaseException:
        store.close()
        raise
    return store


def secret_of(settings: Settings, directory: DataDirectory) -> bytes:
    """Return the secret that signs tokens and links: that of the setting, or of the data directory."""
    if not settings.secret_file:
        return directory.secret
    path = Path(settings.secret_file).expanduser()
    try:
        found = path.read_bytes().strip()
    except OSError as error:
        raise StorageError(f"secret_file {str(path)!r} cannot be read: {error.strerror or error}") from error
    if len(found) < MIN_SECRET_BYTES:
        raise InvalidInput(
            f"secret_file {str(path)!r} has {len(found)} bytes; at least {MIN_SECRET_BYTES} are needed:"
            " `openssl rand -hex 32` makes some"
        )
    return found


def agree(settings: Settings, directory: DataDirectory, store: Store) -> None:
    """Refuse a process whose secret differs from that of the others, or whose clock differs from the database's."""
    fingerprint = hashlib.sha256(b"lorimer secret" + secret_of(settings, directory)).hexdigest()
    refusal = "the secret differs from that of the other processes on this database; set secret_file to the same file"
    store.write_now(owners.agree, "secret", fingerprint, refusal)
    apart = clock_seconds(lambda: store.read_now(owners.clock))
    if apart > MAX_CLOCK_SECONDS:
        raise InvalidInput(
            f"the clock of this machine and that of the database are {apart:.0f} s apart; at most"
            f" {MAX_CLOCK_SECONDS:g} s are accepted: synchronise them (NTP)"
        )


def check_objects(url: str) -> None:
    """Write, read, list and delete in an object store. Raise ``StorageError`` if one of them fails."""
    from lorimer.store.object_store import open_stored_objects  # needs obstore

    asyncio.run(open_stored_objects(url, request_seconds=OBJECTS_SECONDS))


def clock_seconds(read: Callable[[], float]) -> float:
    """Return how far a clock that ``read`` asks is at least from this machine's, whatever part of the time it took."""
    began = time.time()
    theirs = read()
    ended = time.time()
    return max(0.0, began - theirs, theirs - ended)


def node_name(settings: Settings) -> str:
    return settings.node or os.uname().nodename
