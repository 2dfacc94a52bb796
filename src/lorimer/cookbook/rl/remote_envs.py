"""Environments in processes of their own, of this machine or of a Ray cluster, beside the graders of ``graders.py``.

A process plays the episodes that were given to it, one call after the other, and many at the same time. An environment
that raises loses its episode; one that takes too long, takes all memory or ends its process loses the episodes of that
process, which is replaced. ``rollouts.py`` leaves lost episodes out of their groups and counts them.
"""

import asyncio
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

from lorimer.chat.conversation import Message
from lorimer.cookbook.completers import StopCondition
from lorimer.cookbook.rl.envs import Action, Env, Observation, StepResult
from lorimer.cookbook.rl.grader_worker import Reply, find_function
from lorimer.cookbook.rl.graders import Backend, Worker, WorkerDied, find_backend, function_setup
from lorimer.errors import InvalidInput
from lorimer.types import ModelInput


class EpisodeLost(Exception):
    """An episode cannot be played to its end: its environment raised, or the process that played it ended."""


# ── in the program ────────────────────────────────────────────────────────────────────────────────────


class EnvPool:
    """Plays the episodes of ``make_env(*arguments)`` in worker processes.

    ``make_env`` is a function that can be imported, or its name as ``module:function``; what it returns stays in the
    process. Used as a context manager it refuses a function that cannot be found before anything is sampled.
    """

    def __init__(
        self,
        make_env: Callable[..., Env] | str,
        *,
        num_workers: int = 2,
        timeout_seconds: float = 60.0,
        memory_mb: int | None = 2048,
        backend: Backend = "processes",
    ) -> None:
        """``timeout_seconds`` is the time of one call, the making of an environment or a step."""
        if num_workers < 1:
            raise InvalidInput(f"num_workers is {num_workers}; 1 or more is accepted")
        self.timeout_seconds = timeout_seconds
        factory = function_setup(make_env, memory_mb)
        place = {name: factory.pop(name) for name in ("module", "name", "main_path")}
        setup = {**factory, "module": __name__, "name": "Episodes", "main_path": None, "made_of": place}
        self._hosts = [_Host(partial(find_backend(backend), setup)) for _ in range(num_workers)]

    async def __aenter__(self) -> Self:
        await self._hosts[0].open()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for host in self._hosts:
            await host.close()

    def env(self, *arguments: Any) -> Env:
        """Return an episode that is played in the process which has the fewest."""
        return RemoteEnv(min(self._hosts, key=lambda host: len(host.episodes)), arguments, self.timeout_seconds)


class RemoteEnv(Env):
    """One episode, seen from the program."""

    def __init__(self, host: "_Host", arguments: tuple[Any, ...], timeout_seconds: float) -> None:
        self._host, self._arguments, self._seconds = host, arguments, timeout_seconds
        self._number = next(host.numbers)
        self._messages: list[Message] = []
        host.episodes.add(self._number)
        # Nobody ends an episode that a limit on its tokens has cut.
        weakref.finalize(self, host.forget, self._number)

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        answer = await self._host.call(self._seconds, "start", self._number, self._arguments)
        self._messages = answer["messages"]
        return ModelInput.model_validate(answer["observation"]), answer["stop"]

    def prompt_messages(self) -> Sequence[Message]:
        return self._messages

    async def step(self, action: Action) -> StepResult:
        answer = await self._host.call(self._seconds, "step", self._number, [int(token) for token in action])
        return StepResult(
            reward=float(answer["reward"]),
            episode_done=bool(answer["episode_done"]),
            next_observation=ModelInput.model_validate(answer["observation"]),
            next_stop_condition=answer["stop"],
            metrics=answer["metrics"],
            logs=answer["logs"],
        )


@dataclass
class _Host:
    """A worker, which is started when it is needed, and the episodes that it plays."""

    start: Callable[[], Any]
    worker: Worker | None = None
    episodes: set[int] = field(default_factory=set)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _known: set[int] = field(default_factory=set)
    """Episodes that the present process has begun."""
    _forgotten: list[int] = field(default_factory=list)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self) -> Worker:
        if self.worker is None:
            self.worker = await self.start()
        return self.worker

    async def close(self) -> None:
        worker, self.worker = self.worker, None
        self._known.clear()
        if worker is not None:
            await worker.kill()

    def forget(self, number: int) -> None:
        self.episodes.discard(number)
        self._forgotten.append(number)

    async def call(self, seconds: float, method: str, number: int, content: Any) -> dict[str, Any]:
        """Return what the process answers; raise ``EpisodeLost``. The wait for other calls is no part of the time."""
        async with self._lock:
            if method == "step" and number not in self._known:
                raise EpisodeLost("the process that played this episode has ended")
            try:
                worker = await self.open()
                forgotten, self._forgotten = self._forgotten, []
                self._known.add(number)
                kind, answer = await worker.run((method, number, content, forgotten), seconds)
            except TimeoutError:
                kind, answer = "timeout", f"no answer after {seconds:g} seconds"
            except (WorkerDied, InvalidInput) as error:
                kind, answer = "died", str(error)
            except asyncio.CancelledError:
                await self.close()  # its answer would be taken for that of the next call
                raise
            if kind not in ("ok", "raised"):
                await self.close()
        if kind != "ok":
            raise EpisodeLost(f"{kind}: {answer}")
        return _checked(answer, {"observation", "stop", "messages"} if method == "start" else _STEP)


_STEP = {"observation", "stop", "reward", "episode_done", "metrics", "logs"}


def _checked(answer: Reply | Any, names: Iterable[str]) -> dict[str, Any]:
    if not isinstance(answer, dict) or answer.keys() != set(names):
        raise EpisodeLost(f"the process of the environment sent {str(answer)[:200]!r}, which is no answer")
    return answer


# ── in the process ────────────────────────────────────────────────────────────────────────────────────


class Episodes:
    """The environments of one process by number; called by ``grader_worker.py``."""

    def __init__(self, module: str, name: str, main_path: str | None) -> None:
        self._make_env = find_function(module, name, main_path)
        self._envs: dict[int, Env] = {}
        self._runner = asyncio.Runner()  # one loop: an environment may hold what belongs to it

    def __call__(self, method: str, number: int, content: Any, forgotten: list[int]) -> dict[str, Any]:
        for one in forgotten:
            self._envs.pop(one, None)
        try:
            return self._runner.run(self._play(method, number, content))
        except BaseException:
            self._envs.pop(number, None)
            raise

    async def _play(self, method: str, number: int, content: Any) -> dict[str, Any]:
        if method == "start":
            self._envs[number] = self._make_env(*content)
            observation, stop = await self._envs[number].initial_observation()
            messages = list(self._envs[number].prompt_messages())
            return {"observation": observation.model_dump(mode="json"), "stop": list(stop), "messages": messages}
        result = await self._envs[number].step(content)
        if result.episode_done:
            del self._envs[number]
        return {
            "observation": result.next_observation.model_dump(mode="json"),
            "stop": list(result.next_stop_condition),
            "reward": float(result.reward),
            "episode_done": bool(result.episode_done),
            "metrics": result.metrics,
            "logs": result.logs,
        }
