"""Graders as actors of a Ray cluster: the cluster that ``RAY_ADDRESS`` names, or one of this machine.

Loaded only when it is asked for. The machines of the cluster need Lorimer and the grader's module installed.
"""

import asyncio
import importlib
import os
from typing import Any

from lorimer.cookbook.rl.grader_worker import Grader, Reply
from lorimer.cookbook.rl.graders import START_SECONDS, WorkerDied
from lorimer.errors import InvalidInput

ray: Any = importlib.import_module("ray")


class RayWorker:
    """An actor that grades one call at a time."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    async def start(cls, setup: dict[str, Any]) -> "RayWorker":
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours reports to nobody
            ray.init(log_to_driver=False)
        worker = cls(ray.remote(num_cpus=1, max_restarts=0)(Grader).remote(setup))
        try:
            await asyncio.wait_for(asyncio.wrap_future(worker._actor.ready.remote().future()), START_SECONDS)
        except TimeoutError:
            await worker.kill()
            raise InvalidInput(
                f"the grader {setup['module']}:{setup['name']} did not start on Ray within {START_SECONDS:g} seconds; "
                f"each worker takes a CPU, and the cluster has {ray.cluster_resources().get('CPU', 0):g}"
            ) from None
        except ray.exceptions.RayError as error:
            await worker.kill()
            raise InvalidInput(f"the grader {setup['module']}:{setup['name']} did not start on Ray: {error}") from error
        return worker

    async def run(self, arguments: tuple[Any, ...], timeout_seconds: float) -> Reply:
        answer = asyncio.wrap_future(self._actor.run.remote(arguments, timeout_seconds).future())
        try:
            reply: Reply = await asyncio.wait_for(answer, timeout_seconds)
        except ray.exceptions.RayError as error:
            raise WorkerDied(f"the actor of the grader ended: {error}") from None
        return reply

    async def kill(self) -> None:
        ray.kill(self._actor)
