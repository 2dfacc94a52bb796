"""Has an uploaded loss checked by an engine, any that is ready, and puts on record what it says."""

from collections.abc import Sequence

from lorimer.errors import EngineDied, EngineError, LorimerError, StorageError
from lorimer.scheduler import records
from lorimer.scheduler.losses import register_command
from lorimer.scheduler.models import ModelScheduler
from lorimer.scheduler.operation import Operation
from lorimer.scheduler.payloads import CreateLoss, decode_payload
from lorimer.scheduler.recorder import Recorder


async def check_loss(
    operation: Operation, models: Sequence[ModelScheduler], recorder: Recorder, max_engine_deaths: int
) -> None:
    payload = decode_payload(operation.payload)
    assert isinstance(payload, CreateLoss)
    try:
        model = await _register(operation, payload, models, max_engine_deaths)
    except StorageError:
        return
    except LorimerError as error:
        await recorder.fail(operation, error)
        return
    model.losses.add(payload)
    await recorder.finish(operation, records.finish_loss, payload)


async def _register(
    operation: Operation, payload: CreateLoss, models: Sequence[ModelScheduler], max_engine_deaths: int
) -> ModelScheduler:
    ready = [model for model in models if model.slot.is_ready]
    model = (ready or models)[0]
    while operation.deaths < max_engine_deaths:
        await model.ready()
        try:
            await model.slot.submit(register_command(operation.request_id, payload))
            return model
        except EngineDied:
            operation.deaths += 1
    raise EngineError(f"the engine ended {operation.deaths} times while it checked this")
