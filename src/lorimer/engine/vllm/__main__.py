"""Starts the process of a vLLM sampler: ``python -m lorimer.engine.vllm DESCRIPTOR``."""

import sys

from lorimer.engine.vllm.bridge import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
