"""Statistics of the scheduler for metrics and the overview: queues by user and kind, rates, served models."""

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lorimer.engine.messages import ModelInfo

if TYPE_CHECKING:
    from lorimer.scheduler.core import Core
    from lorimer.scheduler.runs import Operation

RATE_SECONDS = 60.0


class TokenRate:
    """Counts tokens, and the tokens per second over the last minute. The caller passes the time."""

    def __init__(self) -> None:
        self.total = 0
        self._recent: deque[tuple[float, int]] = deque()
        """The start of each interval of a second or more, and its tokens."""

    def add(self, num_tokens: int, now: float) -> None:
        self.total += num_tokens
        if self._recent and now - self._recent[-1][0] < 1.0:
            began, tokens = self._recent.pop()
            self._recent.append((began, tokens + num_tokens))
        elif num_tokens:
            self._forget(now)
            self._recent.append((now, num_tokens))

    def per_second(self, now: float) -> float:
        """Return the rate over the last minute, or since the first token if that is less."""
        self._forget(now)
        if not self._recent:
            return 0.0
        return sum(tokens for _, tokens in self._recent) / max(1.0, now - self._recent[0][0])

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > RATE_SECONDS:
            self._recent.popleft()


@dataclass(frozen=True)
class ServedModel:
    """The state of a base model."""

    name: str
    state: Literal["idle", "starting", "ready", "failed"]
    stage: str
    info: ModelInfo | None
    error: str
    num_deaths: int
    num_loaded_runs: int
    num_loaded_samplers: int
    num_open_operations: int
    num_waiting_samples: int
    num_running_samples: int
    tokens_trained: int
    tokens_sampled: int
    training_rate: float
    """Tokens per second over the last minute."""
    sampling_rate: float
    pid: int | None
    """The process id of the engine."""


@dataclass(frozen=True)
class QueuedRequests:
    """Queued or running requests of one user, run and kind."""

    user_id: str
    kind: str
    num_requests: int
    num_tokens: int
    """Tokens of their data or prompts; steps, saves and loads have none."""
    run_id: str | None = None
    """The run they belong to, or whose weights they sample."""


@dataclass(frozen=True)
class SchedulerStats:
    queued: list[QueuedRequests]
    """By user, kind and run; only entries with requests."""
    operations_by_run: dict[str, int]
    """Unfinished operations, of runs that have any."""
    models: list[ServedModel]

    @property
    def requests_by_kind(self) -> dict[str, int]:
        return _totals((entry.kind, entry.num_requests) for entry in self.queued)

    @property
    def requests_by_user(self) -> dict[str, int]:
        return _totals((entry.user_id, entry.num_requests) for entry in self.queued)


def take_stats(
    unanswered: Iterable["Operation"], cores: Collection["Core"], models: list[ServedModel]
) -> SchedulerStats:
    """Collect the statistics. ``unanswered`` are the journaled requests, which exclude direct samples."""
    requests: Counter[tuple[str, str, str]] = Counter()
    tokens: Counter[tuple[str, str, str]] = Counter()
    operations = [operation for operation in unanswered if operation.kind != "sample"]
    runs = [run for core in cores for run in core.runs.values()]
    run_ids = {run.model_id for run in runs}
    for operation in operations:
        key = operation.user_id, operation.kind, operation.lane if operation.lane in run_ids else ""
        requests[key] += 1
        tokens[key] += operation.tokens
    for sample in (sample for core in cores for sample in core.sampling.unanswered):
        key = sample.user_id, sample.kind, sample.model_id or ""
        requests[key] += 1
        tokens[key] += sample.tokens
    return SchedulerStats(
        queued=[
            QueuedRequests(user_id, kind, count, tokens[user_id, kind, run_id], run_id or None)
            for (user_id, kind, run_id), count in sorted(requests.items())
        ],
        operations_by_run={run.model_id: len(run.operations) for run in runs if run.operations},
        models=models,
    )


def _totals(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for name, count in counts:
        totals[name] += count
    return dict(totals)
