"""What an engine says of a directory it wrote, in ``lorimer.json``, and whether that is still so.

The engine writes and reads these directories; here they are only looked at, from the outside.
"""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

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


def _describe(path: Path) -> WeightsFile:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
