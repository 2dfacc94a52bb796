"""Compressed bodies, bombs among them."""

import gzip
import io
import os
import struct
import time
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lorimer.errors import InvalidInput, TooLarge, Unsupported
from lorimer.types.compression import compress_zstd, decompress
from tests.memory import python_peak

LIMIT = 2**20
TEXT = b"tokens " * 1000
NOISE = os.urandom(3 * 2**18)


def zstd_stream(data: bytes) -> bytes:
    """A frame that does not say its size."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


ENCODED = {
    "zstd": ("zstd", compress_zstd),
    "zstd of the official SDK": ("zstd", lambda data: zstandard.ZstdCompressor().compress(data)),
    "zstd of the highest usual level": ("zstd", lambda data: compress_zstd(data, 19)),
    "zstd without its size": ("zstd", zstd_stream),
    "zstd in two frames": ("zstd", lambda data: compress_zstd(data[:100]) + zstd_stream(data[100:])),
    "zstd with checksum": ("ZSTD ", lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data)),
    "gzip": ("gzip", gzip.compress),
    "gzip in two members": ("x-gzip", lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:])),
    "deflate": ("deflate", zlib.compress),
    "identity": ("identity", bytes),
    "nothing": ("", bytes),
}


@pytest.mark.parametrize("data", [b"", b"a", TEXT, NOISE], ids=["empty", "short", "text", "noise"])
@pytest.mark.parametrize(("encoding", "compress"), ENCODED.values(), ids=ENCODED)
def test_body_comes_back(encoding, compress, data):
    assert decompress(compress(data), encoding, LIMIT) == data


@pytest.mark.parametrize(("encoding", "compress"), ENCODED.values(), ids=ENCODED)
def test_limit_is_exact(encoding, compress):
    assert decompress(compress(TEXT), encoding, len(TEXT)) == TEXT
    with pytest.raises(TooLarge, match=f"{len(TEXT) - 1} bytes"):
        decompress(compress(TEXT), encoding, len(TEXT) - 1)


@settings(max_examples=30, deadline=None)
@given(st.binary())
def test_every_body_comes_back(data):
    for encoding, compress in ENCODED.values():
        assert decompress(compress(data), encoding, LIMIT) == data


@pytest.mark.parametrize("cut", [1, 3, 50, -1], ids=str)
@pytest.mark.parametrize("name", [name for name in ENCODED if name not in ("identity", "nothing")])
def test_cut_body_is_refused(name, cut):
    encoding, compress = ENCODED[name]
    body = compress(NOISE)
    with pytest.raises(InvalidInput):
        decompress(body[: len(body) - cut if cut > 0 else cut], encoding, LIMIT)


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "deflate"])
@pytest.mark.parametrize("body", [b"", b"{}", b"\x28\xb5\x2f\xfd", bytes(100), NOISE[:1000]], ids=range(5))
def test_other_bytes_are_refused(encoding, body):
    with pytest.raises(InvalidInput):
        decompress(body, encoding, LIMIT)


@pytest.mark.parametrize("encoding", ["br", "compress", "zstd, gzip", "gzip,gzip", "*", "x" * 10_000], ids=len)
def test_unknown_encoding_is_refused(encoding):
    with pytest.raises(Unsupported, match="zstd, gzip, deflate, identity") as raised:
        decompress(b"", encoding, LIMIT)
    assert len(str(raised.value)) < 300


# ── bombs ─────────────────────────────────────────────────────────────────────────────────────────────


def zeros_in_frame(size: int, declared: int | None, window_log: int = 20) -> bytes:
    """A frame of runs of zeros, written by hand: 4 bytes for each 128 KiB."""
    body = bytearray(struct.pack("<I", 0xFD2FB528))
    body.append(0xC0 if declared is not None else 0)
    body.append((window_log - 10) << 3)
    if declared is not None:
        body += struct.pack("<Q", declared)
    blocks = size // 2**17
    for block in range(blocks):
        header = (2**17 << 3) | (1 << 1) | (block == blocks - 1)
        body += struct.pack("<I", header)[:3] + b"\0"
    return bytes(body)


def gzip_zeros(size: int) -> bytes:
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    block = bytes(2**20)
    parts = [compressor.compress(block) for _ in range(size // len(block))]
    return b"".join(parts) + compressor.flush()


GIB = 2**30
BOMBS = {
    "a gigabyte that says so": ("zstd", lambda: zeros_in_frame(GIB, GIB)),
    "a gigabyte that says nothing": ("zstd", lambda: zeros_in_frame(GIB, None)),
    "a gigabyte that says 1000 bytes": ("zstd", lambda: zeros_in_frame(GIB, 1000)),
    "a gigabyte after a small frame": ("zstd", lambda: compress_zstd(b"a") + zeros_in_frame(GIB, GIB)),
    "many frames": ("zstd", lambda: zeros_in_frame(2**17, 2**17) * 8192),
    "a window of 2 GiB": ("zstd", lambda: zeros_in_frame(2**17, None, window_log=31)),
    "a window of 2 GiB in a later frame": ("zstd", lambda: compress_zstd(b"a") + zeros_in_frame(2**17, None, 31)),
    "a size of 2**64": ("zstd", lambda: zeros_in_frame(2**17, 2**64 - 3)),
    "gzip": ("gzip", lambda: gzip_zeros(2**26)),
    "many gzip members": ("gzip", lambda: gzip.compress(bytes(2**17)) * 4096),
    "deflate": ("deflate", lambda: zlib.compress(bytes(2**26), 1)),
}


@pytest.mark.parametrize(("encoding", "make"), BOMBS.values(), ids=BOMBS)
def test_bomb_is_stopped(encoding, make):
    body = make()
    assert len(body) < 2**20
    started = time.process_time()
    with pytest.raises(InvalidInput) as raised:
        decompress(body, encoding, LIMIT)
    assert time.process_time() - started < 5
    if "1000 bytes" not in str(raised.value):
        assert isinstance(raised.value, TooLarge) or "complete" in str(raised.value)

    def refused() -> None:
        with pytest.raises(InvalidInput):
            decompress(body, encoding, LIMIT)

    assert python_peak(refused) < 8 * LIMIT


def test_frames_of_nothing_end():
    """Bodies that grow by nothing are bounded by their own size."""
    assert decompress(compress_zstd(b"") * 10_000, "zstd", LIMIT) == b""
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"skip"
    assert decompress(compress_zstd(b"a") + skippable * 10_000, "zstd", LIMIT) == b"a"
    with pytest.raises(InvalidInput, match="more parts"):
        decompress(gzip.compress(b"") * 10_000, "gzip", LIMIT)


def test_a_gigabyte_fits_in_32_kilobytes():
    """The bomb is one: without a limit the whole of it comes out."""
    body = zeros_in_frame(2**25, 2**25)
    assert len(body) < 1100
    assert len(zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)).read(2**26)) == 2**25


def test_text_that_looks_like_the_end_is_kept():
    marker = b"\0end of body\0"
    assert decompress(compress_zstd(b"x" + marker), "zstd", LIMIT) == b"x" + marker
