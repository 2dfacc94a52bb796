"""Brings the summaries of runs up to date: reads what was measured since, and stores last, smallest and largest values.

Of several servers on one database, one at a time does it.
"""

import secrets

from lorimer.store import leases, run_curves
from lorimer.store.database import Store

LEASE_SECONDS = 30.0


class Summariser:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._holder = secrets.token_hex(16)
        self._after: int | None = None
        self._next_after = 0

    async def advance(self) -> None:
        """Summarise the runs that have new metrics.

        Entries of concurrent transactions may be committed out of order, so those since the last call but one are
        looked at again.
        """
        if self._after is None:
            self._after = self._next_after = await self._store.read(run_curves.summarised_entry)
        changed, newest = await self._store.read(run_curves.changed_runs, self._after)
        if changed and not await self._store.write(leases.take, "run-summaries", self._holder, LEASE_SECONDS):
            return
        for run_id in changed:
            states = await self._store.read(run_curves.advance, run_id)
            if states.is_changed:
                await self._store.write(run_curves.store_summary, run_id, states.parts)
        self._after, self._next_after = self._next_after, newest
