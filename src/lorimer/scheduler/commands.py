"""What an operation says to the engine, and what came of it until it is on record."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lorimer.engine import messages
from lorimer.errors import EngineDied, EngineError, InvalidInput, LorimerError, StorageError
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.operation import Operation
from lorimer.scheduler.payloads import AnyPayload, Load, OptimStep, Save, SaveEphemeral, decode_payload
from lorimer.store.directory import DataDirectory
from lorimer.store.runs import Run

log = logging.getLogger("lorimer.scheduler")


@dataclass
class Sent:
    """An operation with the engine."""

    operation: Operation
    futures: "Sequence[asyncio.Future[messages.Result]]"
    payload: AnyPayload | None = None
    directory: Path | None = None
    """What the engine was told to write."""
    sampler_id: str | None = None
    """Under which the engine holds what it froze."""
    verified: str | None = None
    """The run's newest snapshot before a load, if it was found whole; the load's own takes its place."""
    snapshot: tuple[Run | None, list[str]] | None = None
    """The run's row with the snapshot that ended a load, and the names of those no longer needed."""

    @property
    def has_died(self) -> bool:
        """Whether the engine ended, or is about to be known to have, before it answered all."""
        return any(not future.done() or isinstance(future.exception(), EngineDied) for future in self.futures)

    @property
    def error(self) -> BaseException | None:
        """Why the engine did not do it; asked when all is answered."""
        return next((error for future in self.futures if (error := future.exception()) is not None), None)

    def explain(self, error: LorimerError) -> LorimerError:
        """The engine's error as its caller sees it: one of saving is the server's trouble, not the caller's."""
        text = str(error)
        if self.directory is None:
            return error
        if "No space left" in text or "disk is full" in text:
            return StorageError("the disk of the server is full; nothing was saved")
        return error if isinstance(error, InvalidInput) else EngineError(text)


def refused(operation: Operation, error: BaseException) -> Sent:
    """An operation that did not get as far as the engine."""
    future: asyncio.Future[messages.Result] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return Sent(operation, [future])


async def discard(directory: DataDirectory, path: Path) -> None:
    """Remove what an engine has written, also in part, that belongs to nothing."""

    def remove() -> None:
        for found in [path, *path.parent.glob(f"{path.name}.tmp-*")]:
            directory.remove(found)

    try:
        await asyncio.to_thread(remove)
    except StorageError as error:
        log.warning("left for the next start to remove: %s", error)


def create_command(run: Run) -> messages.CreateRun:
    lora = messages.LoraConfig(
        rank=run.rank,
        seed=run.seed,
        train_attn=run.train_attn,
        train_mlp=run.train_mlp,
        train_unembed=run.train_unembed,
    )
    optimizer = messages.OptimizerConfig(type=run.optimizer_type)
    return messages.CreateRun(
        request_id=f"create:{run.model_id}", model_id=run.model_id, lora=lora, optimizer=optimizer
    )


def load_command(run: Run, directory: Path, optimizer: bool) -> messages.LoadState:
    return messages.LoadState(
        request_id=f"load:{run.model_id}", model_id=run.model_id, directory=str(directory), optimizer=optimizer
    )


def snapshot_command(run: Run, directory: Path) -> messages.SaveState:
    return messages.SaveState(request_id=f"snapshot:{directory.name}", model_id=run.model_id, directory=str(directory))


def to_forward_backward(operation: Operation) -> messages.EncodedForwardBackward:
    payload, operation.payload = operation.payload, b""
    return messages.EncodedForwardBackward(
        request_id=operation.request_id,
        model_id=operation.lane,
        payload=payload,
        forward_only=operation.kind == "forward",
    )


def send_barrier(slot: EngineSlot, directory: DataDirectory, run: Run, operation: Operation) -> Sent:
    """Send everything the operation needs, at once and in order."""
    payload = decode_payload(operation.payload)
    request_id, model_id = operation.request_id, run.model_id
    match payload:
        case OptimStep(params=params):
            step = messages.OptimStep(request_id=request_id, model_id=model_id, params=params)
            return Sent(operation, [slot.submit(step)], payload)
        case Save(checkpoint_kind=kind):
            target = directory.new_weights_directory()
            save = messages.SaveState(
                request_id=request_id, model_id=model_id, directory=str(target), weights_only=kind != "training"
            )
            return Sent(operation, [slot.submit(save)], payload, target)
        case SaveEphemeral():
            target = directory.new_weights_directory()
            publish = messages.PublishSampler(
                request_id=f"{request_id}:publish", model_id=model_id, sampler_id=target.name
            )
            save = messages.SaveState(
                request_id=request_id, model_id=model_id, directory=str(target), weights_only=True
            )
            return Sent(operation, [slot.submit(publish), slot.submit(save)], payload, target, target.name)
        case Load(weights_name=name, optimizer=optimizer):
            load = messages.LoadState(
                request_id=request_id, model_id=model_id, directory=str(directory.weights / name), optimizer=optimizer
            )
            if operation.is_replay:
                return Sent(operation, [slot.submit(load)], payload)
            target = directory.new_snapshot_directory()
            return Sent(operation, [slot.submit(load), slot.submit(snapshot_command(run, target))], payload, target)
    raise AssertionError(f"{payload!r} is no operation of a run")
