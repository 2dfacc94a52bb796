"""Bounded off-policy training: sampling does not wait for updates, and updates wait for sampling only when they must.

At most ``groups_per_batch * max_steps_off_policy`` groups are being sampled or waiting at any time, so that a group of
usual length is never too old when its turn comes. One that is nevertheless is sampled again or dropped, and counted.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lorimer.cookbook.rl.envs import EnvGroupBuilder, RLDataset, TrajectoryGroup
from lorimer.cookbook.rl.rollouts import Policy, do_group_rollout
from lorimer.cookbook.rl.training import Run, learn


@dataclass(frozen=True)
class Ticket:
    """One group of the dataset that is to be sampled."""

    batch: int
    index: int
    builder: EnvGroupBuilder
    attempt: int = 0


class GroupQueue:
    """The groups of a dataset in order, over and over, without those that are done.

    Its state is what a checkpoint has to remember for a resumed run to learn from every group once.
    """

    def __init__(self, dataset: RLDataset, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self._dataset = dataset
        self._first_open: int = state.get("batch", 0)
        self._done = {(batch, index) for batch, index in state.get("done", [])}
        self._next_batch = self._first_open
        self._sizes: dict[int, int] = {}
        self._waiting: deque[Ticket] = deque()

    def take(self) -> Ticket:
        while not self._waiting:
            batch = self._next_batch
            builders = self._dataset.get_batch(batch % len(self._dataset))
            self._sizes[batch] = len(builders)
            self._waiting += [
                Ticket(batch, index, builder)
                for index, builder in enumerate(builders)
                if (batch, index) not in self._done
            ]
            self._next_batch += 1
        return self._waiting.popleft()

    def put_back(self, ticket: Ticket) -> None:
        """To be sampled again, before any other."""
        self._waiting.appendleft(replace(ticket, attempt=ticket.attempt + 1))

    def finish(self, ticket: Ticket) -> None:
        self._done.add((ticket.batch, ticket.index))
        while all((self._first_open, index) in self._done for index in range(self._sizes[self._first_open])):
            self._done -= {(self._first_open, index) for index in range(self._sizes.pop(self._first_open))}
            self._first_open += 1
            if self._first_open not in self._sizes:
                break

    def state(self) -> dict[str, Any]:
        return {"batch": self._first_open, "done": sorted(self._done)}


class Sampling:
    """Groups being sampled and groups that are ready, oldest first."""

    def __init__(self, queue: GroupQueue, policy: Policy, most: int) -> None:
        self.queue, self.policy, self.most = queue, policy, most
        self._tasks: dict[asyncio.Task[TrajectoryGroup], Ticket] = {}

    def fill(self) -> None:
        """Begin as many groups as there is room for, from the newest weights."""
        while len(self._tasks) < self.most:
            ticket = self.queue.take()
            policy = self.policy.seeded(ticket.batch, ticket.index, ticket.attempt)
            self._tasks[asyncio.create_task(do_group_rollout(ticket.builder, policy))] = ticket

    async def next(self) -> tuple[Ticket, asyncio.Task[TrajectoryGroup]]:
        """The group that was begun first among those that are ready, as a task that is done."""
        self.fill()
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        task = next(task for task in self._tasks if task.done())
        return self._tasks.pop(task), task

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def train_off_policy(run: Run, start: int) -> tuple[Policy, dict[str, Any]]:
    """Every group is sampled from weights at most ``max_steps_off_policy`` steps old. Answers the last weights and what
    a run that goes on must remember."""
    options = run.config.asynchronous
    assert options is not None
    last = run.training.checkpoints.last()
    queue = GroupQueue(run.dataset, last.extra if last else None)
    size = options.groups_per_batch or len(run.dataset.get_batch(0))
    sampling = Sampling(queue, await run.policy(start), size * options.max_steps_off_policy)
    try:
        for step in range(start, run.total):
            begun = time.monotonic()
            metrics = await run.evaluate(sampling.policy, step)
            tasks, num_stale = await _gather(sampling, step, size, options.max_steps_off_policy, options.stale)
            metrics[f"async/stale_{options.stale}"] = num_stale
            metrics["time/sampling"] = time.monotonic() - begun
            update = run.update(step)
            groups = await learn(update, tasks, run.config.num_substeps, run.config.num_minibatches)
            update_metrics, policy = await asyncio.gather(update.finish(), run.policy(step + 1))
            sampling.policy = policy
            run.report(step, groups, update_metrics | metrics, begun)
            await run.save_if_due(step + 1, queue.state())
    finally:
        await sampling.stop()
    return sampling.policy, queue.state()


async def _gather(
    sampling: Sampling, step: int, size: int, max_age: int, stale: str
) -> tuple[Sequence[asyncio.Task[TrajectoryGroup]], int]:
    """The groups of one step, and how many were too old for it."""
    tasks: list[asyncio.Task[TrajectoryGroup]] = []
    num_stale = 0
    while len(tasks) < size:
        ticket, task = await sampling.next()
        if step - task.result().sampler_step > max_age:
            num_stale += 1
            if stale == "requeue":
                sampling.queue.put_back(ticket)
                continue
        else:
            tasks.append(task)
        sampling.queue.finish(ticket)
    # The room that these groups left is taken before the update begins, so that sampling goes on beside it.
    sampling.fill()
    return tasks, num_stale
