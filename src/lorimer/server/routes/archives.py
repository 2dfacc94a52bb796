"""Builds tar archives while they are sent: regular top-level files of known sizes."""

import asyncio
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MARKER = "checkpoint_complete"
"""An empty file by which the SDK recognizes a complete archive."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """A piece of an archive: given bytes, or an open file padded to whole blocks."""

    content: bytes | BinaryIO
    size: int


def archive_parts(directory: Path, names: list[str]) -> list[Part]:
    """Return the parts of an archive of these files and the marker.

    The files are opened immediately, so deleting them does not interrupt the download.
    """
    parts: list[Part] = []
    for name in names:
        file = (directory / name).open("rb")
        size = file.seek(0, 2)
        file.seek(0)
        parts += [_header(name, size), Part(file, _whole_blocks(size))]
    end = bytes(2 * tarfile.BLOCKSIZE)
    return [*parts, _header(MARKER, 0), Part(end, len(end))]


async def parts_bytes(parts: list[Part]) -> AsyncIterator[bytes]:
    """Yield the bytes of the parts, then close their files."""
    try:
        for part in parts:
            if isinstance(part.content, bytes):
                yield part.content
                continue
            sent = 0
            while chunk := await asyncio.to_thread(part.content.read, CHUNK_BYTES):
                sent += len(chunk)
                yield chunk
            if part.size > sent:
                yield bytes(part.size - sent)
    finally:
        for part in parts:
            if not isinstance(part.content, bytes):
                part.content.close()


def _header(name: str, size: int) -> Part:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    content = info.tobuf(tarfile.USTAR_FORMAT if size < 8 << 30 else tarfile.GNU_FORMAT)
    return Part(content, len(content))


def _whole_blocks(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
