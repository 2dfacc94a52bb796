"""A command of ``lorimer`` as a child of a server, which ends when that server does: ``python -m lorimer.cli.child FD
BYTES COMMAND``.

``FD`` is the end of a pipe that only the server holds open. When it closes, by whatever death, the command is
interrupted as by Ctrl-C, so that a training says how it ended; soon after, it and all its processes are killed.
``BYTES`` limits the memory of the process and of each that it starts, on Linux; 0 does not.
"""

import os
import resource
import signal
import sys
import threading

END_SECONDS = 10.0
"""How long a command may take to end after it was interrupted."""


def main() -> None:
    """Run the command of the command line. It must be the first of its session, as all of it is killed."""
    descriptor, max_bytes = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    # A server in the background of a script has SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=watch, args=[descriptor], name="lifeline", daemon=True).start()
    if max_bytes:
        limit_memory(max_bytes)
    from lorimer.cli.main import main as run_command

    run_command()


def limit_memory(num_bytes: int) -> None:
    """Limit the data of this process and of those that it starts: what is private and written to, not mapped files."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(END_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
