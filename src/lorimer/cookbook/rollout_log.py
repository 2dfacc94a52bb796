"""Sends rollouts and samples of a loop to the server that trains its run, where the console shows them.

Training neither waits for it nor fails with it. Of each step it sends groups up to a fraction and a size; texts are
decoded in a thread, and only of what is sent. A server that has no place for rollouts costs one warning.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lorimer.client.errors import NotFoundError
from lorimer.client.rollouts import estimated_bytes
from lorimer.client.training import TrainingClient
from lorimer.cookbook.completers import derive_seed
from lorimer.cookbook.reporting import PATIENCE_SECONDS, Reporter
from lorimer.errors import InvalidInput
from lorimer.types import Rollout

MAX_BATCHES = 8
"""Steps that wait to be sent; they hold their trajectories."""

GroupMaker = Callable[[], Sequence[Rollout]]
"""Makes the rollouts of one group; called only if they are sent."""


@dataclass(frozen=True)
class Batch:
    """The groups of one step that are to be sent."""

    step: int
    groups: Sequence[GroupMaker]


class RolloutLog(Reporter[Batch]):
    """``fraction`` of the groups of each step, up to ``max_bytes`` of JSON; a fraction of 0 sends nothing."""

    what = "rollouts"

    def __init__(self, client: TrainingClient, fraction: float, max_bytes: int, seed: int = 0) -> None:
        super().__init__(MAX_BATCHES)
        self._fraction, self._max_bytes, self._seed = fraction, max_bytes, seed
        if fraction:
            self.follow(client)

    def log(self, step: int, groups: Sequence[GroupMaker], name: str = "train") -> None:
        """Send some groups of a step; which ones depends on the seed, the step and ``name`` alone."""
        chosen = [
            group
            for index, group in enumerate(groups)
            if derive_seed(self._seed, "rollouts", name, step, index) < self._fraction * 2**63
        ]
        if chosen:
            self._put(Batch(step, chosen))

    async def _deliver(self, client: TrainingClient, items: list[Batch]) -> None:
        for batch in items:
            rollouts = await asyncio.to_thread(self._made, batch)
            try:
                await client.rollout_reports.send(rollouts, batch.step, PATIENCE_SECONDS)
            except NotFoundError as error:
                raise InvalidInput(f"{error} (servers of older versions have no place for them)") from error

    def _made(self, batch: Batch) -> list[Rollout]:
        return list(self._fitting(batch))

    def _fitting(self, batch: Batch) -> Iterator[Rollout]:
        """Yield whole groups until the next one would be too much; of a first group that is, what fits."""
        left = self._max_bytes
        for number, make in enumerate(batch.groups):
            rollouts = make()
            sizes = [estimated_bytes(rollout) for rollout in rollouts]
            if number and sum(sizes) > left:
                return
            for rollout, size in zip(rollouts, sizes, strict=True):
                left -= size
                if left < 0:
                    return
                yield rollout


def check_options(fraction: float, max_bytes: int) -> None:
    """Refuse settings of a loop that are not in range."""
    if not 0 <= fraction <= 1:
        raise InvalidInput(f"rollout_fraction is {fraction}; 0 to 1 is accepted")
    if max_bytes < 1:
        raise InvalidInput(f"rollout_bytes is {max_bytes}; 1 or more is accepted")
