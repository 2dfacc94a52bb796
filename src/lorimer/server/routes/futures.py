"""Routes that wait for results: one future, all futures of a sampling client, and cancellation.

Polls are held until a result is ready or `poll_seconds` have passed. The response is 200, 408 (not ready, retry) or 410
(unknown or expired, submit again); another user's future also gives 410.
"""

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorimer import types
from lorimer.scheduler.results import Completion
from lorimer.scheduler.runs import Outcome
from lorimer.server.bodies import decode, off_loop
from lorimer.server.context import context_of
from lorimer.server.openapi import JSON, PROTOBUF, Endpoint
from lorimer.server.polling import hold
from lorimer.server.routes.ownership import check_future, find_sampler, is_id, lost_future
from lorimer.server.routes.replies import done, reply
from lorimer.store import futures
from lorimer.types import tinker_pb2
from lorimer.types.compatibility import accepts_protobuf
from lorimer.types.encoding import (
    decode_forward_backward_output,
    decode_sample_response,
    forward_backward_output_to_json,
    sample_response_to_json,
)
from lorimer.types.futures import CancelFutureRequest, CompleteMetadataResponse, TryAgainResponse

METADATA_BYTES = 1024 * 1024
"""A larger result is announced by its size first, if the client allows that."""


async def retrieve_future(request: Request) -> Response:
    """Wait for the result of an operation or a sample and return it."""
    context = context_of(request)
    body = await decode(request, types.FutureRetrieveRequest)
    await check_future(request, body.request_id)
    outcome = context.scheduler.recent(body.request_id)
    if outcome is None:
        outcome = await hold(request, context.scheduler.wait(body.request_id, context.settings.poll_seconds))
    match outcome.state:
        case "pending":
            return try_again(body.request_id, outcome)
        case "failed":
            return reply({"error": outcome.error, "category": outcome.category})
        case "gone":
            raise lost_future(body.request_id)
    if body.allow_metadata_only and len(outcome.result) > METADATA_BYTES:
        return reply(CompleteMetadataResponse(response_payload_size=len(outcome.result)))
    return await result(request, body.request_id, outcome)


def try_again(request_id: str, outcome: Outcome) -> Response:
    waiting = TryAgainResponse(
        request_id=request_id, queue_state=outcome.queue_state, queue_state_reason=outcome.reason or None
    )
    return reply(waiting, 408)


async def result(request: Request, request_id: str, outcome: Outcome) -> Response:
    """Return the stored bytes, converted to JSON for SDK releases that cannot read protobuf."""
    if outcome.result_format == "json":
        return Response(outcome.result, media_type=JSON)
    if accepts_protobuf(request.headers.get("accept", "")):
        return Response(outcome.result, media_type=PROTOBUF)
    row = await context_of(request).store.read(futures.get, request_id)
    if row is None:
        raise lost_future(request_id)
    content = await off_loop(len(outcome.result), lambda: as_json(row.kind, outcome.result))
    return Response(content, media_type=JSON)


def as_json(kind: str, data: bytes) -> bytes:
    if kind == "sample":
        num_sequences = len(tinker_pb2.SampleResponse.FromString(data).sequences)
        return orjson.dumps(sample_response_to_json(decode_sample_response(data, [""] * num_sequences)))
    return orjson.dumps(forward_backward_output_to_json(decode_forward_backward_output(data)))


async def retrieve_futures(request: Request) -> Response:
    """Return the samples of a sampling client that have finished since the cursor."""
    context = context_of(request)
    body = await decode(request, types.FuturesRetrieveRequest)
    target = body.target
    await find_sampler(request, target.sampling_session_id)
    longest = context.settings.poll_seconds
    waiting = context.scheduler.completions(
        target.sampling_session_id,
        target.cloned_sampler_id,
        body.prev_cursor,
        longest if body.timeout is None else min(body.timeout, longest),
        [request_id for request_id in body.retrieved_request_ids if is_id(request_id)],
    )
    found, cursor = await hold(request, waiting)
    return reply(types.FuturesRetrieveResponse(completions=[completion(item) for item in found], cursor=cursor))


def completion(item: Completion) -> types.FutureFinished | types.FutureFailed:
    if item.state == "failed":
        return types.FutureFailed(request_id=item.request_id)
    return types.FutureFinished(request_id=item.request_id, response_payload_uncompressed_size=item.size)


async def cancel_future(request: Request) -> Response:
    """Cancel a sample. A finished sample stays available."""
    body = await decode(request, CancelFutureRequest)
    await check_future(request, body.request_id)
    await context_of(request).scheduler.cancel(body.request_id)
    return done()


ROUTES = [
    Endpoint(
        "POST",
        "/api/v1/retrieve_future",
        retrieve_future,
        body=types.FutureRetrieveRequest,
        answer_media=(JSON, PROTOBUF),
    ),
    Endpoint(
        "POST",
        "/api/v1/retrieve_futures",
        retrieve_futures,
        body=types.FuturesRetrieveRequest,
        answer=types.FuturesRetrieveResponse,
    ),
    Endpoint("POST", "/api/v1/cancel_future", cancel_future, body=CancelFutureRequest, status=204),
]
