"""The numbers Prometheus reads."""

import re

from prometheus_client.parser import text_string_to_metric_families

from lorimer.scheduler.stats import QueuedRequests, SchedulerStats
from lorimer.server.prometheus import MAX_USERS, OTHERS, Metrics
from lorimer.store.users import User
from lorimer.store.values import utc_now


async def samples(running):
    answer = await running.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return parsed(answer.text)


def parsed(text):
    families = text_string_to_metric_families(text)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


async def test_requests_are_counted_by_route_and_status(start):
    async with start() as running:
        for _ in range(3):
            await running.http.get("/zeros?count=1")
        await running.http.get("/zeros/secret-name")
        await running.http.request("BREW", "/zeros")
        found = await samples(running)
        key = ("lorimer_http_requests_total", ("method", "GET"), ("route", "/zeros"), ("status", "200"))
        assert found[key] == 3
        assert found["lorimer_http_requests_total", ("method", "GET"), ("route", "unmatched"), ("status", "404")] == 1
        assert found["lorimer_http_requests_total", ("method", "other"), ("route", "/zeros"), ("status", "405")] == 1
        assert found["lorimer_http_request_seconds_count", ("route", "/zeros")] == 4
        assert found["lorimer_http_requests_in_flight",] == 1
        assert not any("secret-name" in str(key) for key in found)


async def test_engines_are_shown_as_they_stand(start):
    async with start(models=("a=lorimer/tiny", "b=lorimer/tiny")) as running:
        found = await samples(running)
        for model in ("a", "b"):
            assert found["lorimer_engine_state", ("model", model), ("state", "idle")] == 1
            assert found["lorimer_engine_state", ("model", model), ("state", "ready")] == 0
            assert found["lorimer_engine_tokens_trained", ("model", model)] == 0
            assert found["lorimer_engine_waiting_samples", ("model", model)] == 0


async def test_two_servers_in_one_process_count_apart(start, tmp_path):
    async with start() as first, start(data=tmp_path / "other") as second:
        await first.http.get("/zeros?count=1")
        assert "/zeros" not in (await second.http.get("/metrics")).text
        assert re.search(r'route="/zeros"', (await first.http.get("/metrics")).text)


def test_users_beyond_the_limit_are_counted_together():
    """Those with the most requests have a time series of their own, under their names where these are known."""
    queued = [
        QueuedRequests(f"id-{number}", kind, num_requests=1000 - number, num_tokens=10)
        for number in range(MAX_USERS + 50)
        for kind in ("sample", "forward")
    ]
    metrics = Metrics(lambda: SchedulerStats(queued, {}, []))
    metrics.set_user_name(User("id-0", "ada", "", utc_now()))
    found = parsed(metrics.render().decode())

    def value(what, user, kind="sample"):
        return found[f"lorimer_queued_{what}", ("kind", kind), ("user", user)]

    assert value("requests", "ada", "forward") == 1000
    assert value("requests", f"id-{MAX_USERS - 1}") == 1000 - (MAX_USERS - 1)
    assert value("tokens", OTHERS) == 50 * 10
    assert value("requests", OTHERS) == sum(1000 - number for number in range(MAX_USERS, MAX_USERS + 50))
    users = {dict(labels)["user"] for name, *labels in found if name == "lorimer_queued_requests"}
    assert len(users) == MAX_USERS + 1
