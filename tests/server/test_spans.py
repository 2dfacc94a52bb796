"""Traces of requests, received by a collector that speaks OTLP over HTTP."""

import asyncio
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server.processes import eventually


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", received
    server.shutdown()
    server.server_close()


def all_spans(received: list[ExportTraceServiceRequest]) -> list[tuple[str, Any]]:
    """Return the name of the service and the span, of all that arrived."""
    return [
        ({item.key: item.value.string_value for item in group.resource.attributes}["service.name"], span)
        for request in received
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


async def test_a_request_is_one_trace_of_api_owner_and_engine(serve, collector):
    url, received = collector
    async with serve(otlp_endpoint=url) as (_, client):
        run_id = await client.run()
        params = {"learning_rate": 0.01}
        promise = await client.ok("optim_step", {"model_id": run_id, "seq_id": 1, "adam_params": params})
        await client.result(promise)
        await asyncio.to_thread(eventually, lambda: len(all_spans(received)) >= 6, "the spans of two requests")
    spans = all_spans(received)

    def of(request_id: str):
        found = [
            (service, span)
            for service, span in spans
            if {item.key: item.value.string_value for item in span.attributes}["lorimer.request_id"] == request_id
        ]
        return {(service, span.name): span for service, span in found}

    found = of(promise["request_id"])
    assert set(found) == {
        ("lorimer-api", "submit"),
        ("lorimer-owner", "queue"),
        ("lorimer-engine", "optim_step"),
        ("lorimer-owner", "commit"),
    }
    root = found.pop(("lorimer-api", "submit"))
    assert not root.parent_span_id
    for span in found.values():
        assert span.trace_id == root.trace_id and span.parent_span_id == root.span_id
    queue, engine, commit = (found[key] for key in sorted(found, key=lambda key: found[key].start_time_unix_nano))
    assert queue.name == "queue" and engine.name == "optim_step" and commit.name == "commit"
    assert root.start_time_unix_nano <= engine.start_time_unix_nano < engine.end_time_unix_nano
    assert queue.end_time_unix_nano == engine.start_time_unix_nano
    assert engine.end_time_unix_nano == commit.start_time_unix_nano <= commit.end_time_unix_nano
    assert len({span.trace_id for _, span in spans}) == 2  # the run's creation is a trace of its own
