"""Kills a process of the server at a named moment: Python imports this before anything else when it is on its path.

The moment is that of an audit event, such as the rename that makes a file visible, just before it takes place. It is
armed by a file of JSON, whose path is in ``FAULT_FILE`` and which is gone when the process dies. The server's own code
knows nothing of it.
"""

import json
import os
import re
import signal
import sys
from typing import Any

_FILE = os.environ.get("FAULT_FILE", "")
_EVENTS = {"open", "os.mkdir", "os.rename", "os.listdir", "shutil.rmtree"}
_PROCESS = "engine" if "lorimer.engine" in sys.orig_argv else "api"
_state = {"is_inside": False}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in _EVENTS or _state["is_inside"]:
        return
    _state["is_inside"] = True
    try:
        if not os.path.exists(_FILE):
            return
        with open(_FILE, encoding="utf-8") as file:
            fault = json.load(file)
        is_it = event == fault["event"] and fault["process"] == _PROCESS and re.search(fault["path"], str(args[0]))
        if is_it:
            os.unlink(_FILE)
            if fault["with_parent"]:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    except (OSError, ValueError):
        return  # it is just being written, or another process was first
    finally:
        _state["is_inside"] = False


if _FILE:
    sys.addaudithook(_audit)
