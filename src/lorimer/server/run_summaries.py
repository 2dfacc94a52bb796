"""Brings the summaries of runs up to date: reads what was measured since, and stores last, smallest and largest values.

Of several servers on one database, one at a time does it. Runs whose summaries take long, such as those with a thousand
metrics, are summarised less often, so that together they take about a hundredth of the time: they hold the GIL, for
which every request of every user would wait.
"""

import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from lorimer.store import leases, run_curves
from lorimer.store.database import Store

T = TypeVar("T")

LEASE_SECONDS = 30.0
HEAVY_SECONDS = 0.01
"""A run whose summary takes more processor time than this waits while another such run rests."""
RESTS_PER_WORK = 100
MAX_REST_SECONDS = 30.0


class Summariser:
    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._holder = secrets.token_hex(16)
        self._after: int | None = None
        self._next_after = 0
        self._heavy: set[str] = set()
        self._postponed: dict[str, None] = {}
        """Runs with new metrics, the one that has waited longest first."""
        self._rests_until = 0.0

    async def advance(self) -> None:
        """Summarise the runs that have new metrics, except those that must wait.

        Entries of concurrent transactions may be committed out of order, so those since the last call but one are
        looked at again.
        """
        if self._after is None:
            found, newest = await self._store.read(run_curves.unsummarised_runs)
            self._after = self._next_after = newest
            self._postponed = dict.fromkeys(found)
        found, newest = await self._store.read(run_curves.changed_runs, self._after)
        changed = self._postponed | dict.fromkeys(found)
        if changed and not await self._store.write(leases.take, "run-summaries", self._holder, LEASE_SECONDS):
            return
        self._postponed = changed
        for run_id in list(changed):
            if run_id not in self._heavy or self._clock() >= self._rests_until:
                await self._summarise(run_id)
                del changed[run_id]
        self._after, self._next_after = self._next_after, newest

    async def _summarise(self, run_id: str) -> None:
        states, seconds = await self._store.read(_timed, lambda c: run_curves.advance(c, run_id))
        if states.is_changed:
            parts = states.parts
            _, more = await self._store.write(_timed, lambda c: run_curves.store_summary(c, run_id, parts))
            seconds += more
        if seconds <= HEAVY_SECONDS:
            self._heavy.discard(run_id)
            return
        self._heavy.add(run_id)
        self._rests_until = self._clock() + min(seconds * RESTS_PER_WORK, MAX_REST_SECONDS)


def _timed(c: Connection, work: Callable[[Connection], T]) -> tuple[T, float]:
    """Return the result of ``work`` and the processor time that it took."""
    began = time.thread_time()
    return work(c), time.thread_time() - began
