"""A pool of decoder processes for large bodies, and the accounting of the memory that decoding takes.

Users take turns, and one user always leaves a decoder to the others. A decoder that crashes, times out or runs out of
memory fails only its current request and is replaced. Bytes travel in memory files, so the event loop neither copies
them nor blocks.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from lorimer.server.decoder import Answer, Ask, Job, Start, memory_file, receive, send, write_all
from lorimer.server.errors import Refusal
from lorimer.server.huge_pages import read_bytes
from lorimer.server.settings import TYPES, Settings

logger = logging.getLogger(__name__)

_replies = msgspec.msgpack.Decoder(Ask | Answer)


@dataclass(eq=False)
class BodyMemory:
    """Memory charged to one body."""

    user_id: str
    num_bytes: int = 0


class DecodingMemory:
    """Accounts for the bytes of bodies being decompressed and decoded, per user and in total. Thread-safe.

    The oldest body of a user, and of all users, is always granted memory: its own limit bounds it, and otherwise bodies
    that grow concurrently could refuse each other.
    """

    def __init__(self, settings: Settings) -> None:
        self._max_bytes, self._max_bytes_per_user = settings.max_decoding_bytes, settings.max_decoding_bytes_per_user
        self._lock = threading.Lock()
        self._bodies: dict[BodyMemory, None] = {}
        """Ordered by arrival."""

    @property
    def total(self) -> int:
        return sum(body.num_bytes for body in self._bodies)

    def grow(self, body: BodyMemory, num_bytes: int) -> None:
        """Charge ``num_bytes`` more to a body.

        Respond 429 if the user's bodies, or all bodies, would exceed their limit.
        """
        with self._lock:
            self._bodies.setdefault(body)
            own = [one for one in self._bodies if one.user_id == body.user_id]
            for whose, bodies, limit, setting in (
                ("your requests", own, self._max_bytes_per_user, "max_decoding_bytes_per_user"),
                ("requests", list(self._bodies), self._max_bytes, "max_decoding_bytes"),
            ):
                if body is not bodies[0] and num_bytes + sum(one.num_bytes for one in bodies) > limit:
                    detail = (
                        f"more than {limit} bytes of bodies of {whose} are being decoded ({setting}); send it again"
                    )
                    if not body.num_bytes:  # this was its first request for memory
                        del self._bodies[body]
                    raise Refusal(429, "too_many_bytes", detail)
            body.num_bytes += num_bytes

    def release(self, body: BodyMemory) -> None:
        with self._lock:
            self._bodies.pop(body, None)


class DecoderDied(Exception):
    """The decoder process crashed or was killed while decoding a body."""


class DecoderProcess:
    """A decoder process. Only one thread may use it at a time."""

    def __init__(self, settings: Settings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "lorimer.server.decoder", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._socket = ours
        self.is_fit = True
        """Whether the process can decode another body."""
        numbers = {
            name: value
            for name in TYPES
            if isinstance(value := getattr(settings, name), int | float) and not isinstance(value, bool)
        }
        send(ours, Start(numbers, settings.decoder_memory_bytes))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def decode(
        self, job: Job, chunks: Sequence[bytes], memory: DecodingMemory, body: BodyMemory, seconds: float
    ) -> tuple[bytes, bytes]:
        """Send a body to the process and return its head and payload. Raise the error if the body is invalid."""
        deadline = time.monotonic() + seconds
        descriptor = memory_file()
        try:
            for chunk in chunks:
                write_all(descriptor, chunk)
            send(self._socket, job, descriptor)
        except OSError as error:
            self.is_fit = False
            raise DecoderDied(str(error)) from error
        finally:
            os.close(descriptor)
        refusal: Refusal | None = None
        while True:
            reply, result = self._receive(deadline)
            if isinstance(reply, Answer):
                break
            try:
                memory.grow(body, reply.num_bytes)
            except Refusal as error:
                refusal = error
            self._socket.sendall(b"\0" if refusal else b"\1")
        if refusal is not None:
            raise refusal
        return self._read(reply, result)

    def _receive(self, deadline: float) -> tuple[Ask | Answer, int | None]:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            data, descriptor = receive(self._socket)
        except TimeoutError:
            self.is_fit = False
            self.kill()
            raise DecoderDied("it took too long") from None
        except (OSError, EOFError) as error:
            self.is_fit = False
            raise DecoderDied(str(error)) from error
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)
        return _replies.decode(data), descriptor

    def _read(self, answer: Answer, descriptor: int | None) -> tuple[bytes, bytes]:
        if answer.is_out_of_memory:
            self.is_fit = False
            raise Refusal(
                413, "too_large", "decoding the body takes more memory than is allowed (decoder_memory_bytes)"
            )
        if answer.problem is not None:
            raise answer.problem.error()
        assert descriptor is not None
        try:
            head = os.pread(descriptor, answer.head_bytes, 0)
            return head, read_bytes(descriptor, answer.payload_bytes, answer.head_bytes)
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


@dataclass
class _Waiting:
    turn: "asyncio.Future[None]"
    user_id: str


class Decoders:
    """The pool of decoder processes. Each process starts on first use."""

    def __init__(self, settings: Settings) -> None:
        self.memory = DecodingMemory(settings)
        self._settings = settings
        self._idle: list[DecoderProcess] = []
        self._busy: set[DecoderProcess] = set()
        self._num_running = 0
        self._running_of: dict[str, int] = {}
        self._waiting: deque[_Waiting] = deque()
        self._threads = ThreadPoolExecutor(settings.decoder_processes, thread_name_prefix="decoder")
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        return [decoder.pid for decoder in [*self._idle, *self._busy] if decoder.is_alive]

    async def decode(self, user_id: str, job: Job, chunks: Sequence[bytes]) -> tuple[bytes, bytes]:
        """Wait for the user's turn, decode a body and return its head and payload."""
        body = BodyMemory(user_id)
        self.memory.grow(body, job.size)
        # Run in a task of its own: the decoder keeps working after the client disconnects, and its memory stays
        # charged.
        work = asyncio.ensure_future(self._decode(body, job, chunks))
        work.add_done_callback(lambda _: self.memory.release(body))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(work)

    async def _decode(self, body: BodyMemory, job: Job, chunks: Sequence[bytes]) -> tuple[bytes, bytes]:
        await self._take_turn(body.user_id)
        try:
            if self._is_closed:
                raise _shutting_down()
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._run, body, job, chunks)
            return await work
        finally:
            self._end_turn(body.user_id)

    def _run(self, body: BodyMemory, job: Job, chunks: Sequence[bytes]) -> tuple[bytes, bytes]:
        decoder = self._idle.pop() if self._idle else DecoderProcess(self._settings)
        self._busy.add(decoder)
        seconds = self._settings.decoder_seconds
        try:
            return decoder.decode(job, chunks, self.memory, body, seconds)
        except DecoderDied as error:
            if self._is_closed:
                raise _shutting_down() from None
            logger.warning("a decoder died while decoding a body of %d bytes: %s", job.size, error)
            detail = f"the body could not be decoded within {seconds:g} s (decoder_seconds) or ended its decoder"
            raise Refusal(503, "decoder_failed", detail) from None
        finally:
            self._busy.discard(decoder)
            self._put_back(decoder)

    def _put_back(self, decoder: DecoderProcess) -> None:
        if decoder.is_fit and decoder.is_alive and not self._is_closed:
            self._idle.append(decoder)
        else:
            decoder.close()

    async def _take_turn(self, user_id: str) -> None:
        if not self._has_room(user_id):
            waiting = _Waiting(asyncio.get_running_loop().create_future(), user_id)
            self._waiting.append(waiting)
            await waiting.turn  # ``_end_turn`` has already counted it as running
            return
        self._begin(user_id)

    def _has_room(self, user_id: str) -> bool:
        limit = self._settings.decoder_processes
        return self._num_running < limit and self._running_of.get(user_id, 0) < max(1, limit - 1)

    def _begin(self, user_id: str) -> None:
        self._num_running += 1
        self._running_of[user_id] = self._running_of.get(user_id, 0) + 1

    def _end_turn(self, user_id: str) -> None:
        self._num_running -= 1
        self._running_of[user_id] -= 1
        if not self._running_of[user_id]:
            del self._running_of[user_id]
        # Wake the waiter whose user has the fewest bodies running; among equals, the one that has waited longest.
        able = [one for one in self._waiting if self._has_room(one.user_id)]
        if able:
            chosen = min(able, key=lambda one: self._running_of.get(one.user_id, 0))
            self._waiting.remove(chosen)
            self._begin(chosen.user_id)
            chosen.turn.set_result(None)

    def close(self) -> None:
        """Kill all decoders and refuse the requests waiting for them."""
        self._is_closed = True
        for decoder in [*self._busy]:
            decoder.kill()
        for decoder in self._idle:
            decoder.close()
        self._idle.clear()
        while self._waiting:
            self._waiting.popleft().turn.set_exception(_shutting_down())
        self._threads.shutdown(wait=False)


def _shutting_down() -> Refusal:
    return Refusal(503, "shutting_down", "the server is shutting down; send this again")
