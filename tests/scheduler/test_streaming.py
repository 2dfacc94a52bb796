"""Samples of callers who wait: tokens as they come, leaving, and what is put on account."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from lorimer.engine.messages import SampleProgress
from lorimer.errors import Cancelled, InvalidInput
from lorimer.scheduler.streaming import merge
from lorimer.store import futures, usage
from tests.scheduler.service import Service, start

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def service(crowded) -> Service:
    return crowded


async def used(service, user_id):
    now = datetime.now(UTC)
    found = await service.store.read(
        usage.usage_events, user_id=user_id, start=now - timedelta(hours=2), end=now + timedelta(hours=1)
    )
    totals: dict[str, int] = {}
    for bucket in found:
        totals[bucket.kind] = totals.get(bucket.kind, 0) + bucket.amount
    return totals


async def used_at_least(service, user_id, sampled):
    """What is on account once that many sampled tokens are: it is written after the sample has ended."""
    async with asyncio.timeout(30):
        while (totals := await used(service, user_id)).get("sampling_sample", 0) < sampled:
            await asyncio.sleep(0.02)
    return totals


async def until(is_true):
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_pieces_make_the_answer_and_nothing_is_on_record(service):
    user, _ = await service.session("reader")
    sample = start(service, user.user_id, max_tokens=12, num_samples=3, seed=1)
    tokens = {0: [], 1: [], 2: []}
    reasons = {}
    async for pieces in sample.pieces():
        for piece in pieces:
            tokens[piece.index] += piece.tokens
            assert len(piece.tokens) == len(piece.logprobs)
            if piece.stop_reason is not None:
                reasons[piece.index] = piece.stop_reason
    response = sample.answer.result()
    sample.close()
    assert tokens == {i: sequence.tokens for i, sequence in enumerate(response.sequences)}
    assert reasons == {0: "length", 1: "length", 2: "length"}
    assert await service.store.read(futures.get, sample.request_id) is None
    assert sample.request_id not in service.scheduler.results.open
    assert not service.driver.streams
    again = start(service, user.user_id, stream=False, max_tokens=12, num_samples=3, seed=1)
    assert [s.tokens for s in (await again.answer).sequences] == [s.tokens for s in response.sequences]
    await until(lambda: not service.core.sampling.num_running)
    totals = await used_at_least(service, user.user_id, 72)
    assert totals["sampling_sample"] == 72
    assert totals["sampling_prefill"] + totals.get("sampling_prefill_cached", 0) == 6


async def test_a_reader_who_was_away_gets_one_piece_for_each_sequence(service):
    user, _ = await service.session("slow")
    sample = start(service, user.user_id, max_tokens=30, num_samples=2)
    await asyncio.wait([sample.answer])
    batches = [pieces async for pieces in sample.pieces()]
    assert [[len(piece.tokens) for piece in pieces] for pieces in batches] == [[30, 30]]


async def test_leaving_ends_the_sample_and_what_was_drawn_is_on_account(service):
    user, _ = await service.session("leaver")
    sample = start(service, user.user_id, max_tokens=480, num_samples=8)
    async for _ in sample.pieces():
        break
    sample.close()
    await until(lambda: not service.core.sampling.num_running)
    with pytest.raises(Cancelled):
        sample.answer.result()
    totals = await used_at_least(service, user.user_id, 1)
    assert totals["sampling_sample"] < 8 * 480


async def test_whoever_stops_awaiting_the_answer_leaves(service):
    user, _ = await service.session("impatient")
    sample = start(service, user.user_id, stream=False, max_tokens=480, num_samples=8)
    await until(lambda: service.core.sampling.num_running)
    sample.answer.cancel()
    sample.close()
    await until(lambda: not service.core.sampling.num_running)
    assert await used(service, user.user_id) == {}


async def test_one_that_waits_can_be_given_up(service, monkeypatch):
    await service.ready()
    user, _ = await service.session("waiter")
    monkeypatch.setattr(service.core, "is_ready", False)
    sample = start(service, user.user_id, max_tokens=5)
    sample.close()
    with pytest.raises(Cancelled):
        await sample.answer
    assert service.core.sampling.num_waiting == 0


async def test_a_wrong_grammar_fails_the_sample(service):
    user, _ = await service.session("grammarian")
    sample = start(service, user.user_id, grammar="start: nothing")
    with pytest.raises(InvalidInput, match="the grammar is refused"):
        async for _ in sample.pieces():
            pass


async def test_pieces_are_merged_by_sequence():
    heard = [
        SampleProgress(request_id="r", index=i % 2, tokens=[i], logprobs=[-float(i)], stop_reason=reason)
        for i, reason in enumerate([None, None, None, "stop"])
    ]
    assert [(p.index, p.tokens, p.stop_reason) for p in merge(heard)] == [(0, [0, 2], None), (1, [1, 3], "stop")]
