"""Bytes that belong to a row: up to 256 KiB in the database, larger ones in files below `blobs/`. Callers see bytes.

A file is complete before the transaction that names it commits, and goes after the one that drops its name has
committed; what a rolled back or killed transaction left is removed immediately or at the next start. The name of a file
carries its length and CRC-32, so the row tells a torn file from a good one.
"""

import secrets
import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

from sqlalchemy import Connection, bindparam, delete, insert, select

from lorimer.errors import CheckpointError, StorageError
from lorimer.store.directory import DataDirectory, storage_error, write_file
from lorimer.store.tables import blobs

INLINE_BYTES = 256 * 1024
Part = Literal["payload", "result"]

_PUT = insert(blobs)
_GET = select(blobs.c.data, blobs.c.file).where(blobs.c.owner == bindparam("owner_id"), blobs.c.part == bindparam("of"))


class BlobFiles:
    """The files of one writer: which the open transaction has made, and which it no longer needs."""

    def __init__(self, root: DataDirectory, *, sync: bool = False) -> None:
        self.directory = root.blobs
        self.sync = sync
        self._root = root
        self._made: list[str] = []
        self._dropped: list[str] = []

    def write(self, data: bytes) -> str:
        name = f"{secrets.token_hex(16)}-{len(data)}-{zlib.crc32(data):08x}"
        path = self.directory / name
        try:
            write_file(path, data, sync=self.sync)
        except OSError as error:
            raise storage_error(error, path, "be written", needed=len(data)) from error
        self._made.append(name)
        return name

    def read(self, name: str, owner: str) -> bytes:
        """The file's bytes; FileNotFoundError if it has gone, CheckpointError if it is not what was written."""
        path = self.directory / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, path, "be read") from error
        _, size, checksum = name.split("-")
        if len(data) != int(size) or zlib.crc32(data) != int(checksum, 16):
            raise CheckpointError(
                f"the stored bytes of {owner!r} are damaged: 'blobs/{name}' has {len(data)} of {size} bytes"
                " or another checksum"
            )
        return data

    def drop(self, name: str) -> None:
        self._dropped.append(name)

    def mark(self) -> tuple[int, int]:
        """A point of the transaction to which `back_to` returns."""
        return len(self._made), len(self._dropped)

    def back_to(self, mark: tuple[int, int] = (0, 0)) -> None:
        """The transaction was rolled back to ``mark``: what it made since goes, what it dropped stays."""
        made, dropped = mark
        self._remove(self._made[made:])
        del self._made[made:], self._dropped[dropped:]

    def committed(self) -> None:
        self._remove(self._dropped)
        self.forget()

    def forget(self) -> None:
        """Whether the transaction was committed is unknown: leave all its files where they are."""
        self._made.clear()
        self._dropped.clear()

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(StorageError):  # a file nobody names any more; the sweep at the next start removes it
                self._root.remove(self.directory / name)


def put(c: Connection, owner: str, part: Part, data: bytes) -> None:
    """Keep the bytes of a part that has none yet."""
    small = len(data) <= INLINE_BYTES
    values = {"owner": owner, "part": part, "data": data if small else None}
    c.execute(_PUT, {**values, "file": None if small else _files(c).write(data)})


def get(c: Connection, owner: str, part: Part) -> bytes | None:
    """The bytes, or None if they were dropped; CheckpointError, which no retry helps, if they are damaged or lost."""
    for is_last in (False, True):
        row = c.execute(_GET, {"owner_id": owner, "of": part}).one_or_none()
        if row is None or row.file is None:
            return None if row is None else row.data
        try:
            return _files(c).read(row.file, owner)
        except FileNotFoundError as error:
            # The writer may have dropped it since the row was read; then the row has gone too.
            if is_last:
                raise CheckpointError(
                    f"the stored bytes of {owner!r} are lost: 'blobs/{row.file}' is missing"
                ) from error
    return None


def drop(c: Connection, owners: Iterable[str], *parts: Part) -> int:
    """Drop these parts of the owners, or all of them if none is named, and return how many there were."""
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


def _files(c: Connection) -> BlobFiles:
    files: BlobFiles = c.get_execution_options()["blob_files"]
    return files
