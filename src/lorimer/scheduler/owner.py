"""The replicas that this process computes: their drivers, and what replaces a driver that failed."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Collection
from datetime import UTC, datetime

from lorimer.engine.config import EngineConfig
from lorimer.engine.launch import ForkingLauncher
from lorimer.scheduler.driver import Driver
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.payloads import CreateLoss
from lorimer.scheduler.recovery import delete_orphans, keep_unserved, place_all, take_up
from lorimer.scheduler.results import Results
from lorimer.scheduler.retention import ObjectSweeper, sweep
from lorimer.scheduler.usage_buffer import UsageBuffer
from lorimer.store.database import Store
from lorimer.store.scratch import Scratch

log = logging.getLogger("lorimer.scheduler")


class Owner:
    """Call all methods on one event loop."""

    def __init__(
        self,
        store: Store,
        scratch: Scratch,
        limits: SchedulerLimits,
        results: Results,
        usage: UsageBuffer,
    ) -> None:
        self.store, self.scratch, self.limits = store, scratch, limits
        self.directory = scratch.directory
        self.object_sweeper = ObjectSweeper()
        self.results, self.usage = results, usage
        self.owner_id = secrets.token_hex(16)
        """Made anew at each start."""
        self.started_at = datetime.now(UTC)
        self.drivers: dict[str, Driver] = {}
        """By the name of the replica."""
        self.known_losses: dict[str, CreateLoss] = {}
        """The custom losses that engines have validated or runs need, by loss_id."""
        self._launcher = ForkingLauncher()
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        self._arrivals: dict[str, asyncio.Lock] = {}

    def open(self, place: str, base_model: str, config: EngineConfig) -> Driver:
        """Begin to compute a replica. Its engine starts on demand; `take_up` gives it what it left unfinished."""
        self._arrivals[place] = asyncio.Lock()
        driver = self.drivers[place] = self._new_driver(place, base_model, config)
        self._supervisors[place] = asyncio.create_task(self._supervise(place))
        return driver

    async def give_up(self, place: str) -> None:
        """Stop computing a replica. What waits for it stays in the journal."""
        supervisor = self._supervisors.pop(place)
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        driver = self.drivers.pop(place)
        del self._arrivals[place]
        await driver.end(f"replica {place} has moved to another process; try again")
        for request_id in driver.core.open:
            self.results.open.pop(request_id, None)

    async def recover(self) -> None:
        """Recover the requests of an earlier server, when this process is the only one."""
        num_files = await delete_orphans(self)
        self.scratch.adopt()
        await place_all(self)
        await keep_unserved(self)
        num_requests = sum([await self.take_up(place) for place in self.drivers])
        if num_requests or num_files:
            log.info("recovered %d unfinished requests; deleted %d unfinished files", num_requests, num_files)

    async def take_up(self, place: str, request_ids: Collection[str] = (), *, reads_all: bool = False) -> int:
        """Give a replica its unfinished requests that it does not have yet. Return their number."""
        async with self._arrivals[place]:
            return await take_up(self, self.drivers[place], request_ids, reads_all=reads_all)

    def _new_driver(self, place: str, base_model: str, config: EngineConfig) -> Driver:
        return Driver(
            base_model,
            place,
            config,
            self.store,
            self.scratch,
            self.limits,
            self.results,
            self.usage,
            self.known_losses,
            self._launcher,
        )

    async def _supervise(self, place: str) -> None:
        """Run the driver of a replica. If it fails because of a bug, start a new one from the journal."""
        for pause in itertools.chain((0.0, 1.0, 5.0), itertools.repeat(30.0)):
            driver = self.drivers[place]
            try:
                await driver.run()
            except Exception:
                log.critical("the scheduler of %s failed; it starts again from its journal", place, exc_info=True)
            await driver.end("the scheduler failed and starts again from its journal; send this again")
            await asyncio.sleep(pause)
            self.drivers[place] = self._new_driver(place, driver.name, driver.slot.config)
            await self.take_up(place)

    async def sweep(self) -> None:
        """Delete what has expired, and objects that nothing names."""
        await sweep(self)
        await self.object_sweeper.sweep(self)

    async def close(self, timeout: float) -> None:
        """Finish what is being computed, take a snapshot of every run, and stop the engines."""
        for driver in self.drivers.values():
            driver.stop_waiting_for_storage()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*(driver.drain() for driver in self.drivers.values()))
        except TimeoutError:
            log.warning("not everything finished within %.0f s; the rest is recovered at the next start", timeout)
        await self.end()

    async def end(self) -> None:
        """Stop without finishing anything."""
        supervisors = list(self._supervisors.values())
        for supervisor in supervisors:
            supervisor.cancel()
        await asyncio.gather(*supervisors, return_exceptions=True)
        await asyncio.gather(*(driver.end() for driver in self.drivers.values()))
        self._launcher.close()
