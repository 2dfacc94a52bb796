"""Runs rows of the service and writes their table. A row that fails does not stop the others."""

import asyncio
import os
import tempfile
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.service.figures import Figure, table
from bench.service.rows import ROWS
from bench.service.server import running_server
from bench.service.setting import FULL, QUICK, Bench
from bench.timing import say

SHARED: dict[str, Any] = {"gap_seconds": 3600, "result_seconds_after_fetch": 1, "sweep_seconds": 0.5}
"""Settings of the single server of a quick run."""


def measure_service(names: list[str], num_threads: int, is_quick: bool) -> tuple[str, bool]:
    """Return the table and whether every row succeeded."""
    figures: list[Figure] = []
    failed: list[str] = []
    with ExitStack() as ending:
        root = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(root, QUICK if is_quick else FULL, num_threads, say)
        if is_quick:
            bench = replace(bench, shared=ending.enter_context(running_server(root / "shared", num_threads, **SHARED)))
        for name in names:
            load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
            say(f"{name}: load {load:.1f}")
            try:
                figures += asyncio.run(ROWS[name](bench))
            except Exception:
                traceback.print_exc()
                failed.append(name)
    text = table(figures) if figures else ""
    return text + "".join(f"\n\nRow `{name}` failed." for name in failed), not failed
