"""Secures runs: when a replay would take long, when a run leaves the engine, and when the server closes.

The stages of a `Saving`: *draining* (a run that leaves waits for its transactions), *saving* (the engine writes),
*settling* (results of everything that the snapshot holds are committed), *verifying* (the snapshot before it),
*committing*. Before a snapshot replaces the one before it, that one is verified; it and the journal after it are kept
until the next. So a torn snapshot makes a replay longer and loses nothing, and a run never has more than two.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lorimer.engine import messages
from lorimer.errors import StorageError
from lorimer.scheduler import journal, restoring
from lorimer.scheduler.engine_commands import save_command
from lorimer.scheduler.events import Discard, Report, Send, SnapshotReply, Verify
from lorimer.scheduler.runs import Flight, Operation, RunState, Saving, SavingPurpose
from lorimer.store.runs import Run

if TYPE_CHECKING:
    from lorimer.scheduler.core import Core

WORTH = 20.0
"""A snapshot waits until the work since the last one took this many times as long as that snapshot."""


def take_if_due(core: "Core", run: RunState) -> None:
    due = max(core.limits.snapshot_seconds, WORTH * run.snapshot_cost)
    is_free = run.phase == "loaded" and run.saving is None and run.loading is None
    if run.work_seconds >= due and is_free and not core.is_closing:
        begin(core, run, "due")


def park(core: "Core", run: RunState, *, is_forced: bool) -> None:
    """Save a run and evict it, with ``is_forced`` even if operations wait for it. It is restored on demand."""
    run.begin_saving("park", is_forced=is_forced)
    core.touch(run)


def begin(core: "Core", run: RunState, purpose: SavingPurpose) -> None:
    _save(core, run, run.begin_saving(purpose))


def advance(core: "Core", run: RunState) -> None:
    saving = run.saving
    if saving is None:
        return
    if saving.stage == "draining" and not (run.num_commits or run.running or run.loading):
        if run.phase == "loaded" and (run.work_seconds or run.row.resume_name is None):
            _save(core, run, saving)
        else:
            _end(core, run, saving)
    elif saving.stage == "settling" and not run.has_open_before(saving.seq_id + 1):
        saving.stage = "verifying"
        if run.row.newest_name is None:
            _commit(core, run, saving)
        else:
            core.emit(Verify(run.model_id, run.row.newest_name))


def _save(core: "Core", run: RunState, saving: Saving) -> None:
    """Have the engine write the run as it is after the last operation sent."""
    run.write_saving(saving, core.new_name())
    core.emit(Send(save_command(core, run.model_id, saving.name), SnapshotReply(run.model_id, saving.name)))


def replied(core: "Core", run: RunState, reply: messages.Result | Exception) -> None:
    saving = run.saving
    assert saving is not None
    if isinstance(reply, Exception):
        core.emit(Discard("snapshots", [saving.name]))
        _failed(core, run, saving, reply)
        return
    assert isinstance(reply, messages.StateResult)
    run.saving_written(saving, reply.seconds)
    core.touch(run)


def verified(core: "Core", run: RunState, name: str, is_whole: bool) -> None:
    """Handle the verification of the newest snapshot so far."""
    if not is_whole:
        core.emit(Report("warning", f"snapshot {name} is damaged; the one before it is kept", run.model_id))
    saving, load = run.saving, run.loading
    if saving is not None and saving.stage == "verifying":
        saving.verified = name if is_whole else None
        _commit(core, run, saving)
    elif load is not None and load.flight is not None and load.flight.is_verifying and not load.flight.is_committing:
        load.flight.verified = name if is_whole else None
        _commit_load(core, run, load, load.flight)


def _commit(core: "Core", run: RunState, saving: Saving) -> None:
    saving.stage = "committing"
    core.commit(journal.SetSnapshot(run.model_id, saving.seq_id, saving.name, saving.verified), run)


def committed(core: "Core", model_id: str, name: str, row: Run | None, obsolete: Iterable[str]) -> None:
    run = core.runs[model_id]
    adopt(core, run, row, obsolete)
    if run.saving is not None and run.saving.name == name:
        _end(core, run, run.saving)


def adopt(core: "Core", run: RunState, row: Run | None, obsolete: Iterable[str]) -> None:
    """Replace the run's row, which no longer names the ``obsolete`` snapshots."""
    if row is not None:
        run.adopt(row)
    if names := list(obsolete):
        core.emit(Discard("snapshots", names))


def commit_failed(core: "Core", run: RunState, name: str, error: Exception) -> None:
    # The row may name the snapshot after all; if not, the next start deletes it.
    if run.saving is not None and run.saving.name == name:
        _failed(core, run, run.saving, error)


def _failed(core: "Core", run: RunState, saving: Saving, error: Exception) -> None:
    # The run continues; only a replay would take longer. Retry after as much work again.
    if saving.purpose == "creation":
        run.end_saving()
        if run.restore is not None:
            restoring.failed(core, run, run.restore.number, error)
    else:
        if not isinstance(error, StorageError):
            core.report(f"no snapshot: {core.redact(str(error))}", run)
        _end(core, run, saving)
    core.touch(run)


def _end(core: "Core", run: RunState, saving: Saving) -> None:
    run.end_saving()
    if saving.purpose == "creation" and run.restore is not None:
        restoring.loaded(core, run)
    elif saving.purpose == "park" and run.phase == "loaded" and (saving.is_forced or not run.operations):
        restoring.drop(core, run)  # without a snapshot the journal still has everything, and is replayed
        if not run.has_work:
            restoring.release(core, run)
    core.touch(run)


def engine_ended(core: "Core", run: RunState) -> None:
    """Discard the unfinished snapshot of an engine that ended."""
    saving = run.saving
    if saving is None:
        return
    if saving.stage in ("draining", "saving"):
        run.lose_saving()
        if saving.name:
            core.emit(Discard("snapshots", [saving.name]))


def advance_load(core: "Core", run: RunState) -> None:
    """Commit a load, which ends with a snapshot, after the results before it."""
    load = run.loading
    if load is None or load.status != "committing" or load.flight is None or load.flight.is_verifying:
        return
    if run.has_open_before(load.seq_id) or (run.saving is not None and run.saving.stage != "draining"):
        return
    load.flight.is_verifying = True
    if run.row.newest_name is None:
        _commit_load(core, run, load, load.flight)
    else:
        core.emit(Verify(run.model_id, run.row.newest_name))


def _commit_load(core: "Core", run: RunState, load: Operation, flight: Flight) -> None:
    flight.is_committing = True
    core.commit(journal.FinishOperation(load, run.row, flight, core.weights, core.limits.max_stored_bytes), run)


def cancel_load(core: "Core", run: RunState) -> None:
    """Move a load that is not being committed back to ``held``, because its run leaves the engine."""
    load = run.loading
    if load is None or load.status != "committing" or load.flight is None or load.flight.is_committing:
        return
    if load.flight.target is not None:
        core.emit(Discard("snapshots", [load.flight.target]))
    load.advance("held")
    load.flight = None
