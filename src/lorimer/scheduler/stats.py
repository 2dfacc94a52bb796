"""Statistics of the scheduler for metrics and the overview: queues by user and kind, rates, served models."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from lorimer.engine.messages import ModelInfo

if TYPE_CHECKING:
    from lorimer.scheduler.core import Core
    from lorimer.scheduler.engines import EngineSlot
    from lorimer.scheduler.runs import Operation, QueueState

RATE_SECONDS = 60.0
STATES = ("ready", "starting", "idle", "failed")
"""Of an engine, the most useful first."""
SUMMED = (
    "num_deaths",
    "num_loaded_runs",
    "num_loaded_samplers",
    "num_open_operations",
    "num_waiting_samples",
    "num_running_samples",
    "tokens_trained",
    "tokens_sampled",
    "training_rate",
    "sampling_rate",
)


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
    """The state of a replica of a base model, or of all of them."""

    name: str
    replica: str
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
    pids: tuple[int, ...]
    """The process ids of its engines in this machine."""


@dataclass(frozen=True)
class ReplicaStatus:
    """A replica of a base model, and the process that computes it."""

    model: ServedModel
    state: str
    """That of its engine, or ``lost`` if no process computes the replica."""
    owner_id: str | None
    node: str | None
    """Where its owner runs; None if that is this process."""
    changed_at: datetime
    """When it got this owner, or lost one."""
    lease_seconds: float | None
    """Until its owner's lease runs out; None without a lease."""


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


def combine(replicas: Sequence[ServedModel], is_engine: Callable[[ServedModel], bool]) -> ServedModel:
    """Return the state of a base model: that of its readiest engine, with the numbers of all replicas."""
    best = min(filter(is_engine, replicas), key=lambda replica: STATES.index(replica.state))
    if len(replicas) == 1:
        return best
    sums = {name: sum(getattr(replica, name) for replica in replicas) for name in SUMMED}
    pids = tuple(pid for replica in replicas for pid in replica.pids)
    return replace(best, replica="", pids=pids, **sums)


def queue_state(name: str, slot: "EngineSlot", core: "Core", operation: "Operation") -> "tuple[QueueState, str]":
    """Return why an operation is not finished, in a readable form."""
    if slot.state == "failed":
        return "paused_capacity", f"the engine of {name} has ended and is started again ({slot.error})"
    if slot.state != "ready":
        return "paused_capacity", f"the engine of {name} is starting: {slot.stage or 'waiting for its turn'}"
    if operation.kind == "sample":
        sampling = core.sampling
        return "active", f"{sampling.num_running} samples are running and {sampling.num_waiting} waiting"
    run = core.runs.get(operation.lane)
    if run is None:
        return "active", f"{name} is at work on it"
    if run.phase == "absent" or run.is_leaving:
        return "paused_capacity", f"the engine of {name} holds as many runs as it can; this one waits for room"
    if run.phase == "restoring":
        return "paused_capacity", "the run is brought back into memory"
    if run.replays:
        return "paused_capacity", f"recovering: {len(run.replays)} operations done before the engine ended are repeated"
    missing = run.missing_seq
    if missing is not None and operation.seq_id > missing:
        return "active", f"waiting for operation {missing} of this run, which has not arrived"
    return "active", f"{core.num_open} operations of all runs are waiting or being computed"


def _totals(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for name, count in counts:
        totals[name] += count
    return dict(totals)
