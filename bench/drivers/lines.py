"""Answers calls on standard input, a JSON object a line: ``{"call": NAME, ...arguments}``.

The first line has the settings instead, and is answered when the peer is open. An answer is ``{"result": ...}`` or
``{"error": TEXT}``. What libraries print to standard output goes to standard error.
"""

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any


def serve(open_peer: Callable[..., Any]) -> None:
    """Open the peer and call its methods until standard input ends. That ends a call under way, and its processes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    is_busy = threading.Event()
    threading.Thread(target=_read, args=(lines, is_busy), daemon=True).start()
    peer: Any = None
    while (line := lines.get()) is not None:
        is_busy.set()
        values: dict[str, Any] = json.loads(line)
        try:
            if peer is None:
                _use_cores(values["num_threads"])
                peer, result = open_peer(**values), None
            else:
                result = getattr(peer, values.pop("call"))(**values)
            answer = {"result": result}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        is_busy.clear()
        print(json.dumps(answer), file=answers)


def _read(lines: "queue.SimpleQueue[str | None]", is_busy: threading.Event) -> None:
    for line in sys.stdin:
        lines.put(line)
    if is_busy.is_set() and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    lines.put(None)


def _use_cores(num_threads: int) -> None:
    """Use no more cores than the others have threads: not every library can be told a number."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[:num_threads])
