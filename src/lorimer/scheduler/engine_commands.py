"""Builds the commands that an engine is sent for a run: to create it, load it, save it, and execute its operations.

Also explains the errors that engines answer them with.
"""

from typing import TYPE_CHECKING

from msgspec import UNSET

from lorimer.engine import messages
from lorimer.errors import EngineError, InvalidInput, LorimerError, StorageError, is_disk_full
from lorimer.scheduler.payloads import AnyPayload, Load, OptimStep, Save, SaveEphemeral
from lorimer.scheduler.runs import Flight, Operation
from lorimer.store.runs import Run

if TYPE_CHECKING:
    from lorimer.scheduler.core import Core


def create_command(row: Run) -> messages.CreateRun:
    request_id, model_id = f"create:{row.model_id}", row.model_id
    optimizer = messages.OptimizerConfig(type=row.optimizer_type)
    if row.method == "full":
        full = messages.FullConfig(
            train_attn=row.train_attn,
            train_mlp=row.train_mlp,
            train_unembed=row.train_unembed,
            train_embed=row.train_embed,
            train_norms=row.train_norms,
        )
        return messages.CreateRun(request_id=request_id, model_id=model_id, full=full, optimizer=optimizer)
    lora = messages.LoraConfig(
        rank=row.rank,
        seed=row.seed,
        train_attn=row.train_attn,
        train_mlp=row.train_mlp,
        train_unembed=row.train_unembed,
        use_rslora=row.use_rslora or UNSET,
        use_dora=row.use_dora or UNSET,
    )
    return messages.CreateRun(request_id=request_id, model_id=model_id, lora=lora, optimizer=optimizer)


def load_command(row: Run, directory: str, optimizer: bool) -> messages.LoadState:
    return messages.LoadState(
        request_id=f"load:{row.model_id}", model_id=row.model_id, directory=directory, optimizer=optimizer
    )


def save_command(core: "Core", model_id: str, name: str) -> messages.SaveState:
    """Return the command that writes a snapshot.

    It shares files only with the one that it is going to replace: two that are kept share nothing, so that damage to
    one leaves the other whole.
    """
    row = core.runs[model_id].row
    oldest = row.snapshot_name if row.newest_name is not None else None
    return messages.SaveState(
        request_id=f"snapshot:{name}",
        model_id=model_id,
        directory=str(core.snapshots / name),
        is_snapshot=True,
        shares_with=str(core.snapshots / oldest) if oldest else "",
    )


def barrier_commands(
    core: "Core", operation: Operation, payload: AnyPayload
) -> tuple[list[messages.Command], str | None]:
    """Return the commands that execute an operation, in order, and the name of the directory they write."""
    request_id, model_id = operation.request_id, operation.lane
    match payload:
        case OptimStep(params=params):
            return [messages.OptimStep(request_id=request_id, model_id=model_id, params=params)], None
        case Save(checkpoint_kind=kind):
            name = core.new_name()
            directory = str(core.weights / name)
            save = messages.SaveState(
                request_id=request_id, model_id=model_id, directory=directory, weights_only=kind != "training"
            )
            return [save], name
        case SaveEphemeral():
            name = core.new_name()
            publish = messages.PublishSampler(request_id=f"{request_id}:publish", model_id=model_id, sampler_id=name)
            save = messages.SaveState(
                request_id=request_id, model_id=model_id, directory=str(core.weights / name), weights_only=True
            )
            return [publish, save], name
        case Load(weights_name=source, optimizer=optimizer):
            load = messages.LoadState(
                request_id=request_id, model_id=model_id, directory=str(core.weights / source), optimizer=optimizer
            )
            if operation.is_replay:
                return [load], None
            name = core.new_name()
            return [load, save_command(core, model_id, name)], name
    raise AssertionError(f"{payload!r} is no operation of a run")


def explain(flight: Flight, error: LorimerError) -> LorimerError:
    """Return the engine's error as the caller sees it. A failed save is a server error, not a user error."""
    if flight.target is None:
        return error
    if is_disk_full(error):
        return StorageError("the disk of the server is full; nothing was saved")
    return error if isinstance(error, InvalidInput) else EngineError(str(error))
