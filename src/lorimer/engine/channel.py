"""Whole messages over a socket: eight bytes of length, then the message. Used at both ends of an engine process.

Does not import torch.
"""

import contextlib
import select
import socket
import threading

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
