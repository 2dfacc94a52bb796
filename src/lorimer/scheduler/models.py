"""One served base model: its engine, its runs and its samples."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Literal

from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import ModelInfo, SampleProgress
from lorimer.errors import Busy, EngineError
from lorimer.scheduler.engines import EngineSlot
from lorimer.scheduler.isolation import Isolation
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.losses import LossRegistry
from lorimer.scheduler.operation import Operation, QueueState
from lorimer.scheduler.payloads import CreateLoss
from lorimer.scheduler.recorder import Recorder
from lorimer.scheduler.samplers import SamplerPool
from lorimer.scheduler.sampling import SamplingQueue
from lorimer.scheduler.training import TrainingQueue
from lorimer.store.directory import DataDirectory

log = logging.getLogger("lorimer.scheduler")


@dataclass(frozen=True)
class ServedModel:
    """How a base model stands."""

    name: str
    state: Literal["idle", "starting", "ready", "failed"]
    stage: str
    info: ModelInfo | None
    error: str
    num_deaths: int
    num_loaded_runs: int
    num_loaded_samplers: int
    num_open_operations: int
    num_waiting_samples: int
    num_running_samples: int
    tokens_trained: int
    tokens_sampled: int
    training_rate: float
    """Tokens in a second, over the last minute."""
    sampling_rate: float
    pid: int | None
    """Of the engine's process."""


class ModelScheduler:
    def __init__(
        self,
        name: str,
        config: EngineConfig,
        directory: DataDirectory,
        limits: SchedulerLimits,
        recorder: Recorder,
        known_losses: dict[str, CreateLoss],
    ) -> None:
        self.name = name
        self.slot = EngineSlot(
            name,
            config,
            stall_seconds=limits.stall_seconds,
            on_ready=self._engine_ready,
            on_end=self._engine_ended,
            on_progress=self._hear,
        )
        self.losses = LossRegistry(recorder, known_losses)
        isolation = Isolation(lambda: self.training.is_busy or self.sampling.num_running > 0)
        pool = SamplerPool(self.slot, recorder, directory, limits.max_loaded_samplers)
        self.sampling = SamplingQueue(self.slot, pool, limits, recorder, isolation)
        self.training = TrainingQueue(self.slot, directory, limits, recorder, self.losses, isolation, pool.published)
        self.training.on_answer = self.sampling.on_answer = self.pump
        self._waiting_for_engine: list[asyncio.Future[ModelInfo]] = []

    async def info(self) -> ModelInfo:
        """What the engine says of its model; starts it if need be."""
        return self.slot.info if self.slot.info is not None else await self.ready()

    async def ready(self) -> ModelInfo:
        """Wait for an engine that is ready; starts it if need be."""
        if self.slot.is_ready and self.slot.info is not None:
            return self.slot.info
        if self.slot.state == "closed":
            raise Busy("the server is shutting down")
        self.slot.start()
        waiting: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._waiting_for_engine.append(waiting)
        return await waiting

    def _engine_ready(self, info: ModelInfo) -> None:
        waiting, self._waiting_for_engine = self._waiting_for_engine, []
        for future in waiting:
            if not future.done():
                future.set_result(info)
        self.pump()

    def pump(self) -> None:
        self.training.pump()
        self.sampling.pump()

    def _engine_ended(self, reason: str) -> None:
        is_final = self.slot.refusal is not None
        self.losses.engine_ended()
        self.sampling.engine_ended(reason, is_final)
        self.training.engine_ended(reason, is_final)
        if is_final:
            self._disappoint(self.slot.refusal or EngineError(reason))
            if not self.training.has_work:
                self.slot.stop_retrying()

    def _hear(self, progress: SampleProgress) -> None:
        if (listener := self.sampling.listeners.get(progress.request_id)) is not None:
            listener(progress)

    def _disappoint(self, error: Exception) -> None:
        waiting, self._waiting_for_engine = self._waiting_for_engine, []
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def queue_state(self, operation: Operation) -> tuple[QueueState, str]:
        """Why an operation is not finished, for people."""
        slot = self.slot
        if slot.state == "failed":
            return "paused_capacity", f"the engine of {self.name} has ended and is started again ({slot.error})"
        if slot.state != "ready":
            return "paused_capacity", f"the engine of {self.name} is starting: {slot.stage or 'waiting for its turn'}"
        if operation.kind == "sample":
            return "active", f"{self.sampling.num_running} samples are running and {self.sampling.num_waiting} waiting"
        state = self.training.runs.get(operation.lane)
        if state is None:
            return "active", f"{self.name} is at work on it"
        if state.phase == "absent" or state.is_leaving:
            return "paused_capacity", f"the engine of {self.name} holds as many runs as it can; this one waits for room"
        if state.phase == "restoring":
            return "paused_capacity", "the run is brought back into memory"
        if state.replays:
            count = len(state.replays)
            return "paused_capacity", f"recovering: {count} operations done before the engine ended are repeated"
        missing = state.lane.missing if state.lane is not None else None
        if missing is not None and operation.seq_id > missing:
            return "active", f"waiting for operation {missing} of this run, which has not arrived"
        return "active", f"{self.training.num_open} operations of all runs are waiting or being computed"

    def status(self) -> ServedModel:
        slot, state = self.slot, self.slot.state
        return ServedModel(
            name=self.name,
            state="idle" if state == "closed" else state,
            stage=slot.stage,
            info=slot.info,
            error=slot.error,
            num_deaths=slot.num_deaths,
            num_loaded_runs=sum(run.phase == "loaded" for run in self.training.runs.values()),
            num_loaded_samplers=len(self.sampling.pool),
            num_open_operations=self.training.num_open,
            num_waiting_samples=self.sampling.num_waiting,
            num_running_samples=self.sampling.num_running,
            tokens_trained=self.training.trained.total,
            tokens_sampled=self.sampling.sampled.total,
            training_rate=self.training.trained.per_second,
            sampling_rate=self.sampling.sampled.per_second,
            pid=slot.pid,
        )

    async def close(self) -> None:
        await asyncio.gather(self.training.close(), self.sampling.close())
        await self.end()

    async def end(self) -> None:
        """End the engine, whatever it is doing."""
        await self.slot.close()
        self._disappoint(Busy("the server is shutting down"))
