"""Summaries of runs: those that take long are brought up to date less often, the others in every turn."""

import pytest
from sqlalchemy import select

from lorimer.server import run_summaries
from lorimer.server.run_summaries import MAX_REST_SECONDS, Summariser
from lorimer.store import metrics
from lorimer.store.sessions import create_session
from lorimer.store.tables import run_metrics
from lorimer.store.users import ensure_user
from tests.store.runs import make_part


def report(c, part, value):
    reports, names = metrics.encode_reports([metrics.Report(0, 1.0, {"nll": value})])
    metrics.report(c, part.model_id, reports, names, max_names=9, max_values=9999)


def last_values(c):
    return dict(c.execute(select(run_metrics.c.run_id, run_metrics.c.last)).all())


async def test_a_run_that_takes_long_waits_and_others_do_not(start, monkeypatch):
    now = 0.0
    async with start(run_summary_seconds=3600) as running:
        store = running.context.store
        user = await store.write(ensure_user, "ada")
        session = await store.write(create_session, user_id=user.user_id)
        heavy, light = [await store.write(make_part, session, number) for number in range(2)]
        summariser = Summariser(store, clock=lambda: now)

        async def summarised(**values: float) -> list[float]:
            for part, value in ((heavy, values.get("heavy")), (light, values.get("light"))):
                if value is not None:
                    await store.write(report, part, value)
            await summariser.advance()
            found = await store.read(last_values)
            return [found.get(part.run_id, 0.0) for part in (heavy, light)]

        monkeypatch.setattr(run_summaries, "HEAVY_SECONDS", -1.0)
        assert await summarised(heavy=1.0) == [1, 0]
        monkeypatch.setattr(run_summaries, "HEAVY_SECONDS", 3600.0)
        summariser._rests_until = MAX_REST_SECONDS  # however short its work was
        assert await summarised(heavy=2.0, light=2.0) == [1, 2]
        assert await summarised(light=3.0) == [1, 3]
        assert await summarised() == [1, 3]
        now = MAX_REST_SECONDS
        assert await summarised() == [2, 3], "it was not forgotten, although nothing new arrived"
        now = 0.0
        assert await summarised(heavy=4.0) == [4, 3], "it is heavy no more"


async def test_a_new_process_summarises_what_had_to_wait_in_the_last(start, monkeypatch):
    async with start(run_summary_seconds=3600) as running:
        store = running.context.store
        user = await store.write(ensure_user, "ada")
        session = await store.write(create_session, user_id=user.user_id)
        heavy, light = [await store.write(make_part, session, number) for number in range(2)]
        last = Summariser(store, clock=lambda: 0.0)
        monkeypatch.setattr(run_summaries, "HEAVY_SECONDS", -1.0)
        await store.write(report, heavy, 1.0)
        await last.advance()
        last._rests_until = MAX_REST_SECONDS
        await store.write(report, heavy, 2.0)
        monkeypatch.setattr(run_summaries, "HEAVY_SECONDS", 3600.0)
        await store.write(report, light, 3.0)
        await last.advance()
        assert await store.read(last_values) == {heavy.run_id: 1, light.run_id: 3}
        new = Summariser(store)
        new._holder = last._holder  # or its lease would have to expire first
        await new.advance()
        assert await store.read(last_values) == {heavy.run_id: 2, light.run_id: 3}


@pytest.mark.parametrize(("seconds", "rest"), [(0.05, 10.0), (60.0, MAX_REST_SECONDS)])
async def test_the_rest_is_a_hundred_times_the_work_within_a_limit(seconds, rest, start, monkeypatch):
    async with start(run_summary_seconds=3600) as running:
        store = running.context.store
        user = await store.write(ensure_user, "ada")
        part = await store.write(make_part, await store.write(create_session, user_id=user.user_id), 0)
        await store.write(report, part, 1.0)
        times = iter([0.0, seconds, 0.0, seconds])  # of reading and of writing
        summariser = Summariser(store, clock=lambda: 0.0)
        monkeypatch.setattr(run_summaries.time, "thread_time", lambda: next(times))
        await summariser.advance()
        assert summariser._rests_until == rest
