"""Prometheus metrics at ``/metrics``: counts and latencies of requests, and the current state of engines and queues."""

from collections import Counter as Totals
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorimer.scheduler.stats import QueuedRequests, SchedulerStats, ServedModel
from lorimer.server.system import resident_bytes
from lorimer.store.users import User

LATENCY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ENGINE_STATES = ("idle", "starting", "ready", "failed")
MAX_USERS = 100
"""How many users, those with the most requests, get their own time series; the rest are counted together."""
OTHERS = "(others)"


class Metrics:
    """The metrics of one server. Several servers in one process have separate registries."""

    def __init__(self, stats: Callable[[], SchedulerStats]) -> None:
        self._registry = CollectorRegistry()
        self._names: dict[str, str] = {}
        self._requests = Counter(
            "lorimer_http_requests", "Answered requests.", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "lorimer_http_request_seconds",
            "Time from the first byte of a request to the last of its answer; polls are held on purpose.",
            ["route"],
            buckets=LATENCY_SECONDS,
            registry=self._registry,
        )
        self.held = Gauge("lorimer_http_requests_in_flight", "Requests not answered yet.", registry=self._registry)
        self._registry.register(_Scheduler(stats, self._names))
        ProcessCollector(registry=self._registry)

    def set_user_name(self, user: User) -> None:
        """Label a user's time series with their name instead of their id."""
        self._names[user.user_id] = user.name

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def render(self) -> bytes:
        """Render the Prometheus text format."""
        return generate_latest(self._registry)


class _Scheduler(Collector):
    """Reads the scheduler on each scrape: queued requests, engine states, and each number of ``ServedModel``."""

    def __init__(self, stats: Callable[[], SchedulerStats], names: Mapping[str, str]) -> None:
        self._stats, self._names = stats, names

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from self._queued(stats.queued)
        yield from self._engines(stats.models)
        yield from self._memory(stats.models)

    def _queued(self, queued: Sequence[QueuedRequests]) -> Iterator[Metric]:
        by_user: Totals[str] = Totals()
        for entry in queued:
            by_user[entry.user_id] += entry.num_requests
        shown = {user_id: self._names.get(user_id, user_id) for user_id, _ in by_user.most_common(MAX_USERS)}
        for what, text in {"requests": "Requests", "tokens": "Tokens of requests"}.items():
            totals: Totals[tuple[str, str]] = Totals()
            for entry in queued:
                totals[shown.get(entry.user_id, OTHERS), entry.kind] += getattr(entry, f"num_{what}")
            labels = ["user", "kind"]
            gauge = GaugeMetricFamily(f"lorimer_queued_{what}", f"{text} that are not answered yet.", labels=labels)
            for label, total in totals.items():
                gauge.add_metric(label, float(total))
            yield gauge

    def _memory(self, served: Sequence[ServedModel]) -> Iterator[Metric]:
        gauge = GaugeMetricFamily("lorimer_engine_resident_bytes", "Memory of a model's engines.", labels=["model"])
        for model in served:
            if (total := resident_bytes(model.pids)) is not None:
                gauge.add_metric([model.name], float(total))
        yield gauge

    def _engines(self, served: Sequence[ServedModel]) -> Iterator[Metric]:
        state = GaugeMetricFamily("lorimer_engine_state", "1 for the state an engine is in.", labels=["model", "state"])
        for model in served:
            for name in ENGINE_STATES:
                state.add_metric([model.name, name], float(model.state == name))
        yield state
        for item in fields(ServedModel):
            if item.name.startswith(("num_", "tokens_")):
                name = item.name.removeprefix("num_")
                gauge = GaugeMetricFamily(f"lorimer_engine_{name}", f"{name} of a base model.", labels=["model"])
                for model in served:
                    gauge.add_metric([model.name], float(getattr(model, item.name)))
                yield gauge
