"""`python -m lorimer.engine.probe`: what torch says and does on this machine, as one line of JSON.

`lorimer doctor` runs it in a process of its own, so that it survives a torch that crashes or hangs, and reports it.
"""

import json
import sys
from typing import Any

import psutil
import torch

from lorimer.engine.config import EngineConfig
from lorimer.engine.model.device import free_bytes, gemm_rates, open_device


def probe() -> dict[str, Any]:
    device = open_device(EngineConfig())
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.is_available(),
        "rates": {str(dtype).removeprefix("torch."): rate for dtype, rate in gemm_rates().items()},
        "dtype": str(device.dtype).removeprefix("torch."),
        "device": device.type,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "free_bytes": free_bytes(torch.device("cpu")),
        "total_bytes": psutil.virtual_memory().total,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
