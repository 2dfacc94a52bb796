"""Runs rows of the service and makes their table; a row that fails does not take the others with it."""

import asyncio
import os
import tempfile
import traceback
from pathlib import Path

from bench.service.figures import Figure, table
from bench.service.rows import FULL, QUICK, ROWS, Bench
from bench.timing import say


def measure_service(names: list[str], num_threads: int, is_quick: bool) -> tuple[str, bool]:
    """The table, and whether every row succeeded."""
    figures: list[Figure] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(Path(root), QUICK if is_quick else FULL, num_threads, say)
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
