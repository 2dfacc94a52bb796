"""The memory of a server's engines while something is trained, as the server reports it again and again.

Other servers may not report it; then there are no figures. The engine of a run is that of its replica.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from lorimer import NotFoundError, ServiceClient
from lorimer.types.checkpoints import TrainingRun
from lorimer.types.overview import OverviewResponse
from lorimer.types.replicas import ReplicasResponse

POLL_SECONDS = 0.1


@dataclass
class EngineMemory:
    """What was seen so far."""

    service: ServiceClient
    peaks: dict[str, int] = field(default_factory=dict)
    """The largest resident memory of each engine, by the name of its replica."""
    available: list[int] = field(default_factory=list)
    """Memory of the server's machine that was free."""

    async def peak_of(self, model_id: str) -> int | None:
        """Return the peak of the engine that computed a run; none where the server does not tell."""
        if not await self.poll():
            return None
        connection = self.service.holder.connection
        asked = connection.run(connection.transport.ask(TrainingRun, "GET", f"/api/v1/training_runs/{model_id}"))
        replica = (await asked.result_async()).replica
        return self.peaks.get(replica or "")

    async def poll(self) -> bool:
        """Ask once; return whether the server tells."""
        connection = self.service.holder.connection
        try:
            found = await connection.run(
                connection.transport.ask(ReplicasResponse, "GET", "/api/v1/replicas")
            ).result_async()
            seen = await connection.run(
                connection.transport.ask(OverviewResponse, "GET", "/api/v1/overview")
            ).result_async()
        except NotFoundError:
            return False
        for replica in found.replicas:
            if replica.engine_bytes is not None:
                self.peaks[replica.name] = max(self.peaks.get(replica.name, 0), replica.engine_bytes)
        self.available += [m.memory.available_bytes for m in seen.models if m.memory.available_bytes is not None]
        return True


@contextlib.asynccontextmanager
async def watched_memory(service: ServiceClient) -> AsyncIterator[EngineMemory]:
    """Ask the server for the memory of its engines within the block."""
    memory = EngineMemory(service)

    async def watch() -> None:
        while await memory.poll():
            await asyncio.sleep(POLL_SECONDS)

    watching = asyncio.create_task(watch())
    try:
        yield memory
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
