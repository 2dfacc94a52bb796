"""A model loaded by both sides in every measured dtype, and the state that the rows share."""

from dataclasses import dataclass, field
from pathlib import Path

from bench.models import ModelShape
from bench.ours import Lorimer
from bench.peers import Peft
from bench.timing import Contestant, Progress, Timings, compete
from bench.workloads import loss_scale
from lorimer.engine.config import Dtype
from lorimer.engine.messages import Datum

TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
"""Maximum difference of losses, for a weight of 1, at which both sides count as equal."""


@dataclass
class Contest:
    shape: ModelShape
    directory: Path
    """The base model."""
    adapter: Path
    """The initial adapter of every run."""
    ours: dict[Dtype, Lorimer]
    peers: dict[Dtype, Peft]
    num_rounds: int
    num_threads: int
    progress: Progress
    fastest: dict[tuple[str, str], str] = field(default_factory=dict)
    """Names of the fastest contestants by row and team, for rows that measure only these."""

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
            max_seconds=self.shape.row_seconds,
            progress=lambda text: self.progress(f"{self.shape.name} {row}: {text}"),
        )
        for team in {c.team for c in contestants}:
            self.fastest[row, team] = timings.best(team).name
        return timings


def open_contest(
    shape: ModelShape, dtypes: list[Dtype], root: Path, num_rounds: int, num_threads: int, progress: Progress
) -> Contest:
    """Write the model and an adapter to ``root`` and load them on both sides."""
    directory, adapter = root / shape.name, root / f"{shape.name}-adapter"
    progress(f"{shape.name}: making the model")
    shape.write(directory)
    Lorimer(directory, adapter, "float32", num_threads)
    ours = {dtype: Lorimer(directory, adapter, dtype, num_threads, shape.sizes.num_runs) for dtype in dtypes}
    peers = {dtype: Peft(directory, adapter, dtype) for dtype in dtypes}
    return Contest(shape, directory, adapter, ours, peers, num_rounds, num_threads, progress)


class LossCheck:
    """Checks that all contestants of a round compute the same loss."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, float]] = {}

    def add(self, number: int, name: str, loss: float, data: list[Datum]) -> None:
        other, expected = self._first.setdefault(number, (name, loss))
        tolerance = max(limit for dtype, limit in TOLERANCE.items() if dtype in f"{name} {other}")
        if not abs(loss - expected) <= tolerance * loss_scale(data):
            raise RuntimeError(f"{name} computed a loss of {loss!r} where {other} computed {expected!r}")
