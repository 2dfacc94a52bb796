"""Graders on a Ray cluster: the cluster that ``RAY_ADDRESS`` names, or one of this machine.

Each worker is an actor, which holds a CPU of its node and runs the grader in a process there, as ``ProcessWorker`` does
here. Loaded only when it is asked for. The nodes of the cluster need Lorimer and the grader's module installed.
"""

import asyncio
import importlib
import os
from typing import Any

from lorimer.cookbook.rl.grader_worker import Reply
from lorimer.cookbook.rl.graders import START_SECONDS, ProcessWorker, Worker, WorkerDied
from lorimer.errors import InvalidInput

ray: Any = importlib.import_module("ray")

TRANSPORT_SECONDS = 30.0
"""How much later than in its process a grade, or the end of its time, may arrive from another node."""
KILL_SECONDS = 5.0


class GraderHost:
    """The actor. What happens to the process of the grader is a reply, so that only the end of a node is an error."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    async def start(self, setup: dict[str, Any]) -> str:
        """Return why the grader cannot be started; empty if it was."""
        try:
            self._worker = await ProcessWorker.start(setup)
        except InvalidInput as error:
            return str(error)
        return ""

    async def run(self, arguments: tuple[Any, ...], timeout_seconds: float) -> Reply:
        assert self._worker is not None
        try:
            return await self._worker.run(arguments, timeout_seconds)
        except TimeoutError:
            return "timeout", f"no grade after {timeout_seconds:g} seconds"
        except WorkerDied as error:
            return "died", str(error)

    async def kill(self) -> None:
        if self._worker is not None:
            await self._worker.kill()


class RayWorker:
    """A `GraderHost`, seen from the program."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    async def start(cls, setup: dict[str, Any]) -> "RayWorker":
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours reports to nobody
            await asyncio.to_thread(ray.init, log_to_driver=False, include_dashboard=_dashboard())
        worker = cls(ray.remote(num_cpus=1, max_restarts=0)(GraderHost).remote())
        name = f"{setup['module']}:{setup['name']}"
        try:
            refusal = await worker._answer(worker._actor.start.remote(setup), START_SECONDS)
        except (TimeoutError, WorkerDied) as error:
            await worker.kill()
            raise InvalidInput(
                f"the grader {name} did not start on Ray within {START_SECONDS:g} seconds ({error}); each worker takes"
                f" a CPU, and the cluster has {ray.cluster_resources().get('CPU', 0):g}"
            ) from None
        if refusal:
            await worker.kill()
            raise InvalidInput(refusal)
        return worker

    async def run(self, arguments: tuple[Any, ...], timeout_seconds: float) -> Reply:
        asked = self._actor.run.remote(arguments, timeout_seconds)
        reply: Reply = await self._answer(asked, timeout_seconds + TRANSPORT_SECONDS)
        return reply

    async def kill(self) -> None:
        """End the process of the grader, those it started, and the actor."""
        try:
            await self._answer(self._actor.kill.remote(), KILL_SECONDS)
        except (TimeoutError, WorkerDied):
            pass  # an actor without a place, or on a node that is gone
        finally:
            ray.kill(self._actor)

    async def _answer(self, asked: Any, seconds: float) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked.future()), seconds)
        except ray.exceptions.RayError as error:
            raise WorkerDied(f"the actor of the grader ended: {error}") from None


def _dashboard() -> bool | None:
    """Start no dashboard in a cluster of ours; one that is there keeps its own."""
    return None if os.environ.get("RAY_ADDRESS") else False
