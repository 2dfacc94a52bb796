"""Runs a command, and ends all of its processes with the process that started it: ``lifeline.py DIRECTORY COMMAND...``.

vLLM starts processes of its own, which outlive it when it is killed. This one leads their process group. It ends the
group and deletes DIRECTORY when the command ends, or when its standard input, a pipe, is closed: also by the death of
the other end. It runs as a file, with the standard library only.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading

TERM_SECONDS = 5.0


def main() -> None:
    directory, *command = sys.argv[1:]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end_child() -> None:
        sys.stdin.buffer.read()
        child.terminate()
        try:
            child.wait(TERM_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()

    threading.Thread(target=end_child, daemon=True).start()
    code = child.wait()
    sys.stderr.write(f"{command[0]} ended with code {code}\n")
    sys.stderr.flush()
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
