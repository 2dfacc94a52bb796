"""Which runs the engine holds when there are more than it has room for: those that wait take turns with the others.

Runs whose clients are away leave first. If none are, those that have been in memory longest leave for those that have
waited longest. All who wait at a time come in together, and the next have to wait until the engine has worked several
times as long as it took to move them.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lorimer.scheduler.background import Background
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.isolation import Isolation
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.restoring import Restorer
from lorimer.scheduler.runs import RunState
from lorimer.scheduler.snapshots import Snapshots

IDLE_SECONDS = 0.5
"""A run whose client has not come back for so long counts as idle: between two steps of a loop it always does."""
_LEAST_SECONDS = 1.0
_WORTH = 3.0
"""Busy runs stay so many times as long as the engine needs to save those that leave and to load those that come."""


@dataclass(frozen=True)
class Exchange:
    """Busy runs that had to leave together."""

    began: float = -math.inf
    num_runs: int = 0


class Residents:
    def __init__(
        self,
        runs: Mapping[str, RunState],
        slot: EngineSlot,
        limits: SchedulerLimits,
        isolation: Isolation,
        snapshots: Snapshots,
        restorer: Restorer,
        background: Background,
        on_time: Callable[[], None],
    ) -> None:
        """``on_time`` is called when a run may have to leave, although nothing has happened but the time."""
        self._runs, self._slot, self._limits, self._isolation = runs, slot, limits, isolation
        self._snapshots, self._restorer, self._background = snapshots, restorer, background
        self._on_time = on_time
        self._last = Exchange()
        self._second_look: asyncio.TimerHandle | None = None

    def bring_in(self) -> None:
        """Have the engine hold the runs that have something to do."""
        now = time.monotonic()
        waiting = [s for s in self._runs.values() if s.phase == "absent" and s.has_work and s.retry_at <= now]
        if not waiting:
            return
        if not self._slot.is_ready:
            self._slot.start()
            return
        if self._isolation.is_on:
            waiting = [] if self._isolation.is_busy() else [state for state in waiting if state.has_suspect][:1]
        waiting.sort(key=lambda state: state.waiting_since)
        held = [state for state in self._runs.values() if state.phase in ("loaded", "restoring")]
        room = max(0, self._limits.max_loaded_runs - len(held))
        for state in waiting[:room]:
            state.phase = "restoring"
            state.restoring = self._background.spawn(self._restorer.restore(state))
        self._make_room(len(waiting) - room, held)

    def _make_room(self, num_wanted: int, held: Sequence[RunState]) -> None:
        num_wanted -= sum(state.is_leaving for state in held)
        if num_wanted <= 0:
            return
        now = time.monotonic()
        leaving = leaving_runs(held, num_wanted, now, self._limits.residence_seconds, self._last)
        if used := [state for state in leaving if not is_away(state, now)]:
            self._last = Exchange(now, len(used))
        for state in leaving:
            self._snapshots.park(state, is_forced=state in used)
        if num_wanted > len(leaving) and self._second_look is None:
            self._second_look = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._second_look = None
        self._on_time()

    def close(self) -> None:
        if self._second_look is not None:
            self._second_look.cancel()


def is_away(state: RunState, now: float) -> bool:
    """Whether nobody has used a run for a while."""
    return state.is_idle and state.last_used <= now - IDLE_SECONDS


def leaving_runs(
    held: Sequence[RunState], num_wanted: int, now: float, most_seconds: float, last: Exchange
) -> list[RunState]:
    """Up to so many runs that make room now, in the order they do.

    Those whose clients are away, the longest unused first; then, some time after the ``last`` that had to leave, those
    that are used, the longest loaded first.
    """
    staying = [state for state in held if state.phase == "loaded" and state.saving is None]
    leaving = sorted((state for state in staying if is_away(state, now)), key=lambda state: state.last_used)
    if now - last.began >= residence(staying, last.num_runs, most_seconds):
        used = [state for state in staying if not is_away(state, now) and has_been_served(state, now, most_seconds)]
        leaving += sorted(used, key=lambda state: state.loaded_at)
    return leaving[:num_wanted]


def has_been_served(state: RunState, now: float, most_seconds: float) -> bool:
    """Whether it may have to leave: each stay is to be of use."""
    return (state.has_had_turn or not state.ready) and now - state.loaded_at >= min(most_seconds, _LEAST_SECONDS)


def residence(staying: Sequence[RunState], num_moved: int, most_seconds: float) -> float:
    """How long nobody has to leave after so many had to."""
    costs = [state.snapshot_cost for state in staying if state.snapshot_cost]
    moving = 2 * num_moved * sum(costs) / max(1, len(costs))
    return min(most_seconds, max(_LEAST_SECONDS, _WORTH * moving))
