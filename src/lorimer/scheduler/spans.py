"""OpenTelemetry spans of requests, off unless `otlp_endpoint` is set.

All spans of a request are in the trace whose id is derived from its request_id, so an API replica and the owner that
computes the request need not tell each other. The root is the submit; when the request ends, its owner adds the time in
the queue, in the engine and in the commit. Call everything on the event loop.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from lorimer.errors import InvalidInput
from lorimer.scheduler.runs import Operation, Outcome

arrived: ContextVar[Mapping[str, Any] | None] = ContextVar("arrived", default=None)
"""The HTTP request that is being answered: its ASGI ``scope`` and its time of arrival ``at``, while spans are on."""
_exporter: "_Exporter | None" = None


def is_on() -> bool:
    return _exporter is not None


def start(endpoint: str) -> None:
    """Send spans to the collector at ``endpoint``, such as http://127.0.0.1:4318; an empty one sends none."""
    global _exporter
    if endpoint:
        _exporter = _Exporter(endpoint)


def stop() -> None:
    """Send what is left."""
    global _exporter
    if _exporter is not None:
        _exporter.close()
    _exporter = None


def submitted(request_id: str) -> None:
    """Record that the HTTP request being answered was accepted."""
    request = arrived.get()
    if _exporter is None or request is None:
        return
    user, route = request["scope"]["state"]["user"], request["scope"].get("route")
    attributes = {"http.route": getattr(route, "path", ""), "user.id": "" if user is None else user.user_id}
    _exporter.read_clock()
    _exporter.send("api", "submit", request_id, request["at"], time.monotonic(), attributes, is_root=True)


def finished(operation: Operation, outcome: Outcome | None) -> None:
    """Record what an operation that has ended waited for."""
    if _exporter is None:
        return
    now, request_id = time.monotonic(), operation.request_id
    attributes: dict[str, Any] = {
        "lorimer.kind": operation.kind,
        "lorimer.lane": operation.lane,
        "lorimer.base_model": operation.base_model,
        "lorimer.place": operation.place or "",
        "lorimer.tokens": operation.tokens,
        "lorimer.state": "" if outcome is None else outcome.state,
    }
    started = operation.started or now
    _exporter.read_clock()
    _exporter.send("owner", "queue", request_id, operation.received or started, started, attributes)
    if operation.started:
        answered = operation.answered or now
        _exporter.send("engine", operation.kind, request_id, started, answered, attributes)
        _exporter.send("owner", "commit", request_id, answered, now, attributes)


class _Exporter:
    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        except ImportError as error:
            raise InvalidInput("otlp_endpoint needs OpenTelemetry: pip install 'lorimer[otel]'") from error

        class Ids(RandomIdGenerator):
            """Gives the ids of roots, which are derived from a request_id."""

            trace_id = span_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id or super().generate_trace_id()

            def generate_span_id(self) -> int:
                return self.span_id or super().generate_span_id()

        self._ids, self._offset_ns = Ids(), 0
        self._providers = {}
        for name in ("api", "owner", "engine"):
            resource = Resource.create({"service.name": f"lorimer-{name}", "process.pid": os.getpid()})
            provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
            exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
            provider.add_span_processor(BatchSpanProcessor(exporter))
            self._providers[name] = provider
        self._tracers = {name: provider.get_tracer("lorimer") for name, provider in self._providers.items()}

    def read_clock(self) -> None:
        """Compare the clocks, once for all spans of a moment, so that they meet."""
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def send(
        self,
        service: str,
        name: str,
        request_id: str,
        began: float,
        ended: float,
        attributes: Mapping[str, Any],
        *,
        is_root: bool = False,
    ) -> None:
        """Send a span; ``began`` and ``ended`` are monotonic times."""
        from opentelemetry.context import Context
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        digest = hashlib.sha256(request_id.encode()).digest()
        trace_id, root_id = int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])
        context = Context()
        if is_root:
            self._ids.trace_id, self._ids.span_id = trace_id, root_id
        else:
            parent = SpanContext(trace_id, root_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
            context = set_span_in_context(NonRecordingSpan(parent), context)
        values = {"lorimer.request_id": request_id, **attributes}
        try:
            begin = int(began * 1e9) + self._offset_ns
            span = self._tracers[service].start_span(name, context, attributes=values, start_time=begin)
        finally:
            self._ids.trace_id = self._ids.span_id = 0
        span.end(int(ended * 1e9) + self._offset_ns)

    def close(self) -> None:
        for provider in self._providers.values():
            provider.shutdown()
