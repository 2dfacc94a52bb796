"""Futures: waiting, waiting again, giving up, and what the SDK says meanwhile."""

import asyncio
import json
import logging

import pytest
import tinker
from tinker import types

from tests.conformance.coverage import covers
from tests.conformance.samples import MODEL, RANK, batch, eventually, fetch, flat_logprobs, prompt_of, tokens_of
from tests.conformance.servers import running_server

DATA = batch()
LONG = types.SamplingParams(max_tokens=450, stop=[])


@covers("APIFuture.result", "APIFuture.result_async", "APIFuture.__await__")
async def test_result_can_be_had_in_every_way_and_again(trainer):
    future = trainer.forward(DATA, "cross_entropy")
    first = future.result()
    assert await future == first
    assert await future.result_async(timeout=5) == first
    assert future.result(timeout=5) == first


def test_operations_are_done_in_the_order_of_the_program(trainer):
    """Nothing is waited for until all are submitted."""
    futures = []
    for _ in range(6):
        futures.append(trainer.forward_backward(DATA, "cross_entropy"))
        trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    results = [future.result() for future in futures]
    assert len({result.metrics["loss:sum"] for result in results}) == 6
    last = trainer.forward(DATA, "cross_entropy").result()
    assert abs(flat_logprobs(last) - flat_logprobs(results[0])).max() > 1e-2


def test_waiting_too_briefly_loses_nothing(service):
    client = service.create_sampling_client(base_model=MODEL)
    future = client.sample(prompt_of(tokens_of(8, 1)), 8, LONG)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.001)
    assert len(future.result().sequences) == 8


def waiting_for_a_sample():
    """With what the SDK waits for a sample whose name it has heard from the server."""
    if tinker.__name__ == "lorimer":
        return tinker.SamplingClient, "_result"
    from tinker.lib.session_futures_poller import SessionFuturesPoller

    return SessionFuturesPoller, "wait_for"


async def test_abandoned_sample_is_cancelled_on_the_server(alice, rest, monkeypatch):
    """It is given up once the SDK waits for it by name: before that the SDK has nothing to cancel."""
    waited_for, (owner, name) = [], waiting_for_a_sample()
    wait_for = getattr(owner, name)

    async def noting(waiting, request_id, *others):
        waited_for.append(request_id)
        return await wait_for(waiting, request_id, *others)

    monkeypatch.setattr(owner, name, noting)
    with alice.service() as service:
        client = service.create_sampling_client(base_model=MODEL)
        client.sample(prompt_of([5, 6]), 1, types.SamplingParams(max_tokens=1)).result()
        task = asyncio.ensure_future(client.sample_async(prompt_of(tokens_of(8, 1)), 200, LONG))
        await asyncio.to_thread(eventually, lambda: len(waited_for) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        identifier = service.holder.get_session_id()
        ended = lambda: sorted(sample_states(rest, identifier)) == ["cancelled", "done"]  # noqa: E731
        await asyncio.to_thread(eventually, ended)


def sample_states(rest, session_id):
    """How the samples of a session ended, by its trace."""
    events = json.loads(fetch(rest.export_session_trace(session_id).result()))["traceEvents"]
    return [event["cat"] for event in events if event["ph"] == "X" and event["name"] == "sample"]


def test_failed_operation_fails_its_future_only(trainer):
    futures = [
        trainer.forward(DATA, "cross_entropy"),
        trainer.forward([DATA[0]], "importance_sampling"),
        trainer.forward(DATA, "cross_entropy"),
    ]
    assert flat_logprobs(futures[0].result()).tolist() == flat_logprobs(futures[2].result()).tolist()
    with pytest.raises(tinker.RequestFailedError, match="logprobs") as failure:
        futures[1].result()
    assert failure.value.category == types.RequestErrorCategory.User
    assert failure.value.request_id


def test_log_says_why_a_run_waits(tmp_path, caplog):
    """The engine is loaded on first use, which takes longer than a poll of this server."""
    with running_server(tmp_path / "data", ["lorimer/debug"], poll_seconds=0.1, start_engines="lazy") as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
        with caplog.at_level(logging.WARNING, logger="tinker"):
            service.create_lora_training_client("lorimer/debug", rank=RANK)
        service.close("success").result()
    assert any("Model creation for lorimer/debug is paused" in message for message in caplog.messages)
