"""A command of ``lorimer`` as a child of a server, which ends when that server does: ``python -m lorimer.cli.child FD
COMMAND``.

``FD`` is the end of a pipe that only the server holds open. When it closes, by whatever death, the command is
interrupted as by Ctrl-C, so that a training says how it ended; soon after, it and all its processes are killed.
"""

import os
import signal
import sys
import threading

END_SECONDS = 10.0
"""How long a command may take to end after it was interrupted."""


def main() -> None:
    """Run the command of the command line. It must be the first of its session, as all of it is killed."""
    descriptor = int(sys.argv.pop(1))
    # A server in the background of a script has SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=watch, args=[descriptor], name="lifeline", daemon=True).start()
    from lorimer.cli.main import main as run_command

    run_command()


def watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(END_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
