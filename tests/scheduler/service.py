"""A scheduler on a real store and real engines of the debug model, and the few calls that every test makes."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from lorimer import types
from lorimer.engine.config import EngineConfig
from lorimer.scheduler.limits import SchedulerLimits
from lorimer.scheduler.placement import replica_name
from lorimer.scheduler.runs import Outcome, RunState
from lorimer.scheduler.scheduler import Accepted, Scheduler
from lorimer.scheduler.translate import encoded_sample, encoded_training
from lorimer.store import checkpoints, runs, samplers, sessions, users, weights
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.objects import DirectoryObjects, Objects
from lorimer.store.runs import Run
from lorimer.store.samplers import SamplingSession
from lorimer.store.scratch import Scratch
from lorimer.store.sessions import Session
from lorimer.store.users import User
from lorimer.store.weights import Weights

MODEL = "debug"
CONFIG = EngineConfig(model="lorimer/debug", device="cpu", dtype="float32", num_threads=1)
WAIT = 600.0


class Service:
    """What the server has: the store, the scheduler, and callers."""

    def __init__(self, directory: DataDirectory, store: Store, scheduler: Scheduler) -> None:
        self.directory, self.store, self.scheduler = directory, store, scheduler

    @classmethod
    async def open(
        cls,
        path: Path,
        limits: SchedulerLimits | None = None,
        objects: Objects | None = None,
        num_replicas: int = 1,
        **scratch: Any,
    ) -> "Service":
        """``objects``: those of an object store, with ``scratch`` as the settings of their local copies."""
        directory = DataDirectory(path)
        copies = Scratch(objects or DirectoryObjects(directory), directory, **scratch)
        store = Store.open(None, directory.path, scratch=copies)
        scheduler = Scheduler(store, directory, {MODEL: CONFIG}, limits, {MODEL: num_replicas}, copies)
        service = cls(directory, store, scheduler)
        await service.scheduler.start()
        return service

    async def close(self) -> None:
        await self.scheduler.close()
        self.store.close()

    async def die(self) -> None:
        """As when the API process is killed: nothing is finished, and the engine is gone with it."""
        supervisors = list(self.scheduler.owner._supervisors.values())
        for supervisor in supervisors:
            supervisor.cancel()
        await asyncio.wait(supervisors)
        for driver in self.scheduler.owner.drivers.values():
            if driver.slot.pid is not None:
                os.kill(driver.slot.pid, signal.SIGKILL)
        await self.scheduler.owner.end()
        self.store.close()

    @property
    def driver(self):
        return self.scheduler.owner.drivers[replica_name(MODEL, 0)]

    @property
    def slot(self):
        return self.driver.slot

    @property
    def core(self):
        return self.driver.core

    @property
    def runs(self):
        return self.core.runs

    def kill_engine(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.slot.pid, signal.SIGKILL)

    async def ready(self) -> None:
        await self.driver.ready()

    async def session(self, name: str = "ada") -> tuple[User, Session]:
        user = await self.store.write(users.ensure_user, name)
        return user, await self.store.write(sessions.create_session, user_id=user.user_id)

    async def create(
        self, user: User, session: Session, number: int = 0, seed: int = 7, full: types.FullConfig | None = None
    ) -> Run:
        lora = types.LoraConfig(rank=4, seed=seed) if full is None else None
        request = types.CreateModelRequest(
            session_id=session.session_id, model_seq_id=number, base_model=MODEL, lora_config=lora, full_config=full
        )
        accepted = await self.scheduler.create_model(user, session, request)
        await self.done(accepted)
        return await self.run(accepted.model_id)

    async def park(self, user: User, run: Run) -> Run:
        """Have a run leave the engine, which ends with a snapshot; return its row."""
        while (state := self._state(run)) is not None and (state.phase == "loaded" or state.saving):
            await self.scheduler.unload(user, run)
            await asyncio.sleep(0.005)
        return await self.run(run.model_id)

    def _state(self, run: Run) -> RunState | None:
        drivers = self.scheduler.owner.drivers.values()
        return next((state for one in drivers if (state := one.core.runs.get(run.model_id)) is not None), None)

    async def run(self, model_id: str) -> Run:
        run = await self.store.read(runs.get_run, model_id)
        assert run is not None
        return run

    async def sampler(self, session: Session, number: int) -> SamplingSession:
        found = await self.store.read(samplers.get_sampler, f"{session.session_id}:sample:{number}")
        assert found is not None
        return found

    async def train(self, user: User, run: Run, seq_id: int, **kwargs) -> Accepted:
        return await self.scheduler.train(user, run, encoded_training(training_request(run, seq_id, **kwargs)))

    async def step(self, user: User, run: Run, seq_id: int) -> Accepted:
        return await self.scheduler.optim_step(user, run, seq_id, {"learning_rate": 1e-2})

    async def save(self, user: User, run: Run, seq_id: int, name: str) -> Path:
        """Where the weights of a checkpoint lie."""
        accepted = await self.scheduler.save_weights(user, run, seq_id, kind="training", name=name)
        await self.done(accepted)
        return await self.saved(run, name)

    async def saved(self, run: Run, name: str) -> Path:
        return self.directory.weights / (await self.weights(run, name)).name

    async def weights(self, run: Run, name: str) -> Weights:
        checkpoint = await self.store.read(checkpoints.find, run.model_id, "training", name)
        assert checkpoint is not None
        found = await self.store.read(weights.get_weights, checkpoint.weights_id)
        assert found is not None
        return found

    async def base_sampler(self, user: User, session: Session, number: int = 0) -> SamplingSession:
        return await self.store.write(
            samplers.create_sampler,
            session_id=session.session_id,
            user_id=user.user_id,
            seq=number,
            base_model=MODEL,
            model_path=None,
            weights_id=None,
        )

    async def sample(self, user: User, sampler: SamplingSession, seq_id: int, **kwargs) -> Accepted:
        return await self.scheduler.sample(user, sampler, *encoded_sample(sample_request(seq_id, **kwargs)))

    async def outcome(self, accepted: Accepted, timeout: float = WAIT) -> Outcome:
        return await self.scheduler.wait(accepted.request_id, timeout)

    async def done(self, accepted: Accepted) -> bytes:
        outcome = await self.outcome(accepted)
        assert outcome.state == "done", outcome
        return outcome.result


@contextlib.asynccontextmanager
async def service(path: Path, num_replicas: int = 1, **limits) -> AsyncIterator[Service]:
    opened = await Service.open(path, SchedulerLimits(**limits), num_replicas=num_replicas)
    try:
        yield opened
    finally:
        await opened.close()


def training_request(run: Run, seq_id: int, *, tokens: int = 20, shift: int = 0, forward: bool = False):
    text = [5 + (shift + i) % 250 for i in range(tokens + 1)]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(text[:-1]),
        loss_fn_inputs={"target_tokens": text[1:], "weights": [1.0] * tokens},
    )
    return types.TrainingRequest(
        model_id=run.model_id, seq_id=seq_id, data=[datum], loss_fn="cross_entropy", forward_only=forward
    )


def sample_request(seq_id: int, *, max_tokens: int = 5, num_samples: int = 1, seed: int | None = None):
    params = types.SamplingParams(max_tokens=max_tokens, seed=seed, stop=[])
    prompt = types.ModelInput.from_ints([5, 6, 7])
    return types.SampleRequest(num_samples=num_samples, prompt=prompt, sampling_params=params, seq_id=seq_id)


def start(service: Service, user_id: str, stream: bool = True, grammar: str = "", **fields):
    """A sample of a caller who waits."""
    request = sample_request(0, **fields)
    return service.scheduler.start_sample(user_id, MODEL, None, request, stream=stream, grammar=grammar)
