"""``lorimer restore``: restores a data directory and its database from a backup.

Verifies every byte while copying it into ``restoring/`` below the data directory, before anything else changes. Then
moves the parts into place and removes ``restoring/``. A server refuses to start while ``restoring/`` exists, so a
restore that was killed must be repeated. ``replace`` moves existing files to ``replaced-<time>/`` and keeps them. With
an object store, everything that rows name is uploaded to it before the database is in place; nothing there is replaced.
"""

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import URL

from lorimer.errors import CheckpointError, DiskFull, InvalidInput, NameTaken
from lorimer.server.backup import (
    DATABASE,
    PLACES,
    SECRET,
    File,
    Manifest,
    copy_stream,
    make_private_folder,
    read_manifest,
)
from lorimer.server.settings import Settings
from lorimer.store.connections import database_url
from lorimer.store.directory import RESTORING, DataDirectory, free_bytes, storage_error, sync_directory
from lorimer.store.objects import DIRECTORIES, open_objects
from lorimer.store.transfer import has_rows, import_database, migrate_file

REPLACED = "replaced-"

Report = Callable[[str, float | None], None]


def restore(settings: Settings, source: Path, report: Report, *, replace: bool) -> tuple[Manifest, Path | None]:
    """Restore the backup ``source`` into the data directory and database of ``settings``.

    Return its manifest, and where the files that it replaced were moved.
    """
    source = source.expanduser().absolute()
    manifest = read_manifest(source)
    for name in manifest.files:
        _check_name(name)
    directory = DataDirectory(settings.data)
    url = database_url(settings.database or None, directory.path)
    try:
        directory.lock(is_restore=True)
        return manifest, _restore(directory, url, source, manifest, report, replace, settings.objects)
    except OSError as error:
        raise storage_error(error, Path(error.filename or directory.path), "be written") from error
    finally:
        directory.unlock()


def _check_name(name: str) -> None:
    parts = name.split("/")
    is_plain = all(part not in ("", ".", "..") and "\0" not in part for part in parts)
    if not is_plain or not (name in (DATABASE, SECRET) or (parts[0] in PLACES and len(parts) > 1)):
        raise CheckpointError(f"the manifest names {name!r}, which no backup has")


def _restore(
    directory: DataDirectory, url: URL, source: Path, manifest: Manifest, report: Report, replace: bool, objects: str
) -> Path | None:
    staging = directory.path / RESTORING
    is_repeated = staging.exists()  # an earlier restore was interrupted
    if not (replace or is_repeated):
        _require_empty(directory.path, url)
    shutil.rmtree(staging, ignore_errors=True)
    _stage(source, manifest, staging.with_name(f"{RESTORING}.new"), report)
    os.rename(staging.with_name(f"{RESTORING}.new"), staging)
    sync_directory(directory.path)
    migrate_file(staging / DATABASE)
    if objects:
        asyncio.run(_upload(objects, directory, staging, report))
    if url.drivername != "sqlite":
        import_database(staging / DATABASE, url, report, replace=replace)
        (staging / DATABASE).unlink()
    aside = _move_aside(directory.path, url)
    _move_in(directory.path, staging, url)
    shutil.rmtree(staging)
    sync_directory(directory.path)
    return aside


async def _upload(url: str, directory: DataDirectory, staging: Path, report: Report) -> None:
    """Store the restored weights, snapshots and blobs as objects. Objects that exist already have the same content."""
    objects = await open_objects(url, directory)
    found = [path for place in PLACES for path in sorted((staging / place).glob("*"))]
    for number, path in enumerate(found):
        report(f"{number} of {len(found)} objects", number / max(len(found), 1))
        name = str(path.relative_to(staging))
        with suppress(NameTaken, CheckpointError):  # stored already; or torn, as the backup's manifest says
            if name.startswith(DIRECTORIES):
                await objects.upload(name, path)
            else:
                await objects.put(name, path.read_bytes())


def _require_empty(data: Path, url: URL) -> None:
    found = [str(path) for path in _entries(data, url)]
    if found:
        raise InvalidInput(
            f"the data directory {str(data)!r} is not empty (it has {found[0]!r}); restore into a new one with --data,"
            " or move what it has aside with --replace"
        )
    if url.drivername != "sqlite" and has_rows(url):
        raise InvalidInput(f"the database {url.render_as_string()!r} is not empty; --replace replaces its rows")


def _entries(data: Path, url: URL) -> list[Path]:
    """Return the existing files that a restore would replace."""
    names = (SECRET, *PLACES)
    found = [data / name for name in names if (data / name).exists() and not _is_empty_folder(data / name)]
    if url.drivername == "sqlite":
        file = Path(str(url.database))
        beside = (file.with_name(file.name + end) for end in ("", "-wal", "-shm"))
        found += [path for path in beside if path.exists()]
    return found


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _stage(source: Path, manifest: Manifest, staging: Path, report: Report) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    free = free_bytes(staging.parent)
    if manifest.size_bytes > free:
        raise DiskFull(
            f"the disk is full: {manifest.size_bytes} bytes are needed and {free} are free in {str(staging.parent)!r}"
        )
    done = 0
    try:
        for number, (name, expected) in enumerate(manifest.files.items()):
            report(f"{number} of {len(manifest.files)} files", done / max(manifest.size_bytes, 1))
            _stage_one(source / name, staging / name, name, expected)
            done += expected.size
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _stage_one(source: Path, target: Path, name: str, expected: File) -> None:
    make_private_folder(target.parent)
    try:
        file = source.open("rb")
    except OSError as error:
        raise CheckpointError(f"the backup is damaged: {name!r} cannot be read: {error.strerror}") from error
    with file:
        found = copy_stream(file, target)
    if found != expected:
        raise CheckpointError(
            f"the backup is damaged: {name!r} has {found.size} bytes with SHA-256 {found.sha256},"
            f" recorded were {expected.size} with {expected.sha256}"
        )


def _move_aside(data: Path, url: URL) -> Path | None:
    found = _entries(data, url)
    if not found:
        return None
    aside = data / f"{REPLACED}{datetime.now(UTC):%Y%m%dT%H%M%S}"
    aside.mkdir(mode=0o700)
    for path in found:
        shutil.move(path, aside / path.name)
    return aside


def _move_in(data: Path, staging: Path, url: URL) -> None:
    """Move the staged parts into place, the database last: a directory without a database counts as empty."""
    for place in PLACES:
        shutil.rmtree(data / place, ignore_errors=True)
        if (staging / place).exists():
            os.rename(staging / place, data / place)
        else:
            (data / place).mkdir(mode=0o700)
    if (staging / SECRET).exists():
        os.rename(staging / SECRET, data / SECRET)
    if (staging / DATABASE).exists():
        shutil.move(staging / DATABASE, str(url.database))
