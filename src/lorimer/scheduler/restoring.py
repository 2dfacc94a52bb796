"""Brings runs into the engine: a run is its snapshot and the journal after it.

The stages of a `Restore`: *settling* (transactions of the run and a snapshot under way end), *reading* (its journal),
*loading* (the engine creates the run and loads a snapshot or saved weights), *saving* (a run created from saved weights
gets its first snapshot), *creating* (the answer to its creation is committed). Then the lane is rebuilt and the run is
loaded. A newest snapshot that cannot be read is dropped, and the run is restored from the one before it.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from lorimer.engine import messages
from lorimer.errors import CheckpointError, EngineError, InvalidInput, LorimerError, StorageError
from lorimer.scheduler import journal, placement, snapshots
from lorimer.scheduler.engine_commands import create_command, load_command
from lorimer.scheduler.events import Discard, NoReply, Report, RestoreReply, Send, SetTimer, Timer
from lorimer.scheduler.payloads import CreateModel, decode_payload
from lorimer.scheduler.runs import Journal, Outcome, Restore, RunState, late, rebuild

if TYPE_CHECKING:
    from lorimer.scheduler.core import Core

RETRY_SECONDS = 2.0


def begin(core: "Core", run: RunState) -> None:
    run.begin_restore()
    core.touch(run)


def advance(core: "Core", run: RunState) -> None:
    """Read the journal once nothing changes it any more."""
    restore = run.restore
    if restore is None or core.is_closing:
        return
    if restore.stage == "settling" and not run.num_commits and run.saving is None:
        restore.stage = "reading"
        run.skipped.clear()  # the journal includes these
        core.commit(journal.ReadJournal(run.model_id, restore.number))


def journal_read(core: "Core", transaction: journal.ReadJournal | journal.FallBack, found: Journal | None) -> None:
    run = core.runs.get(transaction.model_id)
    if isinstance(transaction, journal.FallBack):
        core.emit(Discard("snapshots", [transaction.damaged]))
    if run is None or run.restore is None or run.restore.number != transaction.restore:
        return  # the engine ended meanwhile
    if found is None:
        _put_off(core, run, InvalidInput("it is not stored any more"))
        return
    run.adopt(found.run)
    run.restore.journal = found
    if found.run.corrupted:
        _put_off(core, run, InvalidInput(found.run.corrupted))
        return
    try:
        _load(core, run, run.restore, found)
    except Exception as error:
        _put_off(core, run, error)


def _load(core: "Core", run: RunState, restore: Restore, found: Journal) -> None:
    """Have the engine create the run and load its snapshot or initial weights."""
    row, made_of, to = found.run, creation_of(run, found), RestoreReply(run.model_id, restore.number)
    restore.stage, restore.error = "loading", None
    commands: list[messages.Command] = [create_command(row)]
    restore.source = "fresh"
    if row.resume_name is not None:
        restore.source = "snapshot"
        commands.append(load_command(row, str(core.snapshots / row.resume_name), optimizer=True))
    elif made_of.weights_name is not None:
        restore.source = "weights"
        commands.append(load_command(row, str(core.weights / made_of.weights_name), made_of.optimizer))
    elif made_of.adapter_directory is not None:
        restore.source = "weights"
        commands.append(load_command(row, made_of.adapter_directory, optimizer=False))
    restore.num_replies = len(commands)
    for command in commands:
        core.emit(Send(command, to))


def replied(core: "Core", run: RunState, reply: messages.Result | Exception) -> None:
    restore = run.restore
    assert restore is not None
    restore.num_replies -= 1
    if isinstance(reply, Exception) and restore.error is None:
        restore.error = reply
        restore.is_load_error = restore.num_replies == 0 and restore.source == "snapshot"
    if restore.num_replies:
        return
    if isinstance(reply, messages.StateResult) and restore.source == "snapshot":
        run.snapshot_read(reply.seconds)
    if restore.error is not None:
        _load_failed(core, run, restore, restore.error)
    elif restore.source == "weights":
        restore.stage = "saving"
        snapshots.begin(core, run, "creation")
    else:
        loaded(core, run)


def _load_failed(core: "Core", run: RunState, restore: Restore, error: Exception) -> None:
    damaged = run.row.newest_name
    if restore.is_load_error and isinstance(error, InvalidInput | CheckpointError) and damaged is not None:
        core.report(f"falling back on an older snapshot: {error}", run)
        _drop_from_engine(core, run)
        restore.stage = "reading"
        core.commit(journal.FallBack(run.model_id, restore.number, damaged), run)
        return
    if restore.is_load_error and isinstance(error, InvalidInput):
        error = CheckpointError(str(error))
    _put_off(core, run, error)


def loaded(core: "Core", run: RunState) -> None:
    """Answer the creation of a run that the engine has loaded, then rebuild its lane."""
    restore = run.restore
    assert restore is not None and restore.journal is not None
    if run.creation is not None:
        restore.stage = "creating"
        run.creation.advance("committing")
        made_of = creation_of(run, restore.journal)
        core.commit(journal.FinishCreation(run.creation, run.row, made_of), run)
        return
    try:
        late_ones = rebuild(run, restore.journal)
    except CheckpointError as error:
        _put_off(core, run, error)
        return
    run.loaded(core.now)
    for operation in run.operations.values():
        if operation.is_open:
            core.open.setdefault(operation.request_id, operation)
    if run.replays:
        core.emit(Report("info", f"replaying {len(run.replays)} operations", run.model_id))
    for operation in late_ones:
        core.fail(operation, late(operation))
    core.touch(run)


def creation_committed(core: "Core", run: RunState, outcome: Outcome) -> None:
    if (creation := run.end_creation(core.now)) is not None:
        core.resolve(creation, outcome)
    if run.restore is not None and run.restore.stage == "creating":
        loaded(core, run)
    core.touch(run)


def failed(core: "Core", run: RunState, number: int | None, error: Exception) -> None:
    """Handle the failure of a transaction that restoring a run needs."""
    if isinstance(error, StorageError):
        return  # the server is closing
    if run.restore is not None and number in (None, run.restore.number):
        _put_off(core, run, error)


def _put_off(core: "Core", run: RunState, error: Exception) -> None:
    """Retry later, or give up the run if a retry cannot help."""
    run.put_off(core.now + RETRY_SECONDS)
    text = str(error)
    core.report(f"run not restored: {text}", run, error)
    drop(core, run)
    is_final = isinstance(error, LorimerError) and not isinstance(error, EngineError)
    if is_final or run.failures >= core.limits.max_engine_deaths:
        is_new = run.creation is not None and not run.operations
        core.corrupt(run, text if is_new else f"run {run.model_id} cannot be restored: {text}")
    else:
        core.emit(SetTimer(Timer("retry", run.model_id), RETRY_SECONDS))
    core.touch(run)


def drop(core: "Core", run: RunState) -> None:
    """Evict a run without saving it. It is restored from the journal."""
    snapshots.cancel_load(core, run)
    run.leave_engine(core.now)
    _drop_from_engine(core, run)
    core.touch(run)


def release(core: "Core", run: RunState) -> None:
    """Let any replica take a run that left this engine, saved and without work. Its next operation may move it."""
    run.adopt(replace(run.row, replica=None))
    core.commit(placement.Release(run.model_id, core.place), run)


def released(core: "Core", run: RunState | None, is_released: bool) -> None:
    if run is None:
        return  # it has expired
    if not is_released:
        run.adopt(replace(run.row, replica=core.place))
    elif run.is_forgettable:
        forget(core, run)


def expire(core: "Core", model_ids: Iterable[str]) -> None:
    """Forget these runs unless they have work, and all about which the store knows everything."""
    for model_id in model_ids:
        run = core.runs.get(model_id)
        if run is not None and not run.has_work:
            drop(core, run)
            forget(core, run)
    for run in [run for run in core.runs.values() if run.is_forgettable]:
        forget(core, run)


def forget(core: "Core", run: RunState) -> None:
    """Drop a run about which the store knows everything."""
    for runs in (core.held, core.ready, core.leaving, core.waiting.runs, core.runs):
        runs.pop(run.model_id, None)


def _drop_from_engine(core: "Core", run: RunState) -> None:
    if core.is_ready:
        core.emit(Send(messages.DropRun(request_id=f"drop:{run.model_id}", model_id=run.model_id), NoReply()))


def creation_of(run: RunState, found: Journal) -> CreateModel:
    """Return the payload that created the run; needed until it has a snapshot."""
    payload = found.creation if run.creation is None else run.creation.payload
    if not payload:
        if found.run.resume_name is None:
            raise CheckpointError("the payload of its creation is missing from the journal")
        return CreateModel()
    creation = decode_payload(payload)
    assert isinstance(creation, CreateModel)
    return creation
