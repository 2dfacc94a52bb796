"""Plants an error in the engine's bookkeeping: Python imports this before anything else when it is on its path.

The file named by ``PLANTED_FAULT`` says which samples fail, by their ``max_tokens``, and how often more. The engine's
own code knows nothing of it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

_FILE = Path(os.environ.get("PLANTED_FAULT", "/nonexistent"))


def _plant() -> None:
    from lorimer.engine.sampling import sampler

    result = sampler.result

    def planted(request: Any) -> Any:
        if _FILE.exists():
            fault = json.loads(_FILE.read_text("utf-8"))
            if fault["times"] and request.message.params.max_tokens == fault["max_tokens"]:
                _FILE.write_text(json.dumps(fault | {"times": fault["times"] - 1}), "utf-8")
                raise KeyError("planted")
        return result(request)

    sampler.result = planted


if "lorimer.engine" in sys.orig_argv:
    _plant()
