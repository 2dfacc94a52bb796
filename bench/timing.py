"""Times contestants alternately, round by round, so that other load on the machine affects all of them.

A contestant that is clearly slower than another of its team in the first round is not run again, because only the best
of a team counts. Nor is one that alone takes much of the row's time budget. A row that has used it up is not repeated.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

CLEARLY = 1.2
MAX_SHARE = 0.25
"""Of a row's time budget: a contestant that takes more is timed once."""


class PeerFailed(Exception):
    """A peer could not do its work. It costs the peer its figures, and not the others theirs."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    name: str
    team: str
    run: Callable[[int], object]
    """The function to time; its argument is the number of the round, from 1."""
    warm_up: Callable[[], object]
    """Warm-up before the first round, on data of the same size: the first pass allocates memory."""
    is_kept: bool = False
    """Run in every round, even if another of the team is faster."""


@dataclass
class Timing:
    name: str
    team: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def rate(self, count: int) -> str:
        """Format tokens per second: the median, and in brackets slowest to fastest and the number of rounds."""
        middle, low, high = (count / s for s in (self.median, max(self.seconds), min(self.seconds)))
        return f"{middle:.0f} tok/s ({low:.0f}..{high:.0f}, n={len(self.seconds)})"

    def duration(self) -> str:
        """Format seconds: the median, and in brackets shortest to longest and the number of rounds."""
        return f"{self.median:.2f} s ({min(self.seconds):.2f}..{max(self.seconds):.2f}, n={len(self.seconds)})"


class Timings:
    """The timings of a row."""

    def __init__(self, timings: list[Timing], failures: dict[str, str]) -> None:
        self._timings = timings
        self.failures = failures
        """Why teams without a timing have none."""

    def has(self, team: str) -> bool:
        return any(timing.team == team for timing in self._timings)

    def best(self, team: str, name: str = "") -> Timing:
        """Return the fastest contestant of a team, among those with ``name`` in their name."""
        found = [t for t in self._timings if t.team == team and name in t.name]
        # A contestant dropped after the first round must not win because the machine was busy later.
        num_rounds = max(len(t.seconds) for t in found)
        return min((t for t in found if len(t.seconds) == num_rounds), key=lambda t: t.median)


Progress = Callable[[str], None]


def say(text: str) -> None:
    """Print one line to standard error."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def compete(contestants: list[Contestant], *, num_rounds: int, max_seconds: float, progress: Progress) -> Timings:
    """Run all contestants alternately, up to ``num_rounds`` times and at least once."""
    timings = {c.name: Timing(c.name, c.team) for c in contestants}
    failures: dict[str, str] = {}

    def attempt(contestant: Contestant, work: Callable[[], object], what: str) -> bool:
        try:
            seconds = clock(work)
        except PeerFailed as error:
            progress(f"{what}: {contestant.name} failed: {error}")
            failures[contestant.team] = str(error)
            del timings[contestant.name]
            return False
        progress(f"{what}: {contestant.name} {seconds:.2f} s")
        if work is not contestant.warm_up:
            timings[contestant.name].seconds.append(seconds)
        return True

    running = [c for c in contestants if attempt(c, c.warm_up, "warm-up")]
    with little_garbage():
        for number in range(1, num_rounds + 1):
            running = [c for c in running if attempt(c, partial(c.run, number), f"round {number}")]
            running = _still_in(running, timings, max_seconds)
            spent = sum(sum(timing.seconds) for timing in timings.values())
            if spent + sum(timings[c.name].median for c in running) > max_seconds:
                break
    teams = {timing.team for timing in timings.values()}
    return Timings(list(timings.values()), {team: text for team, text in failures.items() if team not in teams})


def _still_in(contestants: list[Contestant], timings: dict[str, Timing], max_seconds: float) -> list[Contestant]:
    fastest: dict[str, float] = {}
    for c in contestants:
        fastest[c.team] = min(fastest.get(c.team, float("inf")), timings[c.name].median)
    return [
        c
        for c in contestants
        if (seconds := timings[c.name].median) <= MAX_SHARE * max_seconds
        and (c.is_kept or seconds <= CLEARLY * fastest[c.team])
    ]


@contextmanager
def little_garbage() -> Iterator[None]:
    """Freeze existing objects, so that ``clock`` collects garbage quickly."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def clock(run: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
