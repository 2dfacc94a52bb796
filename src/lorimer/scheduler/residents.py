"""Which runs the engine holds when there are more than it has room for: those that wait take turns with the others.

Runs whose clients are away leave first. If none are, those that have been in memory longest leave for those that have
waited longest, no sooner than they had several times as long as moving them all takes the engine.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

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
"""A busy run stays so many times as long as the engine needs to save those that leave and to load those that come."""


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
        leaving = leaving_runs(held, num_wanted, now, self._limits.residence_seconds)
        for state in leaving:
            self._snapshots.park(state, is_forced=not is_away(state, now))
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


def leaving_runs(held: Iterable[RunState], num_wanted: int, now: float, most_seconds: float) -> list[RunState]:
    """Up to so many runs that make room now, in the order they do.

    Those whose clients are away, the longest unused first; then any that have had their time, the longest loaded first.
    """
    staying = [state for state in held if state.phase == "loaded" and state.saving is None]
    away = sorted((state for state in staying if is_away(state, now)), key=lambda state: state.last_used)
    served = [state for state in staying if state.has_had_turn or not state.ready]  # so that each stay is of use
    used = [state for state in served if not is_away(state, now)]
    used = sorted(used, key=lambda state: state.loaded_at)[: max(0, num_wanted - len(away))]
    costs = [state.snapshot_cost for state in staying if state.snapshot_cost]
    moving = 2 * len(used) * sum(costs) / max(1, len(costs))
    seconds = min(most_seconds, max(_LEAST_SECONDS, _WORTH * moving))
    return [*away, *(state for state in used if now - state.loaded_at >= seconds)][:num_wanted]
