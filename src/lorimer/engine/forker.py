"""The process of a fork server: ``python -m lorimer.engine.forker LISTENING LIFELINE DIRECTORY``.

Forks an engine for each request that arrives at the socket ``LISTENING``, sends its exit code when it has ended, and
ends with the pipe ``LIFELINE``. It has one thread, as a process that forks must. ``fork_server.py`` starts it.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import selectors
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from lorimer.engine.fork_server import MAX_REQUEST_BYTES, Ended, Request, Started

MAX_DESCRIPTORS = 128
_SET_NAME = 15  # PR_SET_NAME of prctl


class Forker:
    def __init__(self, listening: int, lifeline: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._listening, self._lifeline = socket.socket(fileno=listening), lifeline
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """Process id and connection of who asked, by descriptor of the process."""
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(lifeline, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fd == self._lifeline:
                    return
                else:
                    self._reap(key.fd)

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        data, descriptors, *_ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        try:
            if not data:  # who asked is gone
                connection.close()
                return
            request = msgspec.msgpack.decode(data, type=Request)
            _import_engine()
            pid = os.fork()
            if not pid:
                self._become(request, descriptors)
            child = os.pidfd_open(pid)
            self._children[child] = pid, connection
            self._selector.register(child, selectors.EVENT_READ)
            # If who asked is gone, the engine ends with the end of its socket.
            with contextlib.suppress(BrokenPipeError):
                socket.send_fds(connection, [msgspec.msgpack.encode(Started(pid=pid))], [child])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _reap(self, child: int) -> None:
        pid, connection = self._children.pop(child)
        self._selector.unregister(child)
        os.close(child)
        _, status = os.waitpid(pid, 0)
        with connection, contextlib.suppress(BrokenPipeError):
            connection.send(msgspec.msgpack.encode(Ended(code=os.waitstatus_to_exitcode(status))))

    def _become(self, request: Request, descriptors: Sequence[int]) -> NoReturn:
        """Turn this process, a fork, into the engine."""
        code = 1
        try:
            lowest = max([*map(int, os.listdir("/proc/self/fd")), *request.descriptors]) + 1
            *moved, output, errors = (fcntl.fcntl(one, fcntl.F_DUPFD, lowest) for one in descriptors)
            os.dup2(output, 1)
            os.dup2(errors, 2)
            # What belongs to the fork server. Its objects are never freed, so they close no number a second time.
            os.closerange(3, lowest)
            for descriptor, number in zip(moved, request.descriptors, strict=True):
                os.dup2(descriptor, number)
            os.closerange(lowest, lowest + len(descriptors))
            ctypes.CDLL(None).prctl(_SET_NAME, request.name.encode()[:15], 0, 0, 0)
            os.environb.clear()
            os.environb.update(request.environment)
            os.chdir(request.directory)
            from lorimer.engine import worker

            worker.main(int(request.arguments[0]), *request.arguments[1:])
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _import_engine() -> None:
    if "lorimer.engine.worker" not in sys.modules:
        gc.disable()
        from lorimer.engine import worker as worker

        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Forker(int(sys.argv[1]), int(sys.argv[2])).run()
    shutil.rmtree(sys.argv[3], ignore_errors=True)  # also after the end of a process that was killed
