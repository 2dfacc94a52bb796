"""Directories that an engine writes: each appears whole or not at all, with a manifest of sizes and checksums.

``lorimer.json``, the manifest, has the size and SHA-256 of every other file and a checksum of itself; what else it says
is up to who writes it.
"""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lorimer.errors import CheckpointError

FORMAT = 1
MANIFEST = "lorimer.json"


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of manifests. They have ``format``, ``files`` and last ``checksum``: SHA-256 of the rest, in its order."""

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, checksum=""))).hexdigest()

    @property
    def is_intact(self) -> bool:
        own: str = getattr(self, "checksum")  # noqa: B009 (a field of every subclass)
        return own == self.digest()


M = TypeVar("M", bound=Manifest)


@contextmanager
def new_directory(directory: str) -> Iterator[Path]:
    """Yield a temporary directory that becomes ``directory``, absent or empty, when the block succeeds."""
    target = Path(directory)
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointError(f"{directory!r} already exists and is not an empty directory")
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        os.rename(temporary, target)
        _sync(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"cannot save to {directory!r}: {error}") from _system_error(error)
        raise


def describe_files(directory: Path) -> dict[str, File]:
    return {path.name: _describe(path) for path in sorted(directory.iterdir())}


def write_manifest(directory: Path, manifest: Manifest) -> int:
    """Write the manifest of a directory whose other files it describes; return the bytes of all of them."""
    signed = msgspec.structs.replace(manifest, checksum=manifest.digest())
    (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(signed)) + b"\n")
    return sum(path.stat().st_size for path in directory.iterdir())


def read_manifest(directory: Path, kind: type[M]) -> M | None:
    """Return the manifest of a directory, or ``None`` if it has none; refuse a damaged one or one of another kind."""
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {str(directory)!r}")
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if version != FORMAT:
            raise CheckpointError(f"{str(path)!r} has format {version!r}, this version of Lorimer reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from error
    if not manifest.is_intact:
        raise CheckpointError(f"{str(path)!r} is damaged: its checksum does not match its content")
    return manifest


def verify(directory: Path, files: Mapping[str, File], *names: str) -> None:
    """Compare files with their description; those that it lacks are damaged too."""
    for name in names:
        path, expected = directory / name, files.get(name)
        try:
            found = _describe(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {error}") from error
        if found != expected:
            raise CheckpointError(f"{str(path)!r} is damaged: it is {found}, recorded was {expected}")


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from error


def _system_error(error: OSError | SafetensorError) -> Exception:
    """Return an error of safetensors, which names the number of a system error in its text only, as an ``OSError``."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), str(error)) if found and isinstance(error, SafetensorError) else error


def _describe(path: Path) -> File:
    with path.open("rb") as file:
        return File(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
