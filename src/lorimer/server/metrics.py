"""What Prometheus reads at ``/metrics``: requests as they are answered, engines and queues as they stand."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lorimer.scheduler.models import ServedModel

LATENCY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ENGINE_STATES = ("idle", "starting", "ready", "failed")


class Metrics:
    """The numbers of one server; several in one process do not share any."""

    def __init__(self, served_models: Callable[[], Sequence[ServedModel]]) -> None:
        self._registry = CollectorRegistry()
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
        self._registry.register(_Engines(served_models))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)


class _Engines(Collector):
    """Reads the scheduler when it is asked: one gauge for the state, one for each number of ``ServedModel``."""

    def __init__(self, served_models: Callable[[], Sequence[ServedModel]]) -> None:
        self._served_models = served_models

    def collect(self) -> Iterator[Metric]:
        served = self._served_models()
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
