"""Reads and verifies ``lorimer.json``, the manifest of a directory that an engine wrote.

The engine writes and loads these directories. The manifest has the size and SHA-256 of every other file, and a checksum
of itself; a directory is complete when it has one.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lorimer.errors import CheckpointError
from lorimer.store.weights import WeightsFile

MANIFEST = "lorimer.json"


class _Manifest(msgspec.Struct):
    files: dict[str, WeightsFile]


def read_files(directory: Path) -> dict[str, WeightsFile]:
    """Return the recorded size and SHA-256 of every file. Raise ``CheckpointError`` if there is no manifest."""
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=_Manifest).files
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError("what was saved has vanished from the data directory") from error


def decode_files(data: bytes) -> dict[str, WeightsFile] | None:
    """Return the files of a manifest, or None if it is damaged."""
    try:
        manifest = msgspec.json.decode(data, type=dict[str, Any])
        unsigned = msgspec.json.encode(manifest | {"checksum": ""})
        if manifest.get("checksum") != hashlib.sha256(unsigned).hexdigest():
            return None
        return msgspec.convert(manifest, _Manifest).files
    except (UnicodeDecodeError, msgspec.MsgspecError):
        return None


def is_whole(directory: Path) -> bool:
    """Return whether every byte is as written. Reads everything, so call it on a thread."""
    try:
        files = decode_files((directory / MANIFEST).read_bytes())
        return files is not None and all(_describe(directory / name) == found for name, found in files.items())
    except OSError:
        return False


def verify(directory: Path, files: Mapping[str, WeightsFile]) -> None:
    """Verify the files against their recorded checksums. Raise ``CheckpointError`` that names a damaged file.

    Reads them all.
    """
    for name, recorded in files.items():
        try:
            found = _describe(directory / name)
        except OSError as error:
            raise CheckpointError(f"{name!r} of the checkpoint cannot be read: {error.strerror or error}") from error
        if found != recorded:
            raise CheckpointError(
                f"{name!r} of the checkpoint is damaged: it has {found['size']} bytes with SHA-256 {found['sha256']},"
                f" saved were {recorded['size']} with {recorded['sha256']}"
            )


def _describe(path: Path) -> WeightsFile:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
