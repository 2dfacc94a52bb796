"""Records what a process asks of the network and which programs it starts; Python imports this before anything else.

Lines of JSON in the file named by ``OUTBOUND_FILE``: the audit event and what was asked for.
"""

import json
import os
import sys
from typing import Any

_FILE = os.environ.get("OUTBOUND_FILE", "")
_EVENTS = {
    "socket.connect": lambda args: [args[0].family, args[1]],
    "socket.sendto": lambda args: [args[0].family, args[1]],
    "socket.getaddrinfo": lambda args: [args[0]],
    "socket.gethostbyname": lambda args: [args[0]],
    "subprocess.Popen": lambda args: [args[1]],
    "os.system": lambda args: [args[0]],
    "os.exec": lambda args: [args[0]],
    "os.posix_spawn": lambda args: [args[0]],
}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        with open(_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps([event, *_EVENTS[event](args)], default=str) + "\n")


if _FILE:
    sys.addaudithook(_audit)
