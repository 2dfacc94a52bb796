"""What the scheduler does next: `settle` advances the runs that changed, then the policies in `POLICIES` decide.

Runs that wait for an engine take turns with those it holds: runs whose clients are away are evicted first; if there are
none, those loaded longest make room for those that have waited longest. All waiting runs are loaded together, and the
next eviction waits until the engine has worked several times as long as moving them took.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from lorimer.errors import Busy, InvalidInput, LorimerError
from lorimer.scheduler import journal, restoring, snapshots
from lorimer.scheduler.batching import Queue, next_turn
from lorimer.scheduler.events import Closed, SendEarly, SetTimer, Timer
from lorimer.scheduler.runs import Flight, Operation, Outcome, RunState

if TYPE_CHECKING:
    from lorimer.scheduler.core import Core

MAX_TURNS = 2
"""Turns sent to the engine: it computes one while the next is queued."""
IDLE_SECONDS = 0.5
"""A run unused for this long counts as idle; between two steps of a training loop less time passes."""
MIN_RESIDENCE_SECONDS = 1.0
RESIDENCE_WORTH = 3.0
"""Busy runs stay this many times as long as the engine needs to save those evicted and to load the others."""
TIMER_SLACK_SECONDS = 0.001
"""A timer may fire this much early, by rounding."""
DRAIN_SECONDS = 5.0
"""How long to wait for running samples when the server closes."""


@dataclass
class WaitingRuns:
    """Runs with work but no engine, longest waiting first."""

    runs: dict[str, RunState] = field(default_factory=dict)
    """By model_id."""
    _heap: list[tuple[float, int, RunState]] = field(default_factory=list)
    _number: int = 0

    def add(self, run: RunState) -> None:
        if self.runs.get(run.model_id) is not run:
            self.runs[run.model_id] = run
            self._number += 1
            heapq.heappush(self._heap, (run.waiting_since, self._number, run))

    def take(self) -> RunState:
        while True:
            since, _, run = heapq.heappop(self._heap)
            if self.runs.get(run.model_id) is run and run.waiting_since == since:
                del self.runs[run.model_id]
                return run
            if self.runs.get(run.model_id) is run:
                self._number += 1
                heapq.heappush(self._heap, (run.waiting_since, self._number, run))


@dataclass(frozen=True)
class Eviction:
    """Busy runs that were evicted together."""

    began: float = -math.inf
    num_runs: int = 0


@dataclass
class Idle:
    """How long an engine has had nothing to do."""

    since: float | None = None
    is_over: bool = False
    """Nothing will come: its run was unloaded, or has been idle long enough."""
    is_timed: bool = False


class EarlyForward:
    """The one ``forward`` that an idle engine may compute while its row is being committed.

    A ``forward`` changes nothing, so that one whose row is not accepted costs only its computation. The order of
    commits and answers stays: the client gets its ``request_id`` after the row is committed, and the reply is used only
    from then on, when the operation's turn comes.
    """

    def __init__(self, core: "Core") -> None:
        self._core = core
        self._flight: Flight | None = None

    @property
    def is_running(self) -> bool:
        return self._flight is not None

    def begin(self, run: RunState, operation: Operation) -> None:
        """Send a ``forward`` that is about to be committed if it is certain to be the next of an idle engine."""
        core = self._core
        is_engine_idle = core.is_ready and not (core.turns or core.is_isolating or self.is_running)
        if is_engine_idle and not core.is_closing and run.is_next(operation):
            self._flight = operation.send_early()
            core.emit(SendEarly(operation, self._flight))

    def replied(self, flight: Flight) -> None:
        if flight is self._flight:
            self._flight = None

    def engine_ended(self) -> None:
        self._flight = None


def restore_waiting(core: "Core") -> None:
    """Load runs with work into the engine, as far as it has room."""
    if core.is_closing:
        return
    if not core.is_ready:
        core.start_engine()
        return
    if core.is_isolating:
        if not core.is_busy and (run := _waiting_suspect(core)) is not None:
            core.waiting.runs.pop(run.model_id, None)
            restoring.begin(core, run)
        return
    for _ in range(min(len(core.waiting.runs), core.limits.max_loaded_runs - len(core.held))):
        restoring.begin(core, core.waiting.take())


def _waiting_suspect(core: "Core") -> RunState | None:
    for suspect in core.suspects:
        run = suspect if isinstance(suspect, RunState) else core.runs.get(suspect.lane)
        if run is not None and run.phase == "absent" and run.has_work:
            return run
    return None


def evict_for_waiting(core: "Core") -> None:
    """Evict runs to make room for waiting ones."""
    num_wanted = len(core.waiting.runs) - len(core.leaving)
    has_room = len(core.held) < core.limits.max_loaded_runs
    if num_wanted <= 0 or has_room or core.is_closing or not core.is_ready or core.is_isolating:
        return
    leaving = runs_to_evict(
        list(core.held.values()), num_wanted, core.now, core.limits.residence_seconds, core.last_eviction
    )
    if used := [run for run in leaving if not is_away(run, core.now)]:
        core.last_eviction = Eviction(core.now, len(used))
    for run in leaving:
        snapshots.park(core, run, is_forced=run in used)
    if num_wanted > len(leaving) and not core.is_evict_timer_set:
        core.is_evict_timer_set = True
        core.emit(SetTimer(Timer("evict"), IDLE_SECONDS))


def is_away(run: RunState, now: float) -> bool:
    """Return whether a run has not been used for a while."""
    return run.last_used <= now - IDLE_SECONDS and run.is_idle


def runs_to_evict(
    held: Sequence[RunState], num_wanted: int, now: float, max_seconds: float, last: Eviction
) -> list[RunState]:
    """Return up to ``num_wanted`` runs to evict, in order.

    First the runs whose clients are away, longest unused first; then, some time after the ``last`` eviction of busy
    runs, runs in use, longest loaded first.
    """
    away: list[RunState] = []
    used: list[RunState] = []
    for run in held:
        if run.phase == "loaded" and run.saving is None:
            (away if is_away(run, now) else used).append(run)
    leaving = sorted(away, key=attrgetter("last_used"))
    if now - last.began >= residence([*away, *used], last.num_runs, max_seconds):
        served = [run for run in used if has_been_served(run, now, max_seconds)]
        leaving += sorted(served, key=attrgetter("loaded_at"))
    return leaving[:num_wanted]


def has_been_served(run: RunState, now: float, max_seconds: float) -> bool:
    """Return whether a run may be evicted: it must have had a turn since it was loaded, and its first barrier.

    Evicted between a gradient and its optimiser step, which the next turn takes, it would be loaded twice for a step.
    """
    ready, is_within_step = run.ready, run.has_had_turn and not run.has_had_barrier
    if ready and is_within_step and not ready[0].is_training:
        return False
    return (run.has_had_turn or not ready) and now - run.loaded_at >= min(max_seconds, MIN_RESIDENCE_SECONDS)


def residence(staying: Sequence[RunState], num_moved: int, max_seconds: float) -> float:
    """Return how long no busy run is evicted after ``num_moved`` were."""
    costs = [run.snapshot_cost for run in staying if run.snapshot_cost]
    moving = 2 * num_moved * sum(costs) / max(1, len(costs))
    return min(max_seconds, max(MIN_RESIDENCE_SECONDS, RESIDENCE_WORTH * moving))


def objection(core: "Core", run: RunState, operation: Operation) -> LorimerError | None:
    """Return why an operation cannot be accepted now, if there is a reason."""
    limits = core.limits
    if core.is_closing:
        return Busy("the server is shutting down")
    if run.phase == "corrupted":
        return InvalidInput(run.error)
    if len(run.operations) >= limits.max_open_operations:
        return Busy(f"run {run.model_id} has {len(run.operations)} unfinished operations; wait for some of them")
    waiting, user_id = core.open_bytes, operation.user_id
    if not waiting.held or waiting.has_room(user_id, operation.size):
        return None
    if waiting.held_by(user_id) or waiting.held + operation.size > 2 * waiting.total:
        return Busy(
            f"operations of {waiting.held} bytes are waiting for {core.name}, {waiting.held_by(user_id)} bytes of "
            f"them yours; {waiting.total} bytes are shared by its users (max_open_bytes): try again in a moment"
        )
    return None


def send_turns(core: "Core") -> None:
    """Send the engine its next training turns."""
    while core.is_ready and len(core.turns) < MAX_TURNS and not core.is_closing:
        is_isolating = core.is_isolating
        if is_isolating and core.is_busy:
            return
        queues: list[Queue] = []
        served: dict[str, float] = {}
        for run in core.ready.values():
            if (ready := run.ready) and (not is_isolating or run.has_suspect):
                queues.append(Queue(run.row.user_id, ready))
                served[run.row.user_id] = core.fair.served(run.row.user_id)
        if not queues:
            return
        core.fair.reach(min(served.values()))
        budget = core.limits.turn_tokens or 2 * core.token_budget
        core.send_turn(next_turn(queues, served.__getitem__, budget, alone=is_isolating))


def send_samples(core: "Core") -> None:
    if not core.is_closing:
        core.sampling.send_next()


def check_losses(core: "Core") -> None:
    if not core.is_closing:
        core.losses.send_next()


def end_idle_engine(core: "Core") -> None:
    """Save and evict a run that has been idle, if its engine is for full runs, and end an engine without a run."""
    idle = core.idle
    if idle is None or not core.is_ready or core.is_closing:
        return
    has_run = any(run.phase != "loaded" or run.has_work or run.running or run.replays for run in core.held.values())
    if core.turns or core.waiting.runs or has_run or any(True for _ in core.sampling.unanswered):
        idle.since, idle.is_over = None, False
        return
    if idle.since is None:
        idle.since = core.now
    left = idle.since + core.limits.full_idle_seconds - core.now
    idle.is_over |= left <= TIMER_SLACK_SECONDS
    if idle.is_over and not core.held:
        core.stop_engine()
        core.idle = Idle(is_timed=idle.is_timed)
    elif idle.is_over:
        for run in [run for run in core.held.values() if run.is_idle]:
            snapshots.park(core, run, is_forced=False)
    elif not idle.is_timed:
        idle.is_timed = True
        core.emit(SetTimer(Timer("idle"), left))


def close_when_drained(core: "Core") -> None:
    """Once nothing is running, take a snapshot of every run that has changed, then close the core."""
    if not core.is_closing or core.is_closed:
        return
    is_sampling = core.sampling.num_running > 0 and not core.is_drain_over
    if core.turns or core.is_committing or is_sampling or any(run.saving for run in core.held.values()):
        return
    changed = [run for run in core.held.values() if run.phase == "loaded" and run.work_seconds]
    if core.is_ready and changed:
        for run in changed:
            snapshots.begin(core, run, "close")
        return
    core.is_closed = True
    core.emit(Closed())


# ── numbers that never arrive ─────────────────────────────────────────────────────────────────────────


def watch_gap(core: "Core", run: RunState) -> None:
    """Start or stop the timer of a run that waits for a missing seq_id.

    A run that is loaded again goes on waiting for the same number: otherwise one that is evicted more often than every
    ``gap_seconds`` would wait forever.
    """
    gap, missing = run.gap, run.missing_seq
    if missing is None:
        gap.end()
    elif not gap.is_timed and not core.is_closing:
        gap.watch(missing, core.now)
        seconds = max(0.0, gap.since + core.limits.gap_seconds - core.now)
        core.emit(SetTimer(Timer("gap", run.model_id), seconds))


def close_gap(core: "Core", run: RunState) -> None:
    """Handle an expired gap timer: fail the operations behind the missing seq_ids, and let the run continue."""
    lane, gap, seconds = run.lane, run.gap, core.limits.gap_seconds
    is_early = core.now + TIMER_SLACK_SECONDS < gap.since + seconds
    if lane is None or not gap.is_timed or is_early or core.is_closing:
        return  # the timer belongs to an earlier gap
    missing = gap.end()
    gaps = lane.gaps()
    is_coming = any(first <= seq <= last for first, last in gaps for seq in run.operations)
    if lane.missing != missing or is_coming:  # it arrived, or is being committed
        core.touch(run)
        return
    numbers = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in gaps[:8])
    reason = (
        f"operation {numbers} of run {run.model_id} never arrived; those after it were given up after "
        f"{seconds:.0f} s. Submit them again, with new numbers"
    )
    core.commit(journal.Abandon(run.row, gaps, run.abandon(gaps), reason), run)


def gaps_abandoned(core: "Core", run: RunState, operations: Sequence[Operation], outcomes: Sequence[Outcome]) -> None:
    run.end_abandoning()
    for operation, outcome in zip(operations, outcomes, strict=True):
        core.resolve(operation, outcome)
    core.touch(run)


def timer_fired(core: "Core", timer: Timer) -> None:
    run = core.runs.get(timer.key)
    match timer.kind:
        case "evict":
            core.is_evict_timer_set = False
        case "drain":
            core.is_drain_over = True
        case "idle" if core.idle is not None:
            core.idle.is_timed = False
        case "gap" if run is not None:
            close_gap(core, run)
        case "retry" if run is not None:
            core.touch(run)


# ── every turn ────────────────────────────────────────────────────────────────────────────────────────


class Policy(NamedTuple):
    decide: Callable[["Core"], None]
    concerns: Callable[["Core"], object]
    """The part of the core that it is about: while that is empty, there is nothing to decide."""


POLICIES = (
    Policy(restore_waiting, attrgetter("waiting.runs")),
    Policy(evict_for_waiting, attrgetter("waiting.runs")),
    Policy(check_losses, attrgetter("losses.waiting")),
    Policy(send_turns, attrgetter("ready")),
    Policy(send_samples, attrgetter("sampling.waiting")),
    Policy(end_idle_engine, attrgetter("idle")),
    Policy(close_when_drained, attrgetter("is_closing")),
)
"""Applied, in order, at the end of each turn of the loop."""


def decide(core: "Core") -> None:
    """Advance the runs that changed, then apply the policies that have something to decide."""
    settle(core)
    if core.suspects:
        core.suspects = [suspect for suspect in core.suspects if suspect.is_suspect]
    core.is_isolating = bool(core.suspects)
    for policy in POLICIES:
        if policy.concerns(core):
            policy.decide(core)
            if core.touched:
                settle(core)


def settle(core: "Core") -> None:
    """Advance every run that changed as far as possible, and update the indexes."""
    while core.touched:
        run = next(iter(core.touched))
        del core.touched[run]
        if run.saving is not None:
            snapshots.advance(core, run)
        if run.loading is not None:
            snapshots.advance_load(core, run)
        if run.restore is not None:
            restoring.advance(core, run)
        if run.lane is not None and (run.lane.waiting or run.gap.seq_id is not None):
            watch_gap(core, run)
        if 0 < run.work_seconds >= core.limits.snapshot_seconds:
            snapshots.take_if_due(core, run)
        for index, is_in in (
            (core.held, run.phase in ("loaded", "restoring")),
            (core.ready, bool(run.ready)),
            (core.leaving, run.is_leaving),
        ):
            if is_in:
                index[run.model_id] = run
            else:
                index.pop(run.model_id, None)
        if run.phase == "absent" and run.has_work and run.retry_at <= core.now:
            core.waiting.add(run)
        else:
            core.waiting.runs.pop(run.model_id, None)
