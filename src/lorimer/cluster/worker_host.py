"""The Ray actor of one worker: it runs ``lorimer worker`` on its node, and starts it again whenever it ends.

The worker is a process group of its own, which is killed when the worker ends; the kernel kills the worker when the
actor's process ends, however that happens. Ray restarts the actor, on another node if its node is gone.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from typing import IO, Any

from lorimer.cluster import tether

FIRST_RESTART_SECONDS, MAX_RESTART_SECONDS = 0.5, 30.0
LONG_SECONDS = 60.0
"""A worker that ran for so long and ends is started again without a growing pause."""
NUM_LINES = 20


class WorkerHost:
    """Ray calls its methods on several threads."""

    def __init__(self, flags: list[str], num_gpus: int) -> None:
        ray: Any = importlib.import_module("ray")
        self._address: str = ray.util.get_node_ip_address()
        self._node_id: str = ray.get_runtime_context().get_node_id()
        program = [sys.executable, "-m", "lorimer.cli.main", "worker", *flags, f"--set=worker_host={self._address}"]
        self._command = [sys.executable, "-P", tether.__file__, str(os.getpid()), *program]
        # Ray sets CUDA_VISIBLE_DEVICES where it reserves GPUs only; without any, a worker must not see those of others.
        self._environment = os.environ | ({} if num_gpus else {"CUDA_VISIBLE_DEVICES": ""})
        self._lock = threading.Lock()
        self._pid: int | None = None
        """Of the worker, until it is reaped; with the lock held it is not given to another process."""
        self._num_exits = 0
        self._last_exit = ""
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="worker", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        """Run the worker until `stop`. This thread starts it, and therefore lives as long as it."""
        pause = FIRST_RESTART_SECONDS
        while not self._is_ending.is_set():
            began = time.monotonic()
            with self._lock:
                if self._is_ending.is_set():
                    return
                process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._pid = process.pid
            assert process.stdout is not None
            printer = threading.Thread(target=self._print, args=[process.stdout], daemon=True)
            printer.start()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                self._pid = None
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # engines end by themselves; these may be slow
                code = process.wait()
            printer.join()
            self._num_exits += 1
            self._last_exit = f"code {code}: {self._lines[-1] if self._lines else 'it said nothing'}"
            self._lines.clear()
            pause = FIRST_RESTART_SECONDS if time.monotonic() - began > LONG_SECONDS else pause
            self._is_ending.wait(pause)
            pause = min(2 * pause, MAX_RESTART_SECONDS)

    def _print(self, stream: IO[bytes]) -> None:
        """Pass what the worker prints on to the log that Ray keeps of this actor."""
        for line in stream:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self._lines.append(line.decode("utf-8", "replace").strip())
        stream.close()

    def status(self) -> dict[str, Any]:
        return {
            "node": self._address,
            "node_id": self._node_id,
            "host_pid": os.getpid(),
            "pid": self._pid,
            "num_exits": self._num_exits,
            "last_exit": self._last_exit,
        }

    def stop(self, seconds: float) -> None:
        """Let the worker finish what it computes, for at most so long, and end it."""
        self._is_ending.set()
        self._signal(signal.SIGTERM)
        self._thread.join(seconds)
        self._signal(signal.SIGKILL)
        self._thread.join()

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._pid is not None:
                os.kill(self._pid, number)
