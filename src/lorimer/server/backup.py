"""``lorimer backup``: copies one consistent snapshot of a data directory and its database while the server runs.

    DEST/manifest.json   what the backup holds: size and SHA-256 of every file, rows of every table
    DEST/lorimer.db      the database, always as a SQLite file
    DEST/secret          signs tokens and download links
    DEST/weights, snapshots, blobs   the files that rows of the database name, also those of an object store

First file deletion is deferred: by the running server while the connection to its socket is open, else by the lock of
the directory. Then the rows are copied in one transaction, then the files that these rows name, which never change once
they are named. Everything is written beside DEST and renamed when it is complete and synced.
"""

import asyncio
import hashlib
import os
import secrets
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import msgspec
from sqlalchemy import URL

from lorimer import __version__
from lorimer.errors import CheckpointError, DiskFull, InvalidInput, StorageError
from lorimer.server.control import HoldFiles, held_server
from lorimer.server.settings import Settings
from lorimer.store.connections import database_url
from lorimer.store.directory import DataDirectory, free_bytes, storage_error, sync_directory, write_file
from lorimer.store.manifests import is_whole
from lorimer.store.objects import DIRECTORIES, open_objects
from lorimer.store.tables import SCHEMA_VERSION
from lorimer.store.transfer import copy_database

FORMAT = 1
MANIFEST, DATABASE, SECRET = "manifest.json", "lorimer.db", "secret"
PLACES = ("weights", "snapshots", "blobs")
BLOCK_BYTES = 4 * 1024 * 1024

Report = Callable[[str, float | None], None]


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int
    lorimer: str
    """The Lorimer version that made the backup."""
    schema: str
    created_at: datetime
    """A time just before the snapshot that the backup holds."""
    source: str
    """The kind of database it was made from."""
    rows: dict[str, int]
    files: dict[str, File]
    """Keyed by path relative to the backup."""
    faults: list[str] = []
    """Files that were already damaged or missing in the data directory, each with what is wrong."""
    checksum: str = ""
    """SHA-256 of this manifest with an empty checksum."""

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, checksum=""))).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


def back_up(settings: Settings, destination: Path, report: Report) -> Manifest:
    """Write a backup into the new directory ``destination``. Leave nothing behind on failure."""
    destination = destination.expanduser().absolute()
    data = settings.data.expanduser().absolute()
    if not data.is_dir():
        raise InvalidInput(f"there is no data directory {str(data)!r}; name one with --data")
    if destination.is_relative_to(data):
        raise InvalidInput(f"{str(destination)!r} is inside the data directory; name a place outside of it")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise InvalidInput(f"{str(destination)!r} exists and is not an empty directory; name a new one")
    temporary = destination.with_name(f"{destination.name}.tmp-{secrets.token_hex(4)}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(mode=0o700)
        with held(settings, data) as source:
            manifest = _write(data, source, temporary, report)
        os.rename(temporary, destination)
        sync_directory(destination.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise storage_error(error, Path(error.filename or destination), "be written") from error
        raise
    return manifest


@dataclass(frozen=True)
class Source:
    """What a backup is made of, besides the data directory."""

    url: URL
    """Of the database."""
    objects: str
    """The URL of the object store; empty if objects are in the data directory."""
    is_held: Callable[[], bool]
    """Returns whether deletion is still deferred."""


@contextmanager
def held(settings: Settings, data: Path) -> Iterator[Source]:
    """Defer the deletion of files and objects inside the block."""
    with held_server(data, HoldFiles()) as server:
        if server is not None:
            yield Source(database_url(server.reply.database or None, data), server.reply.objects, server.is_connected)
            return
    directory = DataDirectory(data)
    directory.lock()
    try:
        yield Source(database_url(settings.database or None, data), settings.objects, lambda: True)
    finally:
        directory.unlock()


def _write(data: Path, source: Source, target: Path, report: Report) -> Manifest:
    created_at, url = datetime.now(UTC), source.url
    if url.drivername == "sqlite" and not Path(str(url.database)).exists():
        raise InvalidInput(f"there is no database {url.database!r}; was the data directory ever served?")
    rows = copy_database(url, target / DATABASE, report)
    files = {DATABASE: described(target / DATABASE)}
    secret = [SECRET] if (data / SECRET).exists() else []
    folders, blobs = named_objects(target / DATABASE)
    if source.objects:
        fetched = asyncio.run(fetch_objects(source.objects, DataDirectory(data), [*folders, *blobs], target, report))
        copier = _Copier(data, target, report)
        copier.copy(secret)
        copier.add(fetched)
    else:
        copier = _Copier(data, target, report)
        copier.copy([*files_in(folders, data), *blobs, *secret])
    if copier.missing and not source.is_held():
        raise StorageError("the server ended while its files were copied, and some are gone; run the backup again")
    manifest = Manifest(
        format=FORMAT,
        lorimer=__version__,
        schema=SCHEMA_VERSION,
        created_at=created_at,
        source=url.get_backend_name(),
        rows=rows,
        files=files | copier.files,
        faults=copier.faults,
    )
    manifest = msgspec.structs.replace(manifest, checksum=manifest.digest())
    for folder in [path for path in target.rglob("*") if path.is_dir()]:
        sync_directory(folder)
    write_file(target / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n", sync=True)
    return manifest


def named_objects(database: Path) -> tuple[list[str], list[str]]:
    """Return the directories and the blobs that database rows refer to, relative to the data directory."""
    with closing(sqlite3.connect(database)) as c:
        folders = [f"weights/{name}" for (name,) in c.execute("SELECT name FROM weights")]
        query = "SELECT snapshot_name FROM runs UNION SELECT newest_name FROM runs"
        folders += [f"snapshots/{name}" for (name,) in c.execute(query) if name is not None]
        blobs = [f"blobs/{name}" for (name,) in c.execute("SELECT file FROM blobs WHERE file IS NOT NULL")]
    return folders, blobs


def files_in(folders: list[str], data: Path) -> list[str]:
    """Return the files of these folders; a folder without any stands for itself."""
    found = []
    for folder in folders:
        inside = sorted(path for path in (data / folder).rglob("*") if path.is_file())
        found += [str(path.relative_to(data)) for path in inside] or [folder]
    return found


async def fetch_objects(
    url: str, directory: DataDirectory, names: list[str], target: Path, report: Report
) -> list[str]:
    """Copy objects of an object store into ``target``, verified. Return what is wrong with those that are damaged."""
    objects = await open_objects(url, directory)
    faults = []
    for number, name in enumerate(names):
        report(f"{number} of {len(names)} objects", number / max(len(names), 1))
        make_private_folder((target / name).parent)
        try:
            if name.startswith(DIRECTORIES):
                await objects.fetch(name, target / name)
            else:
                write_file(target / name, await objects.get(name), sync=True)
        except CheckpointError as error:
            faults.append(str(error))
    return faults


class _Copier:
    """Copies files of the data directory and records those that are missing or damaged."""

    def __init__(self, data: Path, target: Path, report: Report) -> None:
        self._data, self._target, self._report = data, target, report
        self.files: dict[str, File] = {}
        self.faults: list[str] = []
        self.missing = 0

    def copy(self, names: list[str]) -> None:
        sizes = {name: self._size(name) for name in names}
        total, done, free = sum(sizes.values()), 0, free_bytes(self._target)
        if total > free:
            raise DiskFull(
                f"the disk is full: {total} bytes are needed and {free} bytes are free in {str(self._target.parent)!r}"
            )
        for name, size in sizes.items():
            self._report(f"{len(self.files)} of {len(names)} files", done / max(total, 1))
            self._copy_one(name)
            done += size
        for place in ("weights", "snapshots"):
            for folder in sorted({name.split("/")[1] for name in self.files if name.startswith(f"{place}/")}):
                if not is_whole(self._target / place / folder):
                    self.faults.append(f"{place}/{folder} is damaged: it is not what its lorimer.json says")

    def add(self, faults: list[str]) -> None:
        """Describe what was fetched from an object store."""
        for path in sorted(path for place in PLACES for path in (self._target / place).rglob("*") if path.is_file()):
            name = str(path.relative_to(self._target))
            self.files[name] = described(path)
            self._check_blob(name, self.files[name].size)
        self.faults += faults

    def _size(self, name: str) -> int:
        try:
            return (self._data / name).stat().st_size
        except OSError:
            return 0

    def _copy_one(self, name: str) -> None:
        target = self._target / name
        make_private_folder(target.parent)
        try:
            with (self._data / name).open("rb") as source:
                self.files[name] = found = copy_stream(source, target)
        except (FileNotFoundError, IsADirectoryError):
            self.missing += 1
            self.faults.append(f"{name} is missing")
            return
        self._check_blob(name, found.size)

    def _check_blob(self, name: str, size: int) -> None:
        if name.startswith("blobs/") and not is_whole_blob(self._target / name, size):
            self.faults.append(f"{name} is damaged: it has another length or checksum than its name says")


def copy_stream(source: BinaryIO, target: Path) -> File:
    """Copy the rest of ``source`` into the new file ``target``, sync it, and return its size and checksum."""
    digest, size = hashlib.sha256(), 0
    with open(target, "xb", buffering=0, opener=_private) as file:
        while block := source.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
            view = memoryview(block)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return File(size, digest.hexdigest())


def make_private_folder(path: Path) -> None:
    """Create a directory and its missing parents, accessible only to the owner."""
    if not path.is_dir():
        make_private_folder(path.parent)
        path.mkdir(mode=0o700)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def described(path: Path) -> File:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return File(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def is_whole_blob(path: Path, size: int) -> bool:
    """Return whether a blob matches the size and checksum in its name; see `store/blobs.py`."""
    _, expected, checksum = path.name.split("-")
    crc, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            digest.update(block)
    return size == int(expected) and checksum in (f"{crc:08x}", digest.hexdigest())


def read_manifest(source: Path) -> Manifest:
    """Read and validate the manifest of a backup. Raise ``CheckpointError`` if it is damaged."""
    path = source / MANIFEST
    if not path.exists():
        raise InvalidInput(f"{str(source)!r} is not a backup: it has no {MANIFEST}")
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format", msgspec.Raw(b"null"))
        if bytes(version) != str(FORMAT).encode():
            raise CheckpointError(f"{str(path)!r} has format {bytes(version)!r}, this Lorimer reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {error}") from error
    if manifest.digest() != manifest.checksum:
        raise CheckpointError(f"{str(path)!r} is damaged: its checksum does not match its content")
    return manifest
