"""Read the header of a GGUF file and the bytes of its tensors, checking every length against the size of the file.

The reader of the `gguf` package trusts the counts it finds, so a torn or hostile file can make it loop or return short
arrays; this one raises `ModelRefused` at the first byte that is missing. `conversion.py` interprets the values.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from lorimer.errors import ModelRefused

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies in the file."""

    name: str
    encoding: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outermost dimension first, as torch counts them."""
    offset: int
    """First byte, counted from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """The header of a GGUF file: its metadata and the places of its tensors."""

    path: Path
    metadata: Mapping[str, Any]
    """Python values: `str`, `int`, `float`, `bool`, or a list of one of these."""
    tensors: tuple[GGUFTensor, ...]

    def read(self, tensor: GGUFTensor) -> "numpy.ndarray[Any, numpy.dtype[numpy.uint8]]":
        """Return the raw bytes of `tensor`, one row of the array for each row of its last dimension."""
        raw = numpy.fromfile(self.path, dtype=numpy.uint8, count=tensor.num_bytes, offset=tensor.offset)
        if raw.size != tensor.num_bytes:
            raise ModelRefused(f"{str(self.path)!r} is torn: it ends inside tensor {tensor.name!r}")
        return raw.reshape(*tensor.shape[:-1], -1)


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of the file at `path`; raise `ModelRefused` if it is torn or not a GGUF of version 2 or 3."""
    with path.open("rb") as stream:
        cursor = _Cursor(stream, path.name, path.stat().st_size)
        if cursor.take(4, "the magic bytes") != b"GGUF":
            raise ModelRefused(f"{path.name!r} is not a GGUF file: it does not begin with b'GGUF'")
        version = cursor.unpack("I", "the version")
        if version not in (2, 3):
            raise ModelRefused(
                f"{path.name!r} has GGUF version {version!r}; versions 2 and 3, little-endian, can be read"
            )
        num_tensors = cursor.unpack("Q", "the number of tensors")
        num_values = cursor.unpack("Q", "the number of metadata values")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string("a metadata key")
            if key in metadata:
                raise ModelRefused(f"{path.name!r} has metadata {key!r} twice")
            metadata[key] = cursor.value(cursor.unpack("I", f"the type of {key!r}"), key)
        infos = [cursor.tensor_info() for _ in range(num_tensors)]
        tensors = _placed(infos, cursor, _alignment(metadata, path.name))
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def _alignment(metadata: Mapping[str, Any], file_name: str) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelRefused(f"{file_name!r} has general.alignment {alignment!r}; a power of two is needed")
    return alignment


def _placed(infos: list[GGUFTensor], cursor: "_Cursor", alignment: int) -> tuple[GGUFTensor, ...]:
    """Return the tensors with offsets from the start of the file instead of the start of the data."""
    start = -(-cursor.position // alignment) * alignment
    placed: dict[str, GGUFTensor] = {}
    for info in infos:
        if info.name in placed:
            raise ModelRefused(f"{cursor.file_name!r} has tensor {info.name!r} twice")
        end = start + info.offset + info.num_bytes
        if end > cursor.file_bytes:
            raise ModelRefused(
                f"{cursor.file_name!r} is torn: tensor {info.name!r} ends at byte {end}, "
                f"the file at byte {cursor.file_bytes}"
            )
        placed[info.name] = replace(info, offset=start + info.offset)
    return tuple(placed.values())


class _Cursor:
    """Reads forward through the header and never past the end of the file."""

    def __init__(self, stream: BinaryIO, file_name: str, file_bytes: int) -> None:
        self._stream = stream
        self.file_name = file_name
        self.file_bytes = file_bytes
        self.position = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        self._require(num_bytes, what)
        self.position += num_bytes
        return self._stream.read(num_bytes)

    def unpack(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, what: str) -> str:
        encoded = self.take(self.unpack("Q", what), what)
        try:
            return encoded.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelRefused(f"{self.file_name!r} is damaged: {what} is not UTF-8 ({error})") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind], what)
        if kind != _ARRAY:
            raise ModelRefused(f"{self.file_name!r} has a metadata value {what!r} of unknown type {kind!r}")
        item_kind, length = self.unpack("I", what), self.unpack("Q", what)
        if item_kind == _STRING:
            return [self.string(what) for _ in range(length)]
        if item_kind not in _SCALARS:
            raise ModelRefused(f"{self.file_name!r} has an array {what!r} of unknown type {item_kind!r}")
        code = _SCALARS[item_kind]
        packed = self.take(length * struct.calcsize("<" + code), what)
        return list(struct.unpack(f"<{length}{code}", packed))

    def tensor_info(self) -> GGUFTensor:
        name = self.string("a tensor name")
        num_dimensions = self.unpack("I", f"the shape of tensor {name!r}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ModelRefused(
                f"{self.file_name!r} has tensor {name!r} with {num_dimensions} dimensions; 1 to 4 are possible"
            )
        shape = tuple(reversed([self.unpack("Q", f"the shape of tensor {name!r}") for _ in range(num_dimensions)]))
        kind = self.unpack("I", f"the encoding of tensor {name!r}")
        try:
            encoding = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelRefused(f"{self.file_name!r} has tensor {name!r} in unknown encoding {kind!r}") from None
        block, block_bytes = GGML_QUANT_SIZES[encoding]
        if 0 in shape or shape[-1] % block:
            raise ModelRefused(
                f"{self.file_name!r} has tensor {name!r} of shape {shape}; {encoding.name} needs rows of n * {block}"
            )
        offset = self.unpack("Q", f"the offset of tensor {name!r}")
        num_bytes = math.prod(shape) // block * block_bytes
        return GGUFTensor(name=name, encoding=encoding, shape=shape, offset=offset, num_bytes=num_bytes)

    def _require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.file_bytes - self.position:
            raise ModelRefused(
                f"{self.file_name!r} is torn: {what} needs {num_bytes} bytes at byte {self.position}, "
                f"the file has {self.file_bytes}"
            )
