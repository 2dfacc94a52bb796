"""Keeps this process an owner: extends its lease, claims replicas, and gives them the requests that APIs accept.

Everything that an owner writes is fenced (`store/owners.py`). It may therefore compute on while the database is away,
and learns by its first transaction afterwards whether its replicas were taken over.
"""

import asyncio
import dataclasses
import fnmatch
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection

from lorimer.engine.config import EngineConfig
from lorimer.errors import Fenced, InvalidInput, StorageError
from lorimer.scheduler import events
from lorimer.scheduler.driver import Driver
from lorimer.scheduler.owner import Owner
from lorimer.scheduler.placement import replica_configs
from lorimer.scheduler.recovery import place_lost
from lorimer.scheduler.runs import Operation
from lorimer.scheduler.samples import Sample
from lorimer.scheduler.wakeups import Kind, Wakeup, Wakeups
from lorimer.store import futures, leases, owners, runs

log = logging.getLogger("lorimer.scheduler")


@dataclass(frozen=True)
class LeaseConfig:
    node: str
    door: str
    """The address at which API replicas reach this process; empty without one."""
    lease_seconds: float = 10.0
    max_replicas: int = 0
    """Most replicas that this process computes; 0 is no limit."""
    claims: tuple[str, ...] = ()
    """Patterns of the names of replicas that this process may compute; empty is any."""
    sweep_seconds: float = 60.0

    def may_claim(self, name: str) -> bool:
        return not self.claims or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.claims)

    @property
    def look_seconds(self) -> float:
        """How often to extend the lease and to look for requests whose wake-up was lost."""
        return self.lease_seconds / 5


class Leases:
    """The lease of one process. ``on_fenced`` is called, on any thread, when the process must end."""

    def __init__(
        self,
        owner: Owner,
        models: Mapping[str, EngineConfig],
        num_replicas: Mapping[str, int],
        config: LeaseConfig,
        on_fenced: Callable[[str], None],
    ) -> None:
        self.owner_id = owner.owner_id
        """The fencing token."""
        self._owner, self._store, self._config, self._on_fenced = owner, owner.store, config, on_fenced
        self._engines = replica_configs(models, num_replicas)
        for pattern in config.claims:
            if not fnmatch.filter(self._engines, pattern):
                raise InvalidInput(
                    f"worker_claims has {pattern!r}, which names no replica; there are {', '.join(self._engines)}"
                )
        self._wakeups: Wakeups | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_sweep = 0.0

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Become an owner, and begin to claim replicas."""
        config = self._config
        names = {name: base_model for name, (base_model, _) in self._engines.items()}
        await self._store.write(owners.define, names)
        await self._store.write(owners.register, self.owner_id, config.node, config.door, config.lease_seconds)
        self._store.set_fence(self._check)
        self._wakeups = Wakeups(self._store.url, self._on_wakeup)
        self._owner.results.on_settled = self._settled
        self._begin(self._repeat())

    async def close(self, timeout: float) -> None:
        """Finish what is being computed, take snapshots, and leave the replicas to others."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        renewing = asyncio.create_task(self._keep_renewing())
        try:
            await self._owner.close(timeout)
        finally:
            renewing.cancel()
        try:
            await self._store.write(owners.resign, self.owner_id)
        except (StorageError, Fenced) as error:
            log.warning("the lease runs out by itself: %s", error)
        if self._wakeups is not None:
            self._wakeups.send("replicas")
            await asyncio.to_thread(self._wakeups.close)

    def _check(self, connection: Connection) -> None:
        try:
            owners.check(connection, self.owner_id, self._config.lease_seconds)
        except Fenced as error:
            self._on_fenced(str(error))
            raise

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────────

    async def _repeat(self) -> None:
        while True:
            try:
                await self._renew()
                await self._claim()
                await self._place_lost()
                for place in list(self._owner.drivers):
                    await self._look(place)
                await self._sweep()
            except StorageError as error:
                log.warning("the database cannot be reached: %s", error)
            except Exception:
                log.exception("keeping the lease failed; retrying")
            await asyncio.sleep(self._config.look_seconds * random.uniform(0.8, 1.0))

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._config.look_seconds)
            await self._renew()

    async def _renew(self) -> None:
        states = {place: state_of(driver) for place, driver in self._owner.drivers.items()}
        await self._store.write(owners.renew, self.owner_id, self._config.lease_seconds, states)

    async def _claim(self) -> None:
        """Take replicas without an owner, one at a time, so that owners which start together share them."""
        gone = await self._store.write(owners.expire, self._config.lease_seconds)
        if gone:
            log.warning("the lease of %s ran out; their replicas are taken over", ", ".join(gone))
        while self._has_room:
            unclaimed = (name for name in self._engines if name not in self._owner.drivers)
            free = [name for name in unclaimed if self._config.may_claim(name)]
            name = await self._store.write(owners.claim, self.owner_id, free) if free else None
            if name is None:
                return
            await self._open(name)
            await asyncio.sleep(self._config.look_seconds * random.uniform(0.05, 0.15))

    @property
    def _has_room(self) -> bool:
        limit = self._config.max_replicas
        return not limit or len(self._owner.drivers) < limit

    async def _open(self, place: str) -> None:
        base_model, config = self._engines[place]
        index = sum(driver.slot.config.num_devices for driver in self._owner.drivers.values())
        driver = self._owner.open(place, base_model, msgspec.structs.replace(config, device_index=index))
        num_requests = await self._owner.take_up(place)
        log.info("computing replica %s, with %d unfinished requests", place, num_requests)
        driver.slot.start()
        self._send("replicas")

    async def _place_lost(self) -> None:
        """Move the requests of replicas that nobody has claimed for a lease to others."""
        moved = await self._store.write(_place_lost, self._config.lease_seconds, random.getrandbits(64))
        for place, request_ids in moved.items():
            self._send("arrived", place, request_ids)

    async def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._last_sweep < self._config.sweep_seconds:
            return
        self._last_sweep = now
        # One owner does this for all. The lease outlives the sweep: it also says that this one is done.
        if await self._store.write(leases.take, "sweep", self.owner_id, self._config.sweep_seconds * 0.9):
            await self._owner.sweep()

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────

    def _on_wakeup(self, wakeup: Wakeup) -> None:
        if wakeup.kind == "arrived" and wakeup.place in self._owner.drivers:
            self._begin(self._look(wakeup.place, wakeup.request_ids))
        elif wakeup.kind == "lost":
            for place in self._owner.drivers:
                self._begin(self._look(place))

    async def _look(self, place: str, request_ids: tuple[str, ...] = ()) -> None:
        """Hand requests to a replica that it does not have yet, and tell it about numbers that will not arrive."""
        await self._owner.take_up(place, request_ids, reads_all=True)
        driver = self._owner.drivers[place]
        missing = {run.model_id: seq for run in driver.core.runs.values() if (seq := run.missing_seq) is not None}
        if missing:
            for model_id, seq_id in (await self._store.read(futures.numbers_refused, missing)).items():
                driver.post(events.Refused(model_id, seq_id))

    def _settled(self, operation: Operation) -> None:
        # A client waits for one request, or for any sample of its sampling session.
        self._send("settled", operation.lane if isinstance(operation, Sample) else "", (operation.request_id,))

    def _send(self, kind: Kind, place: str = "", request_ids: Sequence[str] = ()) -> None:
        if self._wakeups is not None:
            self._wakeups.send(kind, place, request_ids)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("requests were not taken up; they are looked for again: %s", error)


def state_of(driver: Driver) -> owners.ReplicaState:
    """Return what API replicas read of a replica."""
    status = driver.status()
    load = {**dataclasses.asdict(status), **dataclasses.asdict(driver.load())}
    info = None if status.info is None else msgspec.to_builtins(status.info)
    return owners.ReplicaState(status.state, info, {key: value for key, value in load.items() if key != "info"})


def _place_lost(c: Connection, lease_seconds: float, seed: int) -> dict[str, list[str]]:
    live = _live(c, lease_seconds)
    names = [name for several in live.values() for name in several]
    if not (live and (futures.has_others(c, names) or runs.has_others(c, names))):
        return {}
    return place_lost(c, _live(c, lease_seconds, lock=True), seed)


def _live(c: Connection, lease_seconds: float, *, lock: bool = False) -> dict[str, list[str]]:
    """Return the replicas that have an owner, or may soon have one again, by base model."""
    live: dict[str, list[str]] = {}
    for row in owners.list_replicas(c, lock=lock):
        if row.owner_id is not None or row.changed_seconds <= lease_seconds:
            live.setdefault(row.base_model, []).append(row.name)
    return live
