"""A model loaded by both sides in every measured dtype, and the state that the rows share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.models import ModelShape
from bench.ours import Lorimer, write_adapters
from bench.outsiders import OUTSIDERS, Outsider, Setting
from bench.peers import Peft
from bench.timing import Contestant, Progress, Timings, compete
from bench.workloads import loss_scale
from lorimer.engine.config import Dtype
from lorimer.engine.messages import Datum

TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
"""Maximum difference of losses, for a weight of 1, at which both sides count as equal."""
OUTSIDE_BUDGET = 3.0
"""How many times as long a row may take if there are outsiders."""


@dataclass
class Contest:
    shape: ModelShape
    directory: Path
    """The base model."""
    adapters: Sequence[Path]
    """All different; the first is the initial adapter of every run."""
    ours: dict[Dtype, Lorimer]
    peers: dict[Dtype, Peft]
    outsiders: list[Outsider]
    num_rounds: int
    num_threads: int
    progress: Progress
    fastest: dict[tuple[str, str], str] = field(default_factory=dict)
    """Names of the fastest contestants by row and team, for rows that measure only these."""
    mismatches: list[str] = field(default_factory=list)
    """What outsiders computed otherwise than our engine."""

    @property
    def adapter(self) -> Path:
        return self.adapters[0]

    @property
    def best_ours(self) -> Lorimer:
        """Return our engine in the dtype that trained fastest, or the first one before any measurement."""
        name = self.fastest.get(("sft", "ours"), "")
        return next((side for dtype, side in self.ours.items() if dtype in name), next(iter(self.ours.values())))

    def compete(self, row: str, contestants: list[Contestant]) -> Timings:
        """Run the contestants of a row and store the fastest of each team."""
        timings = compete(
            contestants,
            num_rounds=self.num_rounds,
            max_seconds=self.shape.row_seconds * (OUTSIDE_BUDGET if self.outsiders else 1.0),
            progress=lambda text: self.progress(f"{self.shape.name} {row}: {text}"),
        )
        for team in {c.team for c in contestants} - timings.failures.keys():
            self.fastest[row, team] = timings.best(team).name
        self.close()  # in two dtypes the processes of all rows together need more than 24 GiB
        return timings

    def close(self) -> None:
        """End the processes of outsiders."""
        for outsider in self.outsiders:
            outsider.close()


def open_contest(
    shape: ModelShape,
    dtypes: list[Dtype],
    root: Path,
    num_rounds: int,
    num_threads: int,
    progress: Progress,
    has_outsiders: bool = False,
) -> Contest:
    """Write the model and adapters to ``root`` and load them on both sides.

    With outsiders the adapters have no pair on the head: TRL 1.16 trains as if it were not there, and SkyRL refuses it
    where the head is tied to the embedding.
    """
    directory = root / shape.name
    adapters = [root / f"{shape.name}-adapter-{number}" for number in range(shape.sizes.num_adapters)]
    progress(f"{shape.name}: making the model")
    shape.write(directory)
    write_adapters(directory, adapters, num_threads, has_head=not has_outsiders)
    ours = {dtype: Lorimer(directory, adapters[0], dtype, num_threads, shape.sizes.num_runs) for dtype in dtypes}
    peers = {dtype: Peft(directory, adapters[0], dtype) for dtype in dtypes}
    settings = [
        Setting(shape=shape, directory=directory, adapters=adapters, dtype=dtype, num_threads=num_threads)
        for dtype in dtypes
    ]
    outsiders = [make(setting) for setting in settings for make in OUTSIDERS] if has_outsiders else []
    return Contest(shape, directory, adapters, ours, peers, outsiders, num_rounds, num_threads, progress)


class LossCheck:
    """Checks that all contestants of a round compute the same loss."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, float]] = {}

    def add(self, number: int, name: str, loss: float, data: list[Datum]) -> None:
        other, expected = self._first.setdefault(number, (name, loss))
        tolerance = max(limit for dtype, limit in TOLERANCE.items() if dtype in f"{name} {other}")
        if not abs(loss - expected) <= tolerance * loss_scale(data):
            raise RuntimeError(f"{name} computed a loss of {loss!r} where {other} computed {expected!r}")
