"""State that the rows share: the sizes of the loads, and the server under load."""

import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.service.http import HttpPool
from bench.service.server import MODEL, BenchServer, running_server
from bench.timing import Progress


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the loads."""

    num_starts: int = 3
    num_calls: int = 400
    num_samples: int = 1000
    sample_tokens: int = 16
    num_clients: int = 100
    num_steps: int = 20
    num_waiting: int = 5000
    num_heartbeats: int = 1000
    hostile_rounds: int = 5
    hostile_calls: int = 200
    hostile_datums: int = 4096
    hostile_tokens: int = 1000
    long_clients: int = 4
    long_steps: int = 3000
    num_weighings: int = 24
    sdk_calls: int = 1000
    sdk_samples: int = 400
    sdk_rounds: int = 5
    num_clusters: int = 9
    cluster_clients: int = 32
    cluster_seconds: float = 10.0
    cluster_rounds: int = 3
    object_steps: int = 10
    sweep_runs: int = 8
    sweep_steps: int = 10
    sweep_batch: int = 32
    sweep_rounds: int = 3
    vllm_prompts: int = 32
    vllm_tokens: int = 64
    vllm_rounds: int = 2


FULL = Sizes()
QUICK = Sizes(
    num_starts=1,
    num_calls=10,
    num_samples=40,
    sample_tokens=4,
    num_clients=6,
    num_steps=3,
    num_waiting=60,
    num_heartbeats=20,
    hostile_rounds=1,
    hostile_calls=5,
    hostile_datums=100,
    hostile_tokens=100,
    long_clients=2,
    long_steps=40,
    num_weighings=8,
    sdk_calls=20,
    sdk_samples=20,
    sdk_rounds=1,
    num_clusters=1,
    cluster_clients=4,
    cluster_seconds=1.0,
    cluster_rounds=1,
    object_steps=2,
    sweep_runs=2,
    sweep_steps=2,
    sweep_batch=2,
    sweep_rounds=1,
)


@dataclass(frozen=True)
class Bench:
    """State that the rows share."""

    root: Path
    sizes: Sizes
    num_threads: int
    progress: Progress
    shared: BenchServer | None = None
    """One server for all rows, to save start-up time."""

    @asynccontextmanager
    async def server(
        self, name: str, model: str = MODEL, /, *, config: Path | None = None, **settings: object
    ) -> AsyncIterator[tuple[BenchServer, HttpPool]]:
        """Start a server of ``model`` with an empty directory, or return the shared one with the default model."""
        with ExitStack() as ending:
            server = self.shared
            if server is None:
                self.progress(f"{name}: starting a server")
                started = running_server(self.root / name, self.num_threads, model, config=config, **settings)
                server = ending.enter_context(started)
            pool = HttpPool(server.host, server.port)
            ending.callback(pool.close)
            yield server, pool


async def timed(work: Awaitable[object]) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start
