"""Graders in processes of their own, so that grading neither stalls nor kills training.

A grader that sleeps for ever, takes all memory, raises, or kills its process costs one ``Grade`` with an error, which
is counted; its process is replaced. With ``backend="ray"`` the processes are actors of a Ray cluster.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self, get_args

from lorimer.cookbook.rl import grader_worker
from lorimer.cookbook.rl.grader_worker import Reply
from lorimer.errors import InvalidInput, Unsupported

START_SECONDS = 120.0
"""For the imports of a grader, which are no part of its time."""

Backend = Literal["processes", "ray"]
GradeError = Literal["timeout", "memory", "raised", "died"]


@dataclass(frozen=True)
class Grade:
    """What a grader said, or why it said nothing."""

    value: float
    """0 where there is an error."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: GradeError | None = None
    detail: str = ""
    """Of an error: the traceback, or a sentence."""


class Worker(Protocol):
    async def run(self, arguments: tuple[Any, ...], timeout_seconds: float) -> Reply:
        """Raises ``TimeoutError`` or ``WorkerDied``."""

    async def kill(self) -> None: ...


class WorkerDied(Exception):
    """The process of a grader ended while it graded."""


class GraderPool:
    """Calls ``grader(*arguments)`` in worker processes; it returns a number, or a number and a dict of metrics.

    The grader is a function that can be imported, or its name as ``module:function``. Used as a context manager it
    refuses a grader that cannot be found before anything is sampled, and ends its processes on leaving.
    """

    def __init__(
        self,
        grader: Callable[..., Any] | str,
        *,
        num_workers: int = 2,
        timeout_seconds: float = 10.0,
        memory_mb: int | None = 2048,
        backend: Backend = "processes",
    ) -> None:
        if num_workers < 1:
            raise InvalidInput(f"num_workers is {num_workers}; 1 or more is accepted")
        self.timeout_seconds = timeout_seconds
        self.counts: Counter[str] = Counter()
        """Grades since the pool was made: ``graded``, and each kind of error."""
        self._reported: Counter[str] = Counter()
        self._setup = function_setup(grader, memory_mb)
        self._start = find_backend(backend)
        # A slot holds an idle worker, or None where one must be started; the youngest is used first.
        self._slots: asyncio.LifoQueue[Worker | None] = asyncio.LifoQueue()
        self._num_slots = num_workers
        for _ in range(num_workers):
            self._slots.put_nowait(None)

    async def __aenter__(self) -> Self:
        self._slots.get_nowait()
        self._slots.put_nowait(await self._start(self._setup))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the processes once they are idle."""
        for _ in range(self._num_slots):
            worker = await self._slots.get()
            if worker is not None:
                await worker.kill()

    async def grade(self, *arguments: Any) -> Grade:
        """Never raises for what the grader does. Waits for a free worker; that is no part of the grader's time."""
        worker = await self._slots.get()
        grade = Grade(0.0, error="died", detail="cancelled")
        try:
            if worker is None:
                worker = await self._start(self._setup)
            grade = _grade(await worker.run(arguments, self.timeout_seconds))
        except TimeoutError:
            grade = Grade(0.0, error="timeout", detail=f"no grade after {self.timeout_seconds:g} seconds")
        except (WorkerDied, InvalidInput) as error:
            grade = Grade(0.0, error="died", detail=str(error))
        finally:
            # What raised in order leaves a worker fit for the next call; anything else does not.
            if worker is not None and grade.error not in (None, "raised"):
                await worker.kill()
                worker = None
            self._slots.put_nowait(worker)
        self.counts[grade.error or "graded"] += 1
        return grade

    def take_metrics(self) -> dict[str, float]:
        """Counts since they were last taken, for the log of a step."""
        new = self.counts - self._reported
        self._reported = Counter(self.counts)
        errors = {kind: new[kind] for kind in get_args(GradeError)}
        metrics: dict[str, float] = {"grader/graded": new["graded"], "grader/errors": sum(errors.values())}
        return metrics | {f"grader/errors_{kind}": count for kind, count in errors.items() if count}


def _grade(reply: Reply) -> Grade:
    kind, content = reply
    if kind == "ok":
        return Grade(content[0], content[1])
    return Grade(0.0, error=kind, detail=content)  # type: ignore[arg-type]


def function_setup(grader: Callable[..., Any] | str, memory_mb: int | None) -> dict[str, Any]:
    """How a worker finds the grader: by its module, or by the script that is the main program."""
    main_path = None
    if isinstance(grader, str):
        module, colon, name = grader.partition(":")
        if not (module and colon and name):
            raise InvalidInput(f"the grader is {grader!r}; a name such as 'module:function' is accepted")
    else:
        module, name = getattr(grader, "__module__", ""), getattr(grader, "__qualname__", repr(grader))
        if "<" in name or not module:
            raise InvalidInput(f"the grader is {name}; a function at the top of a module is accepted")
        if module == "__main__":
            main = sys.modules["__main__"]
            spec = getattr(main, "__spec__", None)
            module = spec.name if spec else module
            main_path = None if spec else getattr(main, "__file__", None)
            if spec is None and main_path is None:
                raise InvalidInput(f"the grader {name} is in no file; move it into a module that can be imported")
    path = [os.getcwd() if entry == "" else entry for entry in sys.path]
    if isinstance(grader, str) and os.getcwd() not in path:
        path.append(os.getcwd())
    memory_bytes = None if memory_mb is None else memory_mb * 2**20
    return {"module": module, "name": name, "main_path": main_path, "path": path, "memory_bytes": memory_bytes}


# ── processes of this machine ─────────────────────────────────────────────────────────────────────────


class ProcessWorker:
    """A process that grades one call at a time, in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process, is_grader: bool) -> None:
        self._process, self._is_grader = process, is_grader

    @classmethod
    async def start(cls, setup: dict[str, Any]) -> Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", grader_worker.__file__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        worker = cls(process, "made_of" not in setup)
        try:
            kind, detail = await worker._exchange(setup, START_SECONDS)
        except (TimeoutError, WorkerDied, asyncio.CancelledError) as error:
            await worker.kill()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise InvalidInput(f"the grader {setup['module']}:{setup['name']} did not start: {error!r}") from error
        if kind != "ready":
            await worker.kill()
            raise InvalidInput(f"the grader {setup['module']}:{setup['name']} cannot be loaded: {last_line(detail)}")
        return worker

    async def run(self, arguments: tuple[Any, ...], timeout_seconds: float) -> Reply:
        return await self._exchange((arguments, timeout_seconds), timeout_seconds)

    async def _exchange(self, message: Any, timeout_seconds: float) -> Reply:
        assert self._process.stdin is not None and self._process.stdout is not None
        stdin, stdout = self._process.stdin, self._process.stdout

        async def exchange() -> bytes:
            stdin.write(grader_worker.encode_request(message))
            await stdin.drain()
            (size,) = grader_worker.HEADER.unpack(await stdout.readexactly(grader_worker.HEADER.size))
            if size > grader_worker.MAX_REPLY:
                raise WorkerDied(f"the process of the grader sent {size} bytes, which is no reply")
            return await stdout.readexactly(size)

        try:
            body = await asyncio.wait_for(exchange(), timeout_seconds)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            raise WorkerDied(f"the process of the grader ended with status {code}") from None
        try:
            return grader_worker.decode_reply(body, self._is_grader)
        except (TypeError, ValueError) as error:
            raise WorkerDied(f"the process of the grader sent what is no reply: {error}") from None

    async def kill(self) -> None:
        """End the process, and those it started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


# ── actors of a Ray cluster ───────────────────────────────────────────────────────────────────────────


def find_backend(backend: Backend) -> Callable[[dict[str, Any]], Any]:
    """Return what starts the workers of a backend."""
    if backend not in get_args(Backend):
        raise InvalidInput(f"backend is {backend!r}; accepted are {', '.join(get_args(Backend))}")
    if backend == "processes":
        return ProcessWorker.start
    try:
        from lorimer.cookbook.rl.ray_graders import RayWorker
    except ImportError as error:
        raise Unsupported(
            f"backend 'ray' needs the package ray, which is not installed ({error}): pip install 'lorimer[cluster]', "
            "or take backend 'processes'"
        ) from None
    return RayWorker.start


def last_line(detail: Any) -> str:
    """Of a traceback, the error that it ends with."""
    return (str(detail).strip().splitlines() or ["it gave no reason"])[-1]
