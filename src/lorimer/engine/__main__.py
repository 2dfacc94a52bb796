"""Starts the engine process: ``python -m lorimer.engine DESCRIPTOR [SEAT]``.

The garbage collector is disabled during imports and then ignores the imported objects: they stay until the process
ends, and scanning them repeatedly costs time.
"""

import gc
import sys


def main() -> None:
    gc.disable()
    from lorimer.engine import worker

    gc.freeze()
    gc.enable()
    worker.main(int(sys.argv[1]), *sys.argv[2:])


if __name__ == "__main__":
    main()
