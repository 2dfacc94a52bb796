"""Starts the engine process: ``python -m lorimer.engine DESCRIPTOR``.

What it imports stays until it ends. The garbage collector would look through all of it many times, at the start and
after it, so it begins when that is done and passes it by.
"""

import gc
import sys


def main() -> None:
    gc.disable()
    from lorimer.engine import worker

    gc.freeze()
    gc.enable()
    worker.main(int(sys.argv[1]))


if __name__ == "__main__":
    main()
