"""Reads and verifies ``lorimer.json``, the manifest of a directory that an engine wrote.

The engine writes and loads these directories; this module verifies them, and adds the row of one that is new.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection

from lorimer.errors import CheckpointError
from lorimer.store import weights
from lorimer.store.runs import Run
from lorimer.store.weights import Weights, WeightsFile

_MANIFEST = "lorimer.json"


class _Manifest(msgspec.Struct):
    files: dict[str, WeightsFile]


def read_files(directory: Path) -> dict[str, WeightsFile]:
    """Return the recorded size and SHA-256 of every file.

    Raise ``OSError`` or ``msgspec.MsgspecError`` if that fails.
    """
    return msgspec.json.decode((directory / _MANIFEST).read_bytes(), type=_Manifest).files


def is_whole(directory: Path) -> bool:
    """Return whether every byte is as written. Reads everything, so call it on a thread."""
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


def add_weights(c: Connection, run: Run, directory: Path, *, has_optimizer: bool) -> Weights:
    """Add the row of weights that an engine wrote into ``directory``."""
    try:
        files = read_files(directory)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError("what was saved has vanished from the data directory") from error
    return weights.add_weights(
        c,
        name=directory.name,
        base_model=run.base_model,
        rank=run.rank,
        train_attn=run.train_attn,
        train_mlp=run.train_mlp,
        train_unembed=run.train_unembed,
        optimizer_type=run.optimizer_type,
        has_optimizer=has_optimizer,
        size_bytes=sum(file["size"] for file in files.values()),
        files=files,
    )
