"""Reads one answer of HTTP/1.1 from bytes as they come: its status, its headers and its body."""

MOST_HEAD_BYTES = 64 * 1024
MOST_LINE_BYTES = 1024

NO_BODY = (204, 304)


class AnswerReader:
    """Fed until it is complete. The body ends by its length, by its last chunk or with the connection."""

    def __init__(self, method: str) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.keeps_alive = False
        """Whether the connection may carry another request."""
        self._method = method
        self._buffer = bytearray()
        self._left: int | None = None
        """Bytes of the body, or of the present chunk, that are missing."""
        self._is_chunked = False
        self._is_last_chunk = False

    @property
    def has_begun(self) -> bool:
        return bool(self.status or self._buffer)

    def feed(self, data: bytes) -> bool:
        """Whether the answer is complete; ``ValueError`` if it is none."""
        self._buffer += data
        if not self.status and not self._read_head():
            return False
        if self._is_chunked:
            is_complete = self._read_chunks()
        else:
            self._take(len(self._buffer) if self._left is None else self._left)
            is_complete = self._left == 0
        if is_complete and self._buffer:
            self.keeps_alive = False  # more than was asked for
        return is_complete

    def end(self) -> bool:
        """Whether the answer is complete now that the connection has ended."""
        return bool(self.status) and not self._is_chunked and not self._left

    # ── the head ──────────────────────────────────────────────────────────────────────────────────────

    def _read_head(self) -> bool:
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            first, *lines = bytes(self._buffer[:end]).split(b"\r\n")
            del self._buffer[: end + 4]
            version, _, rest = first.partition(b" ")
            if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit():
                raise ValueError(f"it begins with {first[:60]!r}")
            status = int(rest[:3])
            if status >= 200:  # others announce it
                self.status, self.headers = status, [_header(line) for line in lines]
                self._plan_body(version)
                return True
        if len(self._buffer) > MOST_HEAD_BYTES:
            raise ValueError(f"its headers are longer than {MOST_HEAD_BYTES} bytes")
        return False

    def _plan_body(self, version: bytes) -> None:
        found: dict[bytes, bytes] = {}
        for name, value in self.headers:
            key = name.lower()
            found[key] = found[key] + b"," + value if key in found else value
        self._is_chunked = found.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        lengths = {part.strip() for part in found.get(b"content-length", b"").split(b",") if part.strip()}
        if self._method == "HEAD" or self.status in NO_BODY:
            self._is_chunked, self._left = False, 0
        elif not self._is_chunked and lengths:
            if len(lengths) > 1 or not (length := lengths.pop()).isdigit():
                raise ValueError("its Content-Length is no number")
            self._left = int(length)
        elif self._is_chunked:
            self._left = 0
        connection = found.get(b"connection", b"keep-alive" if version == b"HTTP/1.1" else b"close").lower()
        self.keeps_alive = b"close" not in connection and (self._is_chunked or self._left is not None)

    # ── the body ──────────────────────────────────────────────────────────────────────────────────────

    def _take(self, count: int) -> None:
        part = self._buffer[:count]
        del self._buffer[:count]
        self.body += part
        if self._left is not None:
            self._left -= len(part)

    def _read_chunks(self) -> bool:
        """Each chunk is its size in hexadecimal digits, its bytes and a line break; after the last come headers."""
        while True:
            if self._left:
                self._take(self._left)
                if self._left:
                    return False
            line = self._read_line()
            if line is None:
                return False
            if self._is_last_chunk:
                if not line:
                    return True
            elif line:
                self._left = _chunk_size(line)
                self._is_last_chunk = self._left == 0

    def _read_line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MOST_LINE_BYTES:
                raise ValueError(f"the size of a chunk is {bytes(self._buffer[:60])!r}")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or digits.strip(b"0123456789abcdefABCDEF"):
        raise ValueError(f"the size of a chunk is {line[:60]!r}")
    return int(digits, 16)


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or name.strip() != name or not name:
        raise ValueError(f"it has the header {line[:60]!r}")
    return name, value.strip(b" \t")
