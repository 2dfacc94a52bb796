"""Rollouts of runs: logged in requests of bounded size, in the order of the calls, and found again; ours alone."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from lorimer.client.admin import Caller
from lorimer.client.connection import Connection
from lorimer.client.futures import AwaitableConcurrentFuture
from lorimer.client.retries import PATIENCE_SECONDS
from lorimer.client.runs import run_path
from lorimer.types.base import validate
from lorimer.types.rollouts import (
    LoggedRollout,
    LogRolloutsRequest,
    LogRolloutsResponse,
    Rollout,
    RolloutsResponse,
    RolloutStepsResponse,
)
from lorimer.types.runs import RunDetails

MAX_ROLLOUTS = 100
MAX_BYTES = 4 * 1024 * 1024
"""Of one request, after which the next one begins."""
MAX_COUNTED = 10_000
"""Groups whose rollouts are counted; those of the oldest steps are forgotten."""

GivenRollout = Rollout | Mapping[str, Any]
NO_DEFAULTS: Mapping[str, str] = {}
SAMPLE: Mapping[str, str] = {"kind": "sample", "split": "test"}
"""What samples are, unless they say otherwise."""


class RolloutReports:
    """What one client logs to its run, one request after the other.

    Rollouts without a number get the next one of their group, so that several calls add up, and a program that resumes
    replaces what it logged before.
    """

    def __init__(self, connection: Connection, model_id: str) -> None:
        self._connection, self._path = connection, f"/api/v1{run_path(model_id)}/rollouts"
        self._turn = asyncio.Lock()
        self._counts: dict[tuple[int, str, str, str], int] = {}

    def send(
        self,
        given: Sequence[GivenRollout],
        step: int | None = None,
        patience: float = PATIENCE_SECONDS,
        defaults: Mapping[str, str] = NO_DEFAULTS,
    ) -> AwaitableConcurrentFuture[LogRolloutsResponse]:
        """Log rollouts. ``step`` holds for all of them, ``defaults`` for fields that they do not give."""
        fixed = {} if step is None else {"step": step}
        rollouts = [self._numbered(as_rollout(one, defaults, fixed, index)) for index, one in enumerate(given)]
        return self._connection.run(self._send(rollouts, patience))

    def _numbered(self, rollout: Rollout) -> Rollout:
        key = (rollout.step, rollout.kind, rollout.split, rollout.group)
        number = rollout.number if "number" in rollout.model_fields_set else self._counts.get(key, 0)
        self._counts[key] = max(number + 1, self._counts.get(key, 0))
        if len(self._counts) > MAX_COUNTED:
            del self._counts[min(self._counts)]
        return rollout.model_copy(update={"number": number})

    async def _send(self, rollouts: Sequence[Rollout], patience: float) -> LogRolloutsResponse:
        stored = superseded = 0
        async with self._turn:
            for some in parted(rollouts):
                body = LogRolloutsRequest(rollouts=some)
                answer = await self._connection.transport.ask(
                    LogRolloutsResponse, "POST", self._path, body, patience=patience
                )
                stored, superseded = stored + answer.num_stored, superseded + answer.num_superseded
        return LogRolloutsResponse(num_stored=stored, num_superseded=superseded)


def as_rollout(given: GivenRollout, defaults: Mapping[str, Any], fixed: Mapping[str, Any], index: int) -> Rollout:
    """Return what was given as a rollout. Raise ``InvalidInput`` with the path of a wrong field."""
    values = {name: getattr(given, name) for name in given.model_fields_set} if isinstance(given, Rollout) else given
    return validate(Rollout, {**defaults, **values, **fixed}, f"rollouts[{index}]")


def parted(rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    """Yield rollouts in requests, none of which is empty."""
    some: list[Rollout] = []
    num_bytes = 0
    for rollout in rollouts:
        size = estimated_bytes(rollout)
        if some and (len(some) == MAX_ROLLOUTS or num_bytes + size > MAX_BYTES):
            yield some
            some, num_bytes = [], 0
        some.append(rollout)
        num_bytes += size
    if some:
        yield some


def estimated_bytes(rollout: Rollout) -> int:
    """Return about how large a rollout is as JSON, without encoding it."""
    size = 500 + sum(map(len, rollout.errors))
    for turn in rollout.turns:
        lists = (turn.tokens, turn.logprobs, turn.advantages, turn.offsets)
        size += 100 + len(turn.content.encode("utf-8", "replace")) + sum(12 * len(one) for one in lists if one)
        size += sum(100 + len(call.arguments) + len(call.result or "") for call in turn.tool_calls)
        size += sum(len(name) + len(str(value)) + 8 for name, value in turn.logs.items())
    return size


class RolloutsClient(Caller):
    """A run is named by its id or by that of any of its training runs."""

    def log_rollouts(
        self, run_id: str, rollouts: Sequence[GivenRollout], step: int | None = None
    ) -> "Future[LogRolloutsResponse]":
        """Log rollouts to a run without a training client. Those of a group are counted from 0 in each call."""
        return self._connection.loop.run(self._log(run_id, rollouts, step, NO_DEFAULTS))

    async def log_rollouts_async(
        self, run_id: str, rollouts: Sequence[GivenRollout], step: int | None = None
    ) -> LogRolloutsResponse:
        return await self._wait(self.log_rollouts(run_id, rollouts, step))

    def log_samples(
        self, run_id: str, samples: Sequence[GivenRollout], step: int | None = None
    ) -> "Future[LogRolloutsResponse]":
        """Log answers that were evaluated, so that an evaluation that is repeated replaces the earlier one."""
        return self._connection.loop.run(self._log(run_id, samples, step, SAMPLE))

    async def log_samples_async(
        self, run_id: str, samples: Sequence[GivenRollout], step: int | None = None
    ) -> LogRolloutsResponse:
        return await self._wait(self.log_samples(run_id, samples, step))

    async def _log(
        self, run_id: str, given: Sequence[GivenRollout], step: int | None, defaults: Mapping[str, str]
    ) -> LogRolloutsResponse:
        """Log to the newest part of a run: those before it are superseded from some step on."""
        run = await self._connection.transport.ask(RunDetails, "GET", f"/api/v1{run_path(run_id)}")
        reports = RolloutReports(self._connection, run.training_run_id)
        return await reports.send(given, step, defaults=defaults)

    def list_rollouts(
        self,
        run_id: str,
        query: str | None = None,
        *,
        sort: str = "-step",
        content: bool = False,
        limit: int = 50,
        after: str | None = None,
    ) -> "Future[RolloutsResponse]":
        """Return a page of the rollouts that match a query such as ``step=3 reward<0.5 stop=length words``.

        ``sort`` is ``step``, ``reward``, ``length`` or ``advantage``, descending after ``-``; ``content`` adds the
        turns, of at most 100; ``after`` is the ``next_cursor`` of an earlier page.
        """
        given = {"q": query, "sort": sort, "content": "yes" if content else "no", "limit": limit, "after": after}
        return self._start("list_rollouts", RolloutsResponse, "GET", f"{run_path(run_id)}/rollouts", query=given)

    async def list_rollouts_async(
        self,
        run_id: str,
        query: str | None = None,
        *,
        sort: str = "-step",
        content: bool = False,
        limit: int = 50,
        after: str | None = None,
    ) -> RolloutsResponse:
        return await self._wait(self.list_rollouts(run_id, query, sort=sort, content=content, limit=limit, after=after))

    def get_rollout(self, run_id: str, rollout_id: int) -> "Future[LoggedRollout]":
        """Return a rollout with its turns."""
        return self._start("get_rollout", LoggedRollout, "GET", f"{run_path(run_id)}/rollouts/{rollout_id}")

    async def get_rollout_async(self, run_id: str, rollout_id: int) -> LoggedRollout:
        return await self._wait(self.get_rollout(run_id, rollout_id))

    def list_rollout_steps(
        self, run_id: str, query: str | None = None, *, bins: int = 20
    ) -> "Future[RolloutStepsResponse]":
        """Return the steps that have rollouts which match, with a histogram of their rewards."""
        given = {"q": query, "bins": bins}
        return self._start(
            "list_rollout_steps", RolloutStepsResponse, "GET", f"{run_path(run_id)}/rollout_steps", query=given
        )

    async def list_rollout_steps_async(
        self, run_id: str, query: str | None = None, *, bins: int = 20
    ) -> RolloutStepsResponse:
        return await self._wait(self.list_rollout_steps(run_id, query, bins=bins))
