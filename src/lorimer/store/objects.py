"""Objects: immutable bytes and directories under random names, in the data directory or in an object store.

    blobs/<name>              one payload or result
    weights/<name>/<file>     saved weights; the manifest `lorimer.json` is written last
    snapshots/<name>/<file>   a snapshot of a run
    tokenizers/...            tokenizer files of base models
    archives/<name>/<file>    tar archives of weights for downloads; no row names them, and they are deleted after a day

An object is complete before a row names it, and its row is deleted before it is. So an object that no row names is an
orphan, whoever left it. `object_store.py` has the objects of S3; `scratch.py` the local copies that engines read.
"""

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from lorimer.errors import CheckpointError, InvalidInput, NameTaken, StorageError
from lorimer.store.directory import DataDirectory, storage_error
from lorimer.store.manifests import is_whole, read_files, verify
from lorimer.store.weights import WeightsFile

SCHEMES = ("s3://", "file://")
DIRECTORIES = ("weights", "snapshots")
"""The first parts of names of directories; other names are of one object."""


class Objects(Protocol):
    """Where blobs, saved weights and snapshots are stored.

    Methods raise ``StorageError`` if the store cannot be used now, and ``CheckpointError`` if an object is missing or
    damaged, which no retry repairs.
    """

    is_local: bool
    """Whether the data directory is the store: engines write and read its directories in place."""

    async def put(self, name: str, data: bytes, *, replace: bool = False) -> None:
        """Create an object. Raise ``NameTaken`` if the name exists, unless ``replace``."""

    async def put_file(self, name: str, path: Path) -> None:
        """Create an object of any size, under a random name that nobody else creates, from a file."""

    async def get(self, name: str) -> bytes:
        """Return the bytes of an object. The caller verifies them."""

    async def upload(self, name: str, directory: Path) -> dict[str, WeightsFile]:
        """Store a directory, its manifest last, and return its files. Does nothing if it is stored already."""

    async def fetch(self, name: str, into: Path) -> None:
        """Copy a directory to the new path ``into``, atomically, and verify the size and SHA-256 of every file."""

    async def has_all(self, name: str) -> bool:
        """Return whether a directory has its manifest, intact, and all files in the recorded sizes."""

    async def delete(self, names: Iterable[str]) -> None:
        """Delete objects and directories that no row names. Missing ones are no error."""

    def names(self, prefix: str, older_than: timedelta) -> AsyncIterator[str]:
        """Yield the names of objects and directories below a prefix such as ``weights/``, by their newest file."""

    async def sign(self, name: str, seconds: float) -> str | None:
        """Return a URL that anybody can download the object from; None if the store has no such URLs."""


async def open_objects(url: str | None, directory: DataDirectory) -> Objects:
    """Open the objects at ``url``, or those of the data directory. Raise ``StorageError`` if they cannot be used."""
    if not url:
        return DirectoryObjects(directory)
    try:
        from lorimer.store.object_store import open_stored_objects
    except ImportError as error:
        raise InvalidInput(f"objects is {url!r}, which needs obstore: pip install 'lorimer[s3]'") from error
    return await open_stored_objects(url)


class DirectoryObjects:
    """Objects in a data directory, with the layout that `directory.py` describes."""

    is_local = True

    def __init__(self, root: DataDirectory) -> None:
        self._root = root

    async def put(self, name: str, data: bytes, *, replace: bool = False) -> None:
        await asyncio.to_thread(self._put, self._root.path / name, data, replace)

    async def put_file(self, name: str, path: Path) -> None:
        await self.put(name, await asyncio.to_thread(path.read_bytes))

    def _put(self, path: Path, data: bytes, replace: bool) -> None:
        temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # unlike a rename, fails if the name exists
        except FileExistsError as error:
            raise NameTaken(f"the object {path.name!r} exists already") from error
        except OSError as error:
            raise storage_error(error, path, "be written", needed=len(data)) from error
        finally:
            temporary.unlink(missing_ok=True)

    async def get(self, name: str) -> bytes:
        try:
            return await asyncio.to_thread((self._root.path / name).read_bytes)
        except FileNotFoundError as error:
            raise CheckpointError(f"the object {name!r} is missing") from error
        except OSError as error:
            raise storage_error(error, self._root.path / name, "be read") from error

    async def upload(self, name: str, directory: Path) -> dict[str, WeightsFile]:
        files = await asyncio.to_thread(read_files, directory)
        target = self._root.path / name
        if directory != target and not target.exists():
            await asyncio.to_thread(_copy, directory, target)
        return files

    async def fetch(self, name: str, into: Path) -> None:
        source = self._root.path / name
        if not source.is_dir():
            raise CheckpointError(f"the object {name!r} is missing")
        await asyncio.to_thread(lambda: verify(source, read_files(source)))
        if source != into:
            await asyncio.to_thread(_copy, source, into)

    async def has_all(self, name: str) -> bool:
        return await asyncio.to_thread(is_whole, self._root.path / name)

    async def delete(self, names: Iterable[str]) -> None:
        for name in list(names):
            await asyncio.to_thread(self._root.remove, name)

    async def names(self, prefix: str, older_than: timedelta) -> AsyncIterator[str]:
        before = time.time() - older_than.total_seconds()
        for path in await asyncio.to_thread(lambda: sorted((self._root.path / prefix).glob("*"))):
            try:
                files = path.rglob("*") if path.is_dir() else [path]
                newest = max((file.stat().st_mtime for file in files), default=0.0)
            except OSError:
                continue  # deleted meanwhile
            if newest <= before:
                yield f"{prefix}{path.name}"

    async def sign(self, name: str, seconds: float) -> str | None:
        return None


def _copy(source: Path, target: Path) -> None:
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copytree(source, temporary)
        os.rename(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise storage_error(error, target, "be written") from error


def check_url(url: str) -> None:
    """Raise ``ValueError`` if ``url`` is not one that `open_objects` accepts."""
    bucket = url.partition("://")[2].partition("/")[0]
    if url and (not url.startswith(SCHEMES) or (url.startswith("s3://") and not bucket)):
        raise ValueError(f"objects is {url!r}; 's3://BUCKET/PREFIX' or 'file:///DIRECTORY' is accepted")


def refuse_unconditional(url: str, num_winners: int, num_creators: int) -> StorageError:
    return StorageError(
        f"the object store {url!r} ignores conditional puts: {num_winners} of {num_creators} creators of one name"
        " succeeded; use a store that honours If-None-Match"
    )
