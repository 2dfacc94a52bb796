"""What there is to do, by user, kind and run: for people and for what watches the server."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lorimer.scheduler.models import ModelScheduler, ServedModel
from lorimer.scheduler.operation import Operation
from lorimer.scheduler.sampling import SampleOperation


@dataclass(frozen=True)
class QueuedRequests:
    """Of one user, run and kind, what waits or is being computed."""

    user_id: str
    kind: str
    num_requests: int
    num_tokens: int
    """Of their data or prompts; steps, saves and loads have none."""
    run_id: str | None = None
    """The run they belong to, or whose weights they sample."""


@dataclass(frozen=True)
class SchedulerStats:
    queued: list[QueuedRequests]
    """By user, kind and run; no entry without requests."""
    operations_by_run: dict[str, int]
    """Unfinished ones, of runs that have any."""
    models: list[ServedModel]

    @property
    def requests_by_kind(self) -> dict[str, int]:
        return _totals((entry.kind, entry.num_requests) for entry in self.queued)

    @property
    def requests_by_user(self) -> dict[str, int]:
        return _totals((entry.user_id, entry.num_requests) for entry in self.queued)


def take_stats(unanswered: Iterable[Operation], models: Collection[ModelScheduler]) -> SchedulerStats:
    """``unanswered`` are the requests on record; samples of callers who wait for them are not among those."""
    requests: Counter[tuple[str, str, str]] = Counter()
    tokens: Counter[tuple[str, str, str]] = Counter()
    operations = [operation for operation in unanswered if operation.kind != "sample"]
    runs = [state for model in models for state in model.training.runs.values()]
    run_ids = {state.model_id for state in runs}
    for operation in (*operations, *(sample for model in models for sample in model.sampling.unanswered)):
        run_id = operation.lane if operation.lane in run_ids else ""
        if isinstance(operation, SampleOperation):
            run_id = operation.sampler.model_id or ""
        key = operation.user_id, operation.kind, run_id
        requests[key] += 1
        tokens[key] += operation.tokens
    return SchedulerStats(
        queued=[
            QueuedRequests(user_id, kind, count, tokens[user_id, kind, run_id], run_id or None)
            for (user_id, kind, run_id), count in sorted(requests.items())
        ],
        operations_by_run={state.model_id: len(state.operations) for state in runs if state.operations},
        models=[model.status() for model in models],
    )


def _totals(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for name, count in counts:
        totals[name] += count
    return dict(totals)
