"""Decompresses request bodies. The output is counted as it is produced; declared sizes are not trusted."""

import io
import zlib
from collections.abc import Callable

import zstandard

from lorimer.errors import InvalidInput, TooLarge, Unsupported

ENCODINGS = ("zstd", "gzip", "deflate", "identity")
MAX_WINDOW_BYTES = 2**23
"""The maximum memory a zstd frame may need; all levels up to 19 stay within it."""
MAX_GZIP_MEMBERS = 1000

_READ_BYTES = 2**20
_FEED_BYTES = 2**16
_END_TEXT = b"\0end of body\0"
_END = zstandard.ZstdCompressor(write_checksum=True).compress(_END_TEXT)
"""Appended to a zstd body, because libzstd does not report a truncated one.

If the body is complete, the text is the last output. If it is truncated, this frame is consumed as its data and fails
the checksum.
"""


Grow = Callable[[int], None]
"""Called with the number of additional bytes, piece by piece. An exception aborts the decompression."""


def _unnoticed(num_bytes: int) -> None:
    pass


def decompress(body: bytes, encoding: str, max_bytes: int, grow: Grow = _unnoticed) -> bytes:
    """Decompress a body by its ``Content-Encoding``. Raise ``TooLarge`` as soon as it exceeds ``max_bytes``."""
    match encoding.strip().lower():
        case "" | "identity":
            if len(body) > max_bytes:
                raise too_large(max_bytes)
            return body
        case "zstd":
            return _decompress_zstd(body, max_bytes, grow)
        case "gzip" | "x-gzip":
            return _inflate(body, max_bytes, zlib.MAX_WBITS | 16, "gzip", grow)
        case "deflate":
            return _inflate(body, max_bytes, zlib.MAX_WBITS, "deflate", grow)
    raise Unsupported(f"Content-Encoding {encoding[:100]!r} is not one of {', '.join(ENCODINGS)}")


def compress_zstd(body: bytes, level: int = 1) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(body)


def _decompress_zstd(body: bytes, max_bytes: int, grow: Grow) -> bytes:
    try:
        declared = zstandard.get_frame_parameters(body).content_size
        if declared not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) and declared > max_bytes:
            raise too_large(max_bytes)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        parts, size = [], 0
        with decompressor.stream_reader(io.BytesIO(body + _END), read_across_frames=True) as reader:
            while part := reader.read(_READ_BYTES):
                parts.append(part)
                size += len(part)
                if size > max_bytes + len(_END_TEXT):
                    raise too_large(max_bytes)
                grow(len(part))
    except zstandard.ZstdError as error:
        if "too much memory" in str(error):
            raise TooLarge(f"the zstd frame needs a window of more than {MAX_WINDOW_BYTES} bytes") from None
        raise InvalidInput("the body is not a complete zstd frame") from None
    text = b"".join(parts)
    if not text.endswith(_END_TEXT):
        raise InvalidInput("the body is not a complete zstd frame")
    return text[: -len(_END_TEXT)]


def _inflate(body: bytes, max_bytes: int, window_bits: int, name: str, grow: Grow) -> bytes:
    parts, size, members, position = [], 0, 0, 0
    view = memoryview(body)
    while position < len(view) or members == 0:
        members += 1
        if members > (MAX_GZIP_MEMBERS if name == "gzip" else 1):
            raise InvalidInput(f"the {name} body has more parts than are accepted")
        inflater = zlib.decompressobj(window_bits)
        while not inflater.eof:
            feed = inflater.unconsumed_tail or view[position : position + _FEED_BYTES]
            if not feed:
                raise InvalidInput(f"the {name} body ends too early")
            if not inflater.unconsumed_tail:
                position += len(feed)
            try:
                part = inflater.decompress(feed, min(max_bytes - size + 1, _READ_BYTES))
            except zlib.error:
                raise InvalidInput(f"the body is not {name}") from None
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise too_large(max_bytes)
            grow(len(part))
        position -= len(inflater.unused_data)
    return b"".join(parts)


def too_large(max_bytes: int) -> TooLarge:
    """Return the error for a body above the limit."""
    return TooLarge(f"the body is larger than {max_bytes} bytes when decompressed")
