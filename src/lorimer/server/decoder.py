"""The decoder process: decompresses and decodes large bodies, so that no other request waits for them.

``decoders.py`` starts it as ``python -m lorimer.server.decoder DESCRIPTOR``. The process asks the server before each
allocation for a body. It exits as soon as its socket closes, even in the middle of a body, and runs at a lower priority
than the server and the engines.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading

import msgspec

from lorimer.errors import LorimerError
from lorimer.server.decoding import AnyTask, Head, NoHead, Problem, perform
from lorimer.server.settings import Settings
from lorimer.types.compression import decompress

NICENESS = 10
"""Lower than the server and the engines; beside an engine on all cores a decoder still gets a tenth of a core."""
_LENGTH_BYTES = 4


class Start(msgspec.Struct, frozen=True):
    """The first message: the numeric settings, and the memory limit of the process."""

    settings: dict[str, int | float]
    memory_bytes: int


class Job(msgspec.Struct, frozen=True):
    """Decode a body, whose bytes as sent are in the file attached to this message."""

    task: AnyTask
    size: int
    encoding: str
    max_bytes: int
    """The limit after decompression."""


class Ask(msgspec.Struct, tag=True, frozen=True):
    """Ask to decompress ``num_bytes`` more. The server replies with one byte, 1 or 0."""

    num_bytes: int


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The result of a body. The attached file holds the head followed by the payload."""

    head_bytes: int = 0
    payload_bytes: int = 0
    problem: Problem | None = None
    is_out_of_memory: bool = False


Message = Start | Job | Ask | Answer
_encoder = msgspec.msgpack.Encoder()


class NoRoom(Exception):
    """The server has refused more memory for this body."""


def send(channel: socket.socket, message: Message, descriptor: int | None = None) -> None:
    data = _encoder.encode(message)
    data = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    if descriptor is None:
        channel.sendall(data)
    else:
        sent = socket.send_fds(channel, [data], [descriptor])
        channel.sendall(data[sent:])


def receive(channel: socket.socket) -> tuple[bytes, int | None]:
    """Receive the next message and its attached descriptor. Raise ``EOFError`` when the other end has closed."""
    data, descriptors, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, 1)
    header = data + _receive_exactly(channel, _LENGTH_BYTES - len(data))
    return _receive_exactly(channel, int.from_bytes(header, "little")), descriptors[0] if descriptors else None


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            raise EOFError("the other end is gone")
        data += part
    return data


def memory_file() -> int:
    """Create an anonymous file, in memory where the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lorimer-body", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def serve(channel: socket.socket) -> None:
    start = msgspec.msgpack.decode(receive(channel)[0], type=Start)
    settings = Settings(**start.settings)  # type: ignore[arg-type]
    limit_memory(start.memory_bytes)
    while True:
        try:
            data, descriptor = receive(channel)
        except EOFError:
            return
        assert descriptor is not None
        job = msgspec.msgpack.decode(data, type=Job)
        try:
            head, payload = decode(channel, job, descriptor, settings)
        except MemoryError:
            send(channel, Answer(is_out_of_memory=True))
            return  # exit: the fragments left of this body would take memory from the next
        except NoRoom:
            send(channel, Answer())
        except LorimerError as error:
            send(channel, Answer(problem=Problem.of(error)))
        else:
            respond(channel, head, payload)
        finally:
            os.close(descriptor)


def decode(channel: socket.socket, job: Job, descriptor: int, settings: Settings) -> tuple[Head, bytes]:
    def ask(num_bytes: int) -> None:
        send(channel, Ask(num_bytes))
        if channel.recv(1) != b"\1":
            raise NoRoom

    raw = os.pread(descriptor, job.size, 0)
    return perform(job.task, decompress(raw, job.encoding, job.max_bytes, ask), settings)


def respond(channel: socket.socket, head: Head, payload: bytes) -> None:
    encoded = b"" if isinstance(head, NoHead) else _encoder.encode(head)
    descriptor = memory_file()
    try:
        write_all(descriptor, encoded)
        write_all(descriptor, payload)
        send(channel, Answer(len(encoded), len(payload)), descriptor)
    finally:
        os.close(descriptor)


def limit_memory(num_bytes: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # the system already sets another limit
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def exit_with(channel: socket.socket) -> None:
    """Exit the process when the other end of the socket closes, even in the middle of a body."""
    poll = select.poll()
    poll.register(channel, select.POLLHUP | select.POLLERR)
    poll.poll()
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent process ends the decoder
    os.nice(NICENESS)
    channel = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=exit_with, args=[channel], daemon=True).start()
    serve(channel)


if __name__ == "__main__":
    main()
