"""Measures how a user who sends the largest accepted bodies, without pause, affects the latency of another user.

A separate process (``flood.py``) sends the bodies. Rounds with and without it alternate on one server.
"""

import asyncio
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from bench.service.client import Session
from bench.service.figures import Figure, percentile, spread
from bench.service.flood import flood
from bench.service.http import HttpPool
from bench.service.server import running_server
from bench.service.setting import Bench, timed

WARM_CALLS = 20


async def hostile(bench: Bench) -> list[Figure]:
    """Time heartbeats and tiny forwards of one user, with and without the bodies of another."""
    sizes = bench.sizes
    data = bench.root / "hostile"
    with ExitStack() as ending:
        keys = {name: create_key(data, name) for name in ("ada", "mallory")}
        # Operation 1 of the flood never arrives: its operations are decoded and deduplicated, never computed.
        server = ending.enter_context(running_server(data, bench.num_threads, gap_seconds=3600))
        pool = HttpPool(server.host, server.port, keys["ada"])
        ending.callback(pool.close)
        session = await Session.create(pool)
        run = await session.create_run()
        calls = {"heartbeat": session.heartbeat, "tiny `forward`": run.forward}
        quiet: dict[str, list[float]] = {name: [] for name in calls}
        beside: dict[str, list[float]] = {name: [] for name in calls}
        worked = 0.0
        async with flood(
            server.host, server.port, keys["mallory"], sizes.hostile_datums, sizes.hostile_tokens
        ) as bodies:
            for _ in range(WARM_CALLS):
                await asyncio.gather(session.heartbeat(), run.forward())
            for number in range(sizes.hostile_rounds):
                for found in (quiet, beside):
                    if found is beside:
                        await bodies.begin()
                        began = server.cpu_seconds()
                    for name, call in calls.items():
                        found[name] += [await timed(call()) for _ in range(sizes.hostile_calls)]
                    if found is beside:
                        worked += server.cpu_seconds() - began
                        await bodies.pause()
                bench.progress(f"hostile: round {number + 1} of {sizes.hostile_rounds}, {bodies.num_sent} bodies")
    details = (
        f"{bodies.num_sent} bodies of {bodies.num_bytes / 2**20:.0f} MiB decompressed; "
        f"the API process computed {1000 * worked / max(1, bodies.num_sent):.0f} ms for each and the calls beside it"
    )
    return [
        Figure(
            text=f"Another user's largest bodies without pause: {name} p99 over its quiet p99",
            value=percentile(beside[name], 99) / percentile(quiet[name], 99),
            details=f"quiet {spread(quiet[name])}; beside {spread(beside[name])}; {details}",
            aim="hostile",
        )
        for name in calls
    ]


def create_key(data: Path, user: str) -> str:
    command = [sys.executable, "-m", "lorimer.cli.main", "key", "create", user, "--data", str(data), "--format", "json"]
    return str(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["secret"])
