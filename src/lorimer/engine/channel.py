"""Whole messages over a socket: eight bytes of length, then the message. Used at both ends of an engine process.

Does not import torch.
"""

import contextlib
import select
import socket
import threading
from collections.abc import Sequence

_LENGTH_BYTES = 8
_COPIED_BYTES = 64 * 1024


class Connection:
    """One end. Sending is safe from any thread; receiving belongs to one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        # Not select(), which refuses descriptors above 1023; a busy server has more.
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, data: bytes) -> None:
        header = len(data).to_bytes(_LENGTH_BYTES, "little")
        with self._sending:
            if len(data) > _COPIED_BYTES:  # joining them would copy them while holding the GIL
                self._socket.sendall(header)
                self._socket.sendall(data)
            else:
                self._socket.sendall(header + data)

    def try_send(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send small messages as far as that needs no waiting. Return what is left for ``finish_sending``."""
        parts = self.to_parts(messages)
        if sum(map(len, parts)) > _COPIED_BYTES:
            return parts
        joined = b"".join(parts)
        with self._sending:
            try:
                sent = self._socket.send(joined, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
        return [joined[sent:]] if sent < len(joined) else []

    @staticmethod
    def to_parts(messages: Sequence[bytes]) -> list[bytes]:
        """Return the bytes that ``finish_sending`` sends for whole messages, without copying them."""
        return [part for data in messages for part in (len(data).to_bytes(_LENGTH_BYTES, "little"), data)]

    def finish_sending(self, parts: Sequence[bytes]) -> None:
        """Wait until the rest of a ``try_send`` is sent. Nothing else may be sent in between."""
        with self._sending:
            for part in parts:
                self._socket.sendall(part)

    def receive(self) -> bytearray | None:
        """Wait for the next message and return it; ``None`` when the other end is gone."""
        header = self._read(_LENGTH_BYTES)
        return None if header is None else self._read(int.from_bytes(header, "little"))

    def has_message(self) -> bool:
        """Return whether ``receive`` would return without waiting."""
        return bool(self._poll.poll(0))

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            try:
                count = self._socket.recv_into(view[filled:])
            except OSError:
                return None
            if count == 0:
                return None
            filled += count
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
