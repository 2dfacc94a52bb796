"""Stores what a training loop measured of weights that it also saved, as evaluations of that checkpoint.

A measurement and the checkpoint of the same step come in either order. Training does not fail with the report: what
cannot be stored is logged, and the metrics have it all the same.
"""

import logging

from lorimer import RestClient
from lorimer.cookbook.evals.running import Measured

log = logging.getLogger("lorimer.cookbook")

MAX_STEPS = 16
"""Steps whose measurements wait for a checkpoint."""


class CheckpointResults:
    def __init__(self) -> None:
        self._waiting: dict[int, list[Measured]] = {}

    async def add_measured(self, rest: RestClient, step: int, path: str | None, found: Measured) -> None:
        """Store a measurement if the weights of its step are saved at ``path``, else keep it until they are."""
        if path is not None:
            await self._store(rest, path, found)
            return
        self._waiting.setdefault(step, []).append(found)
        while len(self._waiting) > MAX_STEPS:
            self._waiting.pop(min(self._waiting))

    async def add_saved(self, rest: RestClient, step: int, path: str) -> None:
        """Store what was measured of the weights that are now a checkpoint."""
        for found in self._waiting.pop(step, []):
            await self._store(rest, path, found)

    async def _store(self, rest: RestClient, path: str, found: Measured) -> None:
        try:
            await found.store(rest, path)
        except Exception as error:
            log.warning("the result of %s is not stored beside %s: %s", found.task, path, error)
