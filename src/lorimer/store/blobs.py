"""Stores the bytes of a row: up to 256 KiB in the database, larger blobs in files below `blobs/`, or in objects.

A file is complete before the transaction that names it commits, and is deleted after the transaction that drops its
name has committed. Files of a transaction that rolled back are deleted immediately, those of a crashed one at the next
start. The file name contains the length and CRC-32, so a torn file is detected; objects have a SHA-256 instead
(`blob_objects.py`).
"""

import hashlib
import secrets
import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, Protocol

from sqlalchemy import Connection, bindparam, delete, insert, select

from lorimer.errors import CheckpointError, StorageError
from lorimer.store.directory import DataDirectory, storage_error, write_file
from lorimer.store.statements import Statement
from lorimer.store.tables import blobs

INLINE_BYTES = 256 * 1024
Part = Literal["payload", "result"]

_PUT = Statement(lambda _: insert(blobs))
_GET = select(blobs.c.data, blobs.c.file).where(blobs.c.owner == bindparam("owner_id"), blobs.c.part == bindparam("of"))


class LargeBlobs(Protocol):
    """Where large blobs are, and what the writer's open transaction has created and dropped of them."""

    def write(self, data: bytes) -> str: ...
    def read(self, name: str, owner: str) -> bytes: ...
    def expect(self, names: list[str]) -> None: ...
    def drop(self, name: str) -> None: ...
    def mark(self) -> tuple[int, int]: ...
    def roll_back(self, mark: tuple[int, int] = (0, 0)) -> None: ...
    def committed(self) -> None: ...
    def forget(self) -> None: ...


class BlobFiles:
    """Tracks the files that the writer's open transaction has created and dropped."""

    def __init__(self, root: DataDirectory, *, sync: bool = False) -> None:
        self.directory = root.blobs
        self.sync = sync
        self._root = root
        self._made: list[str] = []
        self._dropped: list[str] = []

    def write(self, data: bytes) -> str:
        name = blob_name(data, f"{zlib.crc32(data):08x}")
        path = self.directory / name
        try:
            write_file(path, data, sync=self.sync)
        except OSError as error:
            raise storage_error(error, path, "be written", needed=len(data)) from error
        self._made.append(name)
        return name

    def read(self, name: str, owner: str) -> bytes:
        """Read and verify a file. Raise FileNotFoundError if it was deleted and CheckpointError if it is damaged."""
        path = self.directory / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, path, "be read") from error
        check_blob(name, data, owner)
        return data

    def expect(self, names: list[str]) -> None:
        """Prepare to read these blobs; files need no preparation."""

    def drop(self, name: str) -> None:
        self._dropped.append(name)

    def mark(self) -> tuple[int, int]:
        """Return a savepoint for `roll_back`."""
        return len(self._made), len(self._dropped)

    def roll_back(self, mark: tuple[int, int] = (0, 0)) -> None:
        """Roll back to ``mark``: delete the files created since then and keep the files dropped since then."""
        made, dropped = mark
        self._remove(self._made[made:])
        del self._made[made:], self._dropped[dropped:]

    def committed(self) -> None:
        self._remove(self._dropped)
        self.forget()

    def forget(self) -> None:
        """Keep all files of a transaction whose outcome is unknown."""
        self._made.clear()
        self._dropped.clear()

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(StorageError):  # unreferenced; the sweep at the next start deletes it
                self._root.remove(self.directory / name)


def blob_name(data: bytes, checksum: str) -> str:
    return f"{secrets.token_hex(16)}-{len(data)}-{checksum}"


def check_blob(name: str, data: bytes, owner: str) -> None:
    """Raise ``CheckpointError`` if the length or checksum of a blob is not the one in its name."""
    _, size, checksum = name.split("-")
    is_sha256 = len(checksum) == 64
    found = hashlib.sha256(data).hexdigest() if is_sha256 else f"{zlib.crc32(data):08x}"
    if len(data) != int(size) or found != checksum:
        raise CheckpointError(
            f"the stored bytes of {owner!r} are damaged: 'blobs/{name}' has {len(data)} of {size} bytes"
            " or another checksum"
        )


def put(c: Connection, owner: str, part: Part, data: bytes) -> None:
    """Store the bytes of a part that has none yet."""
    small = len(data) <= INLINE_BYTES
    values = {"owner": owner, "part": part, "data": data if small else None}
    _PUT.run(c, {**values, "file": None if small else _files(c).write(data)})


def get(c: Connection, owner: str, part: Part) -> bytes | None:
    """Return the bytes, or None if they were dropped. Raise CheckpointError if they are damaged or lost.

    CheckpointError is permanent: a retry cannot succeed.
    """
    for is_last in (False, True):
        row = c.execute(_GET, {"owner_id": owner, "of": part}).one_or_none()
        if row is None or row.file is None:
            return None if row is None else row.data
        try:
            return _files(c).read(row.file, owner)
        except FileNotFoundError as error:
            # The writer may have deleted the file since the row was read; then the row is gone too.
            if is_last:
                raise CheckpointError(
                    f"the stored bytes of {owner!r} are lost: 'blobs/{row.file}' is missing"
                ) from error
    return None


def expect(c: Connection, owners: Iterable[str], part: Part) -> None:
    """Announce that these parts are read next, so that those in an object store are fetched together."""
    files = _files(c)
    if isinstance(files, BlobFiles):
        return
    chosen = select(blobs.c.file).where(
        blobs.c.owner.in_(list(owners)), blobs.c.part == part, blobs.c.file.is_not(None)
    )
    files.expect([name for name in c.execute(chosen).scalars() if name is not None])


def drop(c: Connection, owners: Iterable[str], *parts: Part) -> int:
    """Delete these parts of the owners, or all parts if none is named. Return how many were deleted."""
    ids = list(owners)
    if not ids:
        return 0
    chosen = delete(blobs).where(blobs.c.owner.in_(ids))
    if parts:
        chosen = chosen.where(blobs.c.part.in_(parts))
    names = c.execute(chosen.returning(blobs.c.file)).scalars().all()
    for name in names:
        if name is not None:
            _files(c).drop(name)
    return len(names)


def _files(c: Connection) -> LargeBlobs:
    files: LargeBlobs = c.get_execution_options()["blob_files"]
    return files
