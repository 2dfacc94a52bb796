"""Audit log, usage and storage: what was done is there, what others did is not."""

from datetime import UTC, datetime, timedelta

import pytest

from .conftest import MODEL, TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def newcomer(server, name):
    key, secret = await server.context.credentials.create(name, "one")
    return type(server.ada)(server.ada.http, key.user_id, headers={"x-api-key": secret})


async def test_audit_log_has_what_was_done_to_checkpoints(server):
    user = await newcomer(server, "audited")
    session_id = await user.session()
    run_id = await user.run(session_id)
    path = await user.save(run_id, 1, "a")
    place = f"training_runs/{run_id}/checkpoints/weights/a"
    await user.post(f"{place}/publish")
    await user.send("DELETE", f"{place}/publish")
    await user.send("PUT", f"{place}/ttl", {"ttl_seconds": 3600})
    await user.get(f"{place}/archive")
    copied = (await user.ok("copy_weights", {"source_path": path, "destination_project_id": "p"}))["tinker_path"]
    await user.send("DELETE", place)
    await user.send("PUT", f"sessions/{session_id}/project", {"project_id": "p"})
    entries = (await user.fetch("audit", params={"event_type": "checkpoints"}))["entries"]
    assert [entry["event"] for entry in entries][::-1] == [
        "checkpoint_saved",
        "checkpoint_published",
        "checkpoint_unpublished",
        "checkpoint_ttl_set",
        "checkpoint_downloaded",
        "checkpoint_copied",
        "checkpoint_deleted",
    ]
    by_event = {entry["event"]: entry for entry in entries}
    assert by_event["checkpoint_published"]["tinker_path"] == path
    assert by_event["checkpoint_published"]["model_id"] == run_id
    assert by_event["checkpoint_ttl_set"]["event_details"] == {"ttl_seconds": 3600}
    assert by_event["checkpoint_copied"]["event_details"] == {"source_path": path}
    assert by_event["checkpoint_copied"]["tinker_path"] == copied
    assert abs(datetime.fromisoformat(entries[0]["timestamp"]) - datetime.now(UTC)) < timedelta(minutes=5)
    projects = (await user.fetch("audit", params={"event_type": "projects"}))["entries"]
    assert [entry["event"] for entry in projects] == ["project_assigned"]
    today = datetime.now(UTC).date()
    everything = (await user.fetch("audit"))["entries"]
    days = [today, today - timedelta(days=1)]
    of_days = [
        entry for day in days for entry in (await user.fetch("audit", params={"day": day.isoformat()}))["entries"]
    ]
    assert of_days == everything
    assert (await user.fetch("audit", params={"day": "2020-01-01"}))["entries"] == []


async def test_audit_log_of_others_is_not_shown(server):
    user = await newcomer(server, "quiet")
    assert (await user.fetch("audit"))["entries"] == []


@pytest.mark.parametrize(
    "query", [{"event_type": "keys"}, {"day": "yesterday"}, {"day": "2026-13-01"}, {"day": "20260101"}], ids=str
)
async def test_bad_audit_query_is_refused(ada, query):
    response = await ada.get("audit", params=query)
    assert response.status_code == 400
    assert next(iter(query)) in response.json()["detail"]


def hours(before=1, after=1):
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, end = now - timedelta(hours=before), now + timedelta(hours=after)
    return {"starting_on": start.isoformat(), "ending_before": end.isoformat()}


async def test_usage_counts_tokens_by_kind(server):
    user = await newcomer(server, "used")
    session_id = await user.session(user_metadata={"k": "v"}, project_id="p")
    run_id = await user.run(session_id)
    await user.train(run_id, 1)
    await user.train(run_id, 2)
    await user.save(run_id, 3, "a")
    await user.sample(await user.sampler(session_id), num_samples=2, sampling_params={"stop": []})
    answer = await user.fetch("billing/usage/events", params=hours())
    assert answer["sessions"] == {session_id: {"user_metadata": {"k": "v"}}}
    totals: dict[str, int] = {}
    for event in answer["data"]:
        assert (event["base_model"], event["session_id"]) == (MODEL, session_id)
        assert event["user_name"] == "used"
        start, end = datetime.fromisoformat(event["bucket_start"]), datetime.fromisoformat(event["bucket_end"])
        assert end - start == timedelta(hours=1)
        info = event["event_info"]
        totals[info["type"]] = totals.get(info["type"], 0) + info.get("token_count", info.get("count"))
    assert totals == {
        "training": 2 * len(TOKENS),
        "checkpoint": 1,
        "sampling_prefill": len(TOKENS),
        "sampling_sample": 8,
    }
    assert (await user.fetch("billing/usage/events", params=hours(5, -4)))["data"] == []
    assert (await (await newcomer(server, "unused")).fetch("billing/usage/events", params=hours()))["data"] == []


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"starting_on": "2026-01-01T00:00:00Z"},
        {"starting_on": "2026-01-01T00:00:00", "ending_before": "2026-01-02T00:00:00Z"},
        {"starting_on": "2026-01-01T00:30:00Z", "ending_before": "2026-01-02T00:00:00Z"},
        {"starting_on": "2026-01-02T00:00:00Z", "ending_before": "2026-01-01T00:00:00Z"},
        {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-02-01T00:00:00Z"},
        {"starting_on": "soon", "ending_before": "later"},
    ],
    ids=["nothing", "half", "no zone", "no full hour", "backwards", "too long", "no time"],
)
async def test_bad_usage_query_is_refused(ada, query):
    response = await ada.get("billing/usage/events", params=query)
    assert response.status_code == 400
    assert "ing_" in response.json()["detail"]


async def test_storage_is_counted_by_project(server):
    user = await newcomer(server, "stored")
    session_id = await user.session(project_id="p")
    run_id = await user.run(session_id)
    await user.save(run_id, 1, "a")
    await user.save(run_id, 2, "b")
    other = await user.run()
    await user.save(other, 1, "c")
    items = (await user.fetch("billing/usage/checkpoints/current"))["data"]
    assert sorted((item["project_id"] or "", item["checkpoint_count"]) for item in items) == [("", 1), ("p", 2)]
    [item] = (await user.fetch("billing/usage/checkpoints/current", params={"project_id": "p"}))["data"]
    listed = (await user.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"]
    assert item["size_bytes"] == sum(found["size_bytes"] for found in listed)
    assert item["size_gigabytes"] == pytest.approx(item["size_bytes"] / 1e9)
    assert item["org_user_urn"] == f"tml:user:{user.user_id}"
