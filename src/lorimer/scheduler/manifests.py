"""What an engine says of a directory it wrote, in ``lorimer.json``, and whether that is still so.

The engine writes and reads these directories; here they are only looked at, from the outside.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lorimer.errors import CheckpointError
from lorimer.store.weights import WeightsFile

_MANIFEST = "lorimer.json"


class _Manifest(msgspec.Struct):
    files: dict[str, WeightsFile]


def read_files(directory: Path) -> dict[str, WeightsFile]:
    """Size and SHA-256 of every file, as recorded; ``OSError`` or ``msgspec.MsgspecError`` if that cannot be read."""
    return msgspec.json.decode((directory / _MANIFEST).read_bytes(), type=_Manifest).files


def is_whole(directory: Path) -> bool:
    """Whether every byte is as it was written. Reads all of it, so it is called on a thread."""
    try:
        manifest = msgspec.json.decode((directory / _MANIFEST).read_bytes(), type=dict[str, Any])
        unsigned = msgspec.json.encode(manifest | {"checksum": ""})
        if manifest.get("checksum") != hashlib.sha256(unsigned).hexdigest():
            return False
        files = msgspec.convert(manifest, _Manifest).files
        return all(_describe(directory / name) == recorded for name, recorded in files.items())
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return False


def verify(directory: Path, files: Mapping[str, WeightsFile]) -> None:
    """Raise ``CheckpointError``, which names the file, unless all of them are as recorded. Reads all of them."""
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
