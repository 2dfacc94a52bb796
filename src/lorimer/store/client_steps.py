"""Which step of the client an optimizer step belongs to, where the client counts otherwise than the engine.

A client that takes several optimizer steps in one of its steps, or none, reports with each step how many it has done
(`optim_steps`). Optimizer steps after the last report belong to the step after it, until the next report tells more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, select

from lorimer.store.tables import metrics, runs
from lorimer.types.thinning import Integers

LAST_NUMBER = 2**63 - 1


@dataclass(frozen=True)
class ClientSteps:
    """Reported steps in ascending order, the optimizer steps done by the end of each, and the entries that say so."""

    steps: Integers
    counts: Integers
    entry_ids: Integers
    times: NDArray[np.float64]
    """When each was reported, in ascending order."""

    def place(self, optim_steps: Integers) -> Integers:
        """Return the client's step of each optimizer step, both counted from 0."""
        found = np.searchsorted(self.counts, optim_steps, side="right")
        return np.append(self.steps, self.steps[-1] + 1)[found]

    def num_done(self, optim_steps: int, at: float) -> int:
        """Return how many steps the client had done when the engine had done ``optim_steps``, at the time ``at``.

        The time only decides between steps of the client that have no optimizer step.
        """
        fewer = int(np.searchsorted(self.counts, optim_steps, side="left"))
        last = int(np.searchsorted(self.counts, optim_steps, side="right"))
        first = fewer + 1 if fewer < last and optim_steps else fewer
        num_reports = min(max(int(np.searchsorted(self.times, at, side="right")), first), last)
        return int(self.steps[num_reports - 1]) + 1 if num_reports else int(self.steps[0])

    def first_unsettled(self, entry_id: int, optim_step: int) -> int:
        """Return the first optimizer step that a reader who got to an entry reads again when ``optim_step`` is new.

        It begins a step of the client, and no report before the entry tells where those from there on belong.
        """
        settled = self.counts[(self.entry_ids <= entry_id) & (self.counts <= optim_step)]
        return int(settled.max(initial=0))

    def optim_steps(self, first: int, last: int) -> tuple[int, int]:
        """Return the first and last optimizer step of a range of the client's steps."""
        begin = self.counts[self.steps < first].max(initial=0)
        end = LAST_NUMBER if last > self.steps[-1] else int(self.counts[self.steps <= last].max(initial=0)) - 1
        return int(begin), end


def read(c: Connection, model_id: str) -> ClientSteps | None:
    """Return what a client reported of a training run, or None if it reported nothing: then both count alike."""
    columns = (metrics.c.number, metrics.c.optim_steps, metrics.c.entry_id, metrics.c.at)
    marked = (metrics.c.model_id == model_id) & metrics.c.optim_steps.is_not(None)
    rows = c.execute(select(*columns).where(marked).order_by(metrics.c.number, metrics.c.entry_id)).all()
    if not rows:
        return None
    latest = {row.number: row for row in rows}  # of two reports of a step the later counts
    table = np.array([tuple(row)[:3] for row in latest.values()], np.int64).reshape(-1, 3)
    times = np.array([row.at for row in latest.values()], np.float64)
    return ClientSteps(table[:, 0], np.maximum.accumulate(table[:, 1]), table[:, 2], np.maximum.accumulate(times))


def counted(c: Connection, places: Sequence[tuple[str, int | None, datetime]]) -> list[int | None]:
    """Return the steps that runs had done, as their clients count them.

    A place is a training run, the optimizer steps that its run had done, earlier parts included, and the time.
    """
    model_ids = {model_id for model_id, step, _ in places if step is not None}
    rows = c.execute(select(runs.c.model_id, runs.c.optim_steps_before).where(runs.c.model_id.in_(model_ids)))
    known = {model_id: (before, read(c, model_id)) for model_id, before in rows}
    found: list[int | None] = []
    for model_id, step, at in places:
        before, steps = known.get(model_id, (0, None))
        if steps is not None and step is not None and step >= before:
            step = steps.num_done(step - before, at.timestamp())
        found.append(step)
    return found
