"""The scheduler of an API replica: it accepts requests into the journal, and owners in other processes compute them.

An API replica keeps nothing that another lacks. A request names the replica that computes it; a wake-up tells its
owner, and another tells whoever waits that it has ended. Both are hints: owners and this module look by themselves too.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lorimer import types
from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import ModelInfo
from lorimer.errors import Busy, EngineError, InvalidInput, StorageError
from lorimer.scheduler import events, journal
from lorimer.scheduler.doors import DoorClient
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.placement import (
    AcceptAt,
    Load,
    choose_for_run,
    full_configs,
    is_full,
    kind_of,
    replica_configs,
)
from lorimer.scheduler.results import CLONE_STRIDE, Completion
from lorimer.scheduler.runs import Operation, Outcome, QueueState
from lorimer.scheduler.samples import Sample
from lorimer.scheduler.scheduler import Accepted, Replica, Scheduler
from lorimer.scheduler.stats import QueuedRequests, ReplicaStatus, SchedulerStats, ServedModel
from lorimer.scheduler.streaming import DirectSample, new_sample
from lorimer.scheduler.wakeups import Wakeup, Wakeups
from lorimer.store import futures, owners, runs, tokenizers
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.runs import Method
from lorimer.store.scratch import Scratch

log = logging.getLogger("lorimer.scheduler")

REFRESH_SECONDS = 1.0
"""How often the rows of replicas are read."""
LOOK_SECONDS = 5.0
"""How often a request is looked at while somebody waits for it, in case its wake-up was lost."""


class RemoteReplica:
    """A replica that another process computes, or that waits for an owner."""

    def __init__(self, row: owners.Replica, scheduler: "RemoteScheduler") -> None:
        self.name, self.place, self.kind = row.base_model, row.name, kind_of(row.name)
        self._scheduler = scheduler
        self.update(row)

    def update(self, row: owners.Replica) -> None:
        self.row, self._read_at = row, time.monotonic()
        self.num_placed = 0
        """Runs placed here since the row was read."""

    @property
    def is_owned(self) -> bool:
        return self.row.owner_id is not None

    def load(self) -> Load:
        known = {name: self.row.load[name] for name in Load.__dataclass_fields__ if name in self.row.load}
        if self.kind == "full":  # a process claims it when it has requests
            num_runs = self._scheduler.num_runs_at(self.place) + self.num_placed
            is_usable = not self.is_owned or self.row.state != "failed"
            return Load(**(known if self.is_owned else {}) | {"num_runs": num_runs, "is_usable": is_usable})
        num_runs = known.get("num_runs", 0) + self.num_placed
        is_usable = self.row.state == "ready" if self.kind == "sampler" else self.row.state != "failed"
        return Load(**known | {"num_runs": num_runs, "is_usable": self.is_owned and is_usable})

    def holds(self, model_id: str) -> bool:
        return self.is_owned

    def status(self) -> ServedModel:
        row = self.row
        load = row.load if self.is_owned else {}  # what its last owner said is over
        fields = {name: load.get(name, 0) for name in ServedModel.__dataclass_fields__}
        fields |= {"name": self.name, "replica": self.place, "pids": ()}
        fields |= {"stage": load.get("stage", ""), "error": load.get("error", "")}
        info = None if row.info is None else msgspec.convert(row.info, ModelInfo)
        state = row.state if row.state in ("idle", "starting", "ready", "failed") else "idle"
        return ServedModel(**fields | {"state": state, "info": info})

    def owned_status(self) -> ReplicaStatus:
        row, left = self.row, self.row.lease_seconds
        if left is not None:
            left = max(0.0, left - (time.monotonic() - self._read_at))
        return ReplicaStatus(self.status(), row.state, row.owner_id, row.node, row.changed_at, left)

    async def info(self) -> ModelInfo:
        """Return the engine's description of its model, when one has been ready."""
        while (info := self.status().info) is None:
            if self.row.state == "failed":
                raise EngineError(self.row.load.get("error", ""))
            await self._scheduler.refreshed()
        return info

    def queue_state(self, operation: Operation) -> tuple[QueueState, str]:
        if not self.is_owned and self.kind == "full":
            return "paused_capacity", f"replica {self.place} waits for a worker with enough free memory"
        if not self.is_owned:
            return "paused_capacity", f"replica {self.place} waits for a process that computes it"
        if self.row.state != "ready":
            return "paused_capacity", f"the engine of {self.name} is starting"
        return "active", f"{self.place} computes {self.row.load.get('num_open_operations', 0)} operations"

    async def submit(self, operation: Operation, event: events.Event) -> events.Admit:
        """Commit a request, and wake its owner."""
        store, limits = self._scheduler.store, self._scheduler.limits
        match event:
            case events.Submitted(operation=Sample() as sample):
                self._check_room(operation, limits)
                row, _ = await store.submit(journal.Accept(sample).apply, sample.payload)
                admitted = events.Admit(sample, row.request_id)
            case events.Submitted(run=None):
                accept = journal.AcceptLoss(operation, limits.max_losses_per_session)
                row, _ = await store.submit(accept.apply)
                admitted = events.Admit(operation, row.request_id)
            case events.Submitted(run=run):
                assert run is not None
                if run.corrupted:
                    raise InvalidInput(run.corrupted)
                self._check_room(operation, limits)
                row, _ = await store.submit(AcceptAt(operation, limits).apply, operation.payload)
                admitted = events.Admit(operation, row.request_id, operation.lane)
            case events.CreateSubmitted(transaction=create):
                created, row, _ = await store.submit(create.apply)
                admitted = events.Admit(operation, row.request_id, created.model_id)
            case events.UnloadSubmitted(run=run):
                await store.submit(journal.AcceptUnload(operation, run.model_id).apply)
                self._unload(run.model_id)
                return events.Admit(operation, operation.request_id, run.model_id)
            case events.ConsumeSubmitted(run=run, reason=reason):
                await store.submit(journal.Consume(operation, run, reason).apply)
                self._scheduler.send_arrived(operation.place or self.place, "")
                return events.Admit(operation, operation.request_id, run.model_id)
            case _:
                raise TypeError(f"{type(event).__name__} is no submit")
        self._scheduler.submitted(operation)
        if row.state == "queued":
            self._scheduler.send_arrived(row.place or self.place, row.request_id)
        return admitted

    def _check_room(self, operation: Operation, limits: SchedulerLimits) -> None:
        load = self.load()
        if operation.kind == "sample" and load.num_samples >= limits.max_queued_samples:
            raise Busy(f"{load.num_samples} samples are waiting for {self.place}; try again in a moment")
        if operation.kind != "sample" and load.open_bytes >= limits.max_open_bytes:
            raise Busy(
                f"operations of {load.open_bytes} bytes are waiting for {self.place} (max_open_bytes is"
                f" {limits.max_open_bytes}): try again in a moment"
            )

    def _unload(self, model_id: str) -> None:
        if (door := self._scheduler.door(self.row.door)) is not None:
            door.unload(self.place, model_id)

    def cancel(self, request_id: str) -> None:
        if (door := self._scheduler.door(self.row.door)) is not None:
            door.cancel(self.place, request_id)

    def start_sample(
        self, user_id: str, weights_id: str | None, request: types.SampleRequest, grammar: str, stream: bool
    ) -> DirectSample:
        sample = new_sample(self.name, user_id, weights_id, request, grammar, stream)
        self._check_room(sample, self._scheduler.limits)
        door = self._scheduler.door(self.row.door)
        if door is None and self.kind == "full":
            self._scheduler.want(self.place)
            raise Busy("these weights wait for a worker with enough free memory to load them; try again in a moment")
        if door is None:
            raise Busy(f"replica {self.place} waits for a process that computes it; try again in a moment")
        return door.start_sample(self.place, sample)


class RemoteScheduler(Scheduler):
    """A scheduler without replicas of its own."""

    def __init__(
        self,
        store: Store,
        directory: DataDirectory,
        models: Mapping[str, EngineConfig],
        limits: SchedulerLimits,
        num_replicas: Mapping[str, int],
        scratch: Scratch,
        door_token: str,
        on_keys_changed: Callable[[], None] = lambda: None,
        on_keys_looked_for: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_keys_changed`` is called when another process says so, ``on_keys_looked_for`` now and then."""
        super().__init__(store, directory, models, limits, num_replicas, scratch)
        self._token = door_token
        self._on_keys_changed, self._on_keys_looked_for = on_keys_changed, on_keys_looked_for
        self._remote: dict[str, RemoteReplica] = {}
        self._replicas = self._remote
        self._doors: dict[str, DoorClient] = {}
        self._wakeups: Wakeups | None = None
        self._waiting: dict[str, set[asyncio.Event]] = {}
        """Who waits for a request, or for any sample of a sampling session, by its id."""
        self._refreshed = asyncio.Event()
        self._stats = SchedulerStats([], {}, [])
        self._tokenizers: dict[str, Path] = {}
        """Local copies of the tokenizers of base models whose directory is on another machine."""
        self._task: asyncio.Task[None] | None = None
        self._full: list[str] = []
        """The replicas for full runs."""

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        configs = replica_configs(self.models, self._num_replicas)
        configs |= full_configs(self.models, self.limits.max_full_runs)
        names = {place: name for place, (name, _) in configs.items()}
        self._full = [place for place in names if is_full(place)]
        await self.store.write(owners.define, names)
        await self._refresh()
        self._wakeups = Wakeups(self.store.url, self._on_wakeup)
        self._task = asyncio.create_task(self._repeat())

    async def close(self, timeout: float = 30.0) -> None:
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(door.close() for door in self._doors.values()))
        await self.usage.flush()
        if self._wakeups is not None:
            await asyncio.to_thread(self._wakeups.close)

    async def sweep(self) -> None:
        """Owners delete what has expired."""

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            self._on_keys_looked_for()
            try:
                await self._refresh()
            except StorageError as error:
                log.warning("the replicas are not known: %s", error)

    async def _refresh(self) -> None:
        rows = await self.store.read(owners.list_replicas)
        queued = await self.store.read(futures.count_unfinished)
        self._places = await self.store.read(runs.held_by, self._full) if self._full else {}
        for row in rows:
            if row.base_model in self.models and (not is_full(row.name) or row.name in self._full):
                if row.name in self._remote:
                    self._remote[row.name].update(row)
                else:
                    self._remote[row.name] = RemoteReplica(row, self)
        known = {replica.row.door for replica in self._remote.values()}
        for address in [address for address in self._doors if address not in known]:
            await self._doors.pop(address).close()
        self._stats = SchedulerStats(
            [
                QueuedRequests(user, kind, count, tokens, lane if is_run(lane) else None)
                for user, kind, lane, count, tokens in queued
            ],
            dict(_count_by_run((lane, count) for _, _, lane, count, _ in queued)),
            self.served_models(),
        )
        self._refreshed.set()
        self._refreshed = asyncio.Event()

    async def refreshed(self) -> None:
        """Wait until the rows of replicas have been read again."""
        await self._refreshed.wait()

    def door(self, address: str | None) -> DoorClient | None:
        if not address:
            return None
        if address not in self._doors:
            self._doors[address] = DoorClient(address, self._token)
        return self._doors[address]

    def num_runs_at(self, place: str) -> int:
        """Return how many full runs are assigned to a replica."""
        return sum(one == place for one in self._places.values())

    def want(self, place: str) -> None:
        """Ask workers to claim a replica."""

        async def ask() -> None:
            await self.store.write(owners.want, place)
            self.send_arrived(place, "")

        self._soon(ask())

    def replica_states(self) -> list[ReplicaStatus]:
        found = [self._remote[replica.place] for name in self.models for replica in self._replicas_of(name)]
        return [replica.owned_status() for replica in found if replica.is_owned or replica.kind != "full"]

    def stats(self) -> SchedulerStats:
        return self._stats

    async def model_info(self, name: str) -> ModelInfo:
        """Return the description of a base model; its directory here has the files of its tokenizer."""
        info = await super().model_info(name)
        if Path(info.directory).is_dir():
            return info
        if name not in self._tokenizers:
            self._tokenizers[name] = await tokenizers.fetch(self.scratch.objects, name, self.directory.path)
        return msgspec.structs.replace(info, directory=str(self._tokenizers[name]))

    async def _submit(self, replica: Replica, operation: Operation, event: events.Event) -> Accepted:
        """Commit a request. Its owner fetches what it reads."""
        if self._is_closing:
            raise Busy("the server is shutting down")
        admitted = await replica.submit(operation, event)
        return Accepted(admitted.request_id, admitted.model_id)

    def start_engine(self, name: str) -> None:
        """Owners start their engines."""

    # ── placing ───────────────────────────────────────────────────────────────────────────────────────

    def _replica_of_run(
        self, model_id: str, base_model: str, replica: str | None = None, method: Method = "lora"
    ) -> Replica:
        replicas = self.full_replicas(base_model) if method == "full" else self.replicas(base_model)
        if replica is not None and (found := self._remote.get(replica)) is not None:
            return found
        chosen = choose_for_run(replicas, self._chance)
        if isinstance(chosen, RemoteReplica):
            chosen.num_placed += 1
        return chosen

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────

    def submitted(self, operation: Operation) -> None:
        """Record the use of what a request belongs to."""
        if isinstance(operation, Sample):
            self.usage.sampler_used(operation.lane)
        elif operation.kind != "create_custom_loss" and not operation.lane.endswith(":models"):
            self.usage.run_used(operation.lane)

    def send_arrived(self, place: str, request_id: str) -> None:
        assert self._wakeups is not None
        self._wakeups.send("arrived", place, (request_id,) if request_id else ())

    def send_keys_changed(self) -> None:
        """Tell the other API replicas that keys or quotas have changed."""
        if self._wakeups is not None:
            self._wakeups.send("keys")

    def _on_wakeup(self, wakeup: Wakeup) -> None:
        match wakeup.kind:
            case "settled":
                self._wake([wakeup.place, *wakeup.request_ids])
            case "lost":
                self._wake(list(self._waiting))
            case "replicas":
                self._soon(self._refresh())
            case "keys":
                self._on_keys_changed()

    def _wake(self, keys: Sequence[str]) -> None:
        for key in keys:
            for news in self._waiting.get(key, ()):
                news.set()

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def wait(self, request_id: str, timeout: float) -> Outcome:
        """Wait at most ``timeout`` seconds, and return the outcome or state of a request."""
        outcome: Outcome | None = await self._until(
            request_id,
            timeout,
            lambda: self.store.read(journal.outcome_of, request_id),
            lambda outcome: outcome is None or outcome.state != "pending",
        )
        if outcome is None:
            return Outcome("gone", error=f"there is no request {request_id!r}; its result may have expired")
        if outcome.state == "done":
            self.usage.fetched(request_id)
        if outcome.state == "pending":
            row = await self.store.read(futures.get, request_id)
            replica = self._remote.get((row.place if row is not None else "") or "")
            if row is not None and replica is not None:
                operation = Operation(request_id, row.user_id, "", replica.name, row.lane, row.seq_id or 0, row.kind)
                return Outcome("pending", *replica.queue_state(operation))
        return outcome

    async def _until(
        self,
        key: str,
        timeout: float,
        read: Callable[[], Coroutine[Any, Any, Any]],
        is_enough: Callable[[Any], bool],
    ) -> Any:
        """Read again whenever there is news of ``key``, until that is enough or the time is over."""
        deadline, news = time.monotonic() + timeout, asyncio.Event()
        self._waiting.setdefault(key, set()).add(news)
        try:
            while True:
                news.clear()
                found = await read()
                left = deadline - time.monotonic()
                if is_enough(found) or left <= 0:
                    return found
                waiting = asyncio.ensure_future(news.wait())
                try:
                    await asyncio.wait([waiting], timeout=min(left, LOOK_SECONDS))
                finally:
                    waiting.cancel()
        finally:
            self._waiting[key].discard(news)
            if not self._waiting[key]:
                del self._waiting[key]

    async def cancel(self, request_id: str) -> None:
        row = await self.store.read(futures.get, request_id)
        replica = None if row is None or row.kind != "sample" else self._remote.get(row.place or "")
        if replica is not None:
            replica.cancel(request_id)

    async def completions(
        self, sampling_session_id: str, clone_id: int, prev_cursor: int, timeout: float, retrieved_ids: list[str]
    ) -> tuple[list[Completion], int]:
        """Return what finished since ``prev_cursor``, waiting for the first if there is nothing yet."""
        if retrieved_ids:
            await self.store.write(journal.release, sampling_session_id, retrieved_ids)
        numbers = range(clone_id * CLONE_STRIDE, (clone_id + 1) * CLONE_STRIDE)
        rows, cursor = await self._until(
            sampling_session_id,
            timeout,
            lambda: self.store.read(futures.finished_after, sampling_session_id, numbers, prev_cursor),
            lambda found: bool(found[0]),
        )
        return [
            Completion(row.request_id, "finished" if row.state == "done" else "failed", row.result_size) for row in rows
        ], cursor


def is_run(lane: str) -> bool:
    """Return whether a lane is a run; others are sampling sessions, and the models and losses of a session."""
    return ":train:" in lane


def _count_by_run(counts: Iterable[tuple[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for lane, count in counts:
        if is_run(lane):
            found[lane] += count
    return found
