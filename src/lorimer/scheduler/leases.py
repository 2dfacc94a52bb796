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
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Connection

from lorimer.engine.config import EngineConfig
from lorimer.engine.reservations import HOST, fits_full_run
from lorimer.errors import Fenced, InvalidInput, StorageError
from lorimer.scheduler import events
from lorimer.scheduler.driver import Driver
from lorimer.scheduler.owner import Owner
from lorimer.scheduler.placement import full_configs, is_full, replica_configs
from lorimer.scheduler.recovery import place_lost
from lorimer.scheduler.runs import Operation
from lorimer.scheduler.samples import Sample
from lorimer.scheduler.wakeups import Kind, Wakeup, Wakeups
from lorimer.store import futures, leases, owners, runs

log = logging.getLogger("lorimer.scheduler")

MIN_LOOK_SECONDS = 0.5
"""Between two looks for replicas of full runs without an owner."""


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


@dataclass(frozen=True)
class _Wanted:
    """A replica for full runs that has no owner, and requests that wait for one."""

    name: str
    waits_seconds: float
    """Of the oldest request."""
    creates_run: bool
    has_direct: bool
    """Whether a sample that is not journaled waits."""
    info: dict[str, Any] | None
    """The description of its base model, if an engine has loaded that."""


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
        self._engines = replica_configs(models, num_replicas) | full_configs(models, owner.limits.max_full_runs)
        for pattern in config.claims:
            if not fnmatch.filter(self._engines, pattern):
                raise InvalidInput(
                    f"worker_claims has {pattern!r}, which names no replica; there are {', '.join(self._engines)}"
                )
        self._wakeups: Wakeups | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_sweep = 0.0
        self._claiming = asyncio.Lock()
        """Held while replicas for full runs are claimed or given back."""
        self._looked_at = 0.0
        self._left: set[str] = set()
        """Replicas that this process does not compute any more, although their rows still name it."""
        self._refused_at: dict[str, float] = {}
        """When an engine here refused to start for such a replica."""

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
                await self._give_back()
                await self._claim_full()
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
            unclaimed = (name for name in self._engines if name not in self._owner.drivers and not is_full(name))
            free = [name for name in unclaimed if self._config.may_claim(name)]
            name = await self._store.write(owners.claim, self.owner_id, free) if free else None
            if name is None:
                return
            await self._open(name)
            await asyncio.sleep(self._config.look_seconds * random.uniform(0.05, 0.15))

    @property
    def _has_room(self) -> bool:
        limit = self._config.max_replicas
        return not limit or sum(not is_full(name) for name in self._owner.drivers) < limit

    # ── replicas for full runs: claimed when a run needs one, by a process with the memory ────────────────

    async def _claim_full(self) -> None:
        """Take replicas for full runs that have requests, as far as this machine has the memory."""
        now, own, config = asyncio.get_running_loop().time(), self._owner.drivers, self._config
        if now - self._looked_at < MIN_LOOK_SECONDS:
            return  # each request of such a run wakes all processes
        self._looked_at = now
        async with self._claiming:
            names = [name for name in self._engines if is_full(name) and name not in own and config.may_claim(name)]
            for wanted in await self._store.read(_find_wanted, names) if names else ():
                if not await self._takes(wanted):
                    continue
                name = await self._store.write(owners.claim, self.owner_id, [wanted.name])
                if name is not None:
                    await self._open(name, starts=wanted.has_direct)

    async def _takes(self, wanted: _Wanted) -> bool:
        """Return whether to claim a replica, so that the process that claims it can start its engine."""
        now, seconds = asyncio.get_running_loop().time(), self._config.lease_seconds
        if now - self._refused_at.get(wanted.name, -seconds) < seconds:
            return False
        has_waited = wanted.waits_seconds >= seconds
        if wanted.info is None:
            return has_waited
        # Free memory of other devices is known to their engines only.
        if wanted.info["device"] != HOST:
            return True
        # Engines that are starting may not have reserved their memory yet.
        starting = [one for name, one in self._owner.drivers.items() if is_full(name) and not one.slot.is_ready]
        number, ranks = wanted.info["num_parameters"] * (1 + len(starting)), self._engines[wanted.name][1].ranks
        fits = await asyncio.to_thread(fits_full_run, number, ranks, wanted.info["dtype"])
        # A run that nobody has the memory for is refused by an engine, with the numbers. One that exists waits.
        return fits or (wanted.creates_run and has_waited)

    async def _give_back(self) -> None:
        """Leave replicas for full runs without an engine to whoever has the memory when they are needed again."""
        async with self._claiming:
            for place in [name for name, one in self._owner.drivers.items() if is_full(name) and one.is_releasable]:
                slot = self._owner.drivers[place].slot
                if slot.state == "failed" and slot.refusal is not None:
                    self._refused_at[place] = asyncio.get_running_loop().time()
                await self._owner.give_up(place)
                self._left.add(place)
            for place in sorted(self._left):  # also those that the database could not be told of before
                await self._store.write(owners.give_back, self.owner_id, place)
                self._left.remove(place)
                log.info("replica %s is left to others", place)
                self._send("replicas")

    async def _open(self, place: str, *, starts: bool = True) -> None:
        base_model, config = self._engines[place]
        index = sum(driver.slot.config.num_devices for driver in self._owner.drivers.values())
        driver = self._owner.open(place, base_model, msgspec.structs.replace(config, device_index=index))
        num_requests = await self._owner.take_up(place)
        log.info("computing replica %s, with %d unfinished requests", place, num_requests)
        if starts:
            driver.slot.start()
        self._send("replicas")

    async def _place_lost(self) -> None:
        """Move the requests of replicas that nobody has claimed for a lease to others."""
        full = [name for name in self._engines if is_full(name)]
        moved = await self._store.write(_place_lost, self._config.lease_seconds, random.getrandbits(64), full)
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
        elif wakeup.kind == "arrived" and is_full(wakeup.place):
            self._begin(self._claim_full())
        elif wakeup.kind == "lost":
            for place in self._owner.drivers:
                self._begin(self._look(place))

    async def _look(self, place: str, request_ids: tuple[str, ...] = ()) -> None:
        """Hand requests to a replica that it does not have yet, and tell it about numbers that will not arrive."""
        if (driver := self._owner.drivers.get(place)) is None:
            return  # it was left to others
        await self._owner.take_up(place, request_ids, reads_all=True)
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


def _find_wanted(c: Connection, names: Sequence[str]) -> list[_Wanted]:
    """Return those of these replicas that have no owner, and requests that wait for one."""
    rows = owners.list_replicas(c)
    waiting = futures.waiting_at(c, names)
    infos = {row.base_model: row.info for row in rows if row.info is not None}
    found = []
    for row in rows:
        is_wanted = row.name in waiting or row.state == owners.WANTED
        if row.owner_id is None and row.name in names and is_wanted:
            since, creates_run = waiting.get(row.name, (None, False))
            seconds = 0.0 if since is None else (datetime.now(UTC) - since).total_seconds()
            is_direct = row.state == owners.WANTED
            found.append(_Wanted(row.name, seconds, creates_run, is_direct, infos.get(row.base_model)))
    return found


def _place_lost(c: Connection, lease_seconds: float, seed: int, full: Sequence[str]) -> dict[str, list[str]]:
    live = _live(c, lease_seconds, full)
    names = [name for several in live.values() for name in several]
    if not (live and (futures.has_others(c, names) or runs.has_others(c, names))):
        return {}
    return place_lost(c, _live(c, lease_seconds, full, lock=True), seed)


def _live(c: Connection, lease_seconds: float, full: Sequence[str], *, lock: bool = False) -> dict[str, list[str]]:
    """Return the replicas that have an owner, or may soon have one again, by base model; those for ``full`` runs do."""
    live: dict[str, list[str]] = {}
    for row in owners.list_replicas(c, lock=lock):
        if row.owner_id is not None or row.changed_seconds <= lease_seconds or row.name in full:
            live.setdefault(row.base_model, []).append(row.name)
    return live
