"""Runs a command that the kernel kills when the process that started it ends: ``tether.py PARENT COMMAND...``.

The kernel sends the signal when the thread that started the command ends, so that thread must stay. This runs as a
file, with the standard library only, and becomes the command. Linux only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # it ended before the kernel knew
        sys.exit(f"process {parent} has ended; {command[0]} is not started")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
