"""Finds out what ends engines: while there are suspects, an engine gets only those, and one thing at a time.

Whatever an engine was computing when it ended is blamed. What is blamed twice is a suspect; computed alone, it either
comes out, and was innocent, or ends another engine, until it is given up. Everything else waits that long.
"""

from collections.abc import Callable
from typing import Protocol


class Suspect(Protocol):
    deaths: int

    @property
    def is_suspect(self) -> bool: ...


class Isolation:
    def __init__(self, is_busy: Callable[[], bool]) -> None:
        """``is_busy``: whether the engine is computing anything."""
        self.is_busy = is_busy
        self._suspects: list[Suspect] = []

    def blame(self, suspect: Suspect) -> None:
        suspect.deaths += 1
        if suspect not in self._suspects:
            self._suspects.append(suspect)

    @property
    def is_on(self) -> bool:
        if self._suspects:
            self._suspects = [suspect for suspect in self._suspects if suspect.is_suspect]
        return bool(self._suspects)
