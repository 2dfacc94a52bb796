"""Resets the core to the state of the journal when an engine ends, and records what may have killed it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from lorimer.errors import EngineError
from lorimer.scheduler import events, journal, snapshots
from lorimer.store import futures

if TYPE_CHECKING:
    from lorimer.scheduler.core import Core


@dataclass(frozen=True, eq=False)
class RecordDeath(journal.Transaction):
    """Count the death of an engine against the operations that it was computing, for whoever computes them next."""

    request_ids: Sequence[str]

    def apply(self, c: Connection) -> None:
        futures.record_death(c, self.request_ids)


def engine_ended(core: "Core", reason: str, is_final: bool) -> None:
    """Reset everything to the state of the journal. ``is_final``: no engine can be started for this model."""
    core.is_ready = False
    core.is_starting = True  # the engine slot restarts the engine by itself
    core.engine += 1
    if blamed := [*_blame(core, reason), *core.sampling.journaled()]:
        core.commit(RecordDeath(blamed))
    core.turns.clear()
    core.early.engine_ended()
    core.losses.engine_ended(reason)
    core.sampling.engine_ended(reason, is_final)
    for run in list(core.held.values()):
        snapshots.engine_ended(core, run)
        snapshots.cancel_load(core, run)
        run.leave_engine(core.now)
        core.touch(run)
    if is_final:
        for run in [run for run in core.runs.values() if run.creation is not None]:
            core.corrupt(run, reason)
        if not any(run.has_work for run in core.runs.values()):
            core.is_starting = False
            core.emit(events.StopRetrying())


def _blame(core: "Core", reason: str) -> list[str]:
    """Count what may have killed the engine: the first unfinished turn, and the runs being restored.

    Return the request_ids of the operations.
    """
    blamed = []
    operations = list(core.turns[0].unanswered.values()) if core.turns else []
    runs = {run for run in core.held.values() if run.phase == "restoring"}
    runs |= {core.runs[operation.lane] for operation in operations if operation.is_replay}
    max_deaths = core.limits.max_engine_deaths
    for run in runs:
        core.blame(run)
        if run.deaths >= max_deaths:
            core.corrupt(run, f"the engine ended {run.deaths} times while it restored {run.model_id}: {reason}")
    for operation in operations:
        if operation.is_replay or operation.status != "running":
            continue
        core.blame(operation)
        if operation.deaths >= max_deaths:
            text = f"the engine ended {operation.deaths} times while it computed this: {reason}"
            core.runs[operation.lane].running.discard(operation)
            core.fail(operation, EngineError(text))
        blamed.append(operation.request_id)
    return blamed
