"""Sessions from their creation to their trace."""

import asyncio
from datetime import datetime

import pytest

from lorimer import types
from lorimer.store import sessions
from tests.server.traces import check_trace

from .conftest import MODEL, datum

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_session_of_an_old_release_needs_no_defaults(ada):
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.7.0"}
    created = await ada.ok("create_session", body)
    assert created["type"] == "create_session"
    found = await ada.fetch(f"sessions/{created['session_id']}")
    assert found == {
        "training_run_ids": [],
        "sampler_ids": [],
        "user_metadata": {},
        "display_name": None,
        "status": {"type": "active"},
        "errors": [],
    }


async def test_session_lists_its_runs_and_samplers_and_its_metadata_as_text(ada):
    metadata = {"text": "a", "number": 1, "list": [1, None], "yes": True}
    session_id = await ada.session(user_metadata=metadata, display_name="My run")
    run_id = await ada.run(session_id)
    sampler_id = await ada.sampler(session_id)
    assert (run_id, sampler_id) == (f"{session_id}:train:0", f"{session_id}:sample:0")
    assert await ada.fetch(f"sessions/{session_id}", params={"access_scope": "accessible"}) == {
        "training_run_ids": [run_id],
        "sampler_ids": [sampler_id],
        "user_metadata": {"text": "a", "number": "1", "list": "[1,null]", "yes": "true"},
        "display_name": "My run",
        "status": {"type": "active"},
        "errors": [],
    }


async def test_session_shows_its_errors_and_how_its_program_ended(ada):
    session_id = await ada.session()
    run_id, other = await ada.run(session_id), await ada.run()
    wrong = datum([10, 20, 999_999_999])
    failures = []
    for run, seq_id in ((run_id, 1), (run_id, 2), (other, 1)):
        promise = await ada.submit(types.TrainingRequest(run, seq_id, [wrong], "cross_entropy"))
        failures.append((await ada.failure(promise))["error"])
    finish = {"reason": {"type": "errored"}, "detail": "ValueError: no data"}
    assert (await ada.post(f"sessions/{session_id}/finish", finish)).status_code == 204
    found = await ada.fetch(f"sessions/{session_id}")
    assert found["status"]["detail"] == "ValueError: no data"
    assert [one["error"] for one in found["errors"]] == failures[1::-1]
    assert {(one["run_id"], one["kind"], one["category"]) for one in found["errors"]} == {
        (run_id, "forward_backward", "user")
    }
    assert found["errors"][0]["at"] >= found["errors"][1]["at"]


async def test_heartbeats_are_written_together_and_end_with_the_session(server, ada):
    session_id = await ada.session()
    before = await server.context.store.read(sessions.get_session, session_id)
    body = {"session_id": session_id, "type": "session_heartbeat"}
    assert await ada.ok("session_heartbeat", body) == {"type": "session_heartbeat"}
    await server.context.flush()
    after = await server.context.store.read(sessions.get_session, session_id)
    assert after.last_seen_at > before.last_seen_at
    finish = {"reason": {"type": "errored"}, "detail": "ValueError"}
    assert (await ada.post(f"sessions/{session_id}/finish", finish)).status_code == 204
    assert (await ada.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})).status_code == 204
    ended = await ada.post("session_heartbeat", body)
    assert (ended.status_code, ended.json()["code"]) == (410, "gone")
    found = await server.context.store.read(sessions.get_session, session_id)
    assert (found.status, found.finish_reason, found.finish_detail) == ("client_finished", "errored", "ValueError")


async def test_sessions_are_listed_newest_first_in_pages(server):
    key, secret = await server.context.credentials.create("lister", "one")
    lister = type(server.ada)(server.ada.http, key.user_id, headers={"x-api-key": secret})
    made = [await lister.session() for _ in range(5)][::-1]
    assert (await lister.fetch("sessions"))["sessions"] == made
    assert (await lister.fetch("sessions", params={"limit": 2, "offset": 1}))["sessions"] == made[1:3]
    assert (await lister.fetch("sessions", params={"offset": 9}))["sessions"] == []


async def test_search_meets_conditions_and_turns_pages(ada):
    made = []
    for number in range(3):
        made.append(await ada.session(display_name=f"search me {number}", user_metadata={"n": str(number), "x": "y"}))
    await ada.post(f"sessions/{made[0]}/finish", {"reason": {"type": "interrupted"}, "detail": None})
    page = await ada.ok("sessions/search", {"display_name": "search", "limit": 2})
    assert [found["session_id"] for found in page["sessions"]] == [made[2], made[1]]
    assert page["sessions"][0]["owner"] == f"tml:user:{ada.user_id}"
    assert page["sessions"][0]["status"] == {"type": "active"}
    assert page["sessions"][0]["checkpoints_count"] == 0
    assert datetime.fromisoformat(page["next_cursor"]["last_created_at"]).tzinfo is not None
    body = {"display_name": "search", "limit": 2, "cursor": page["next_cursor"]}
    rest = await ada.ok("sessions/search", body)
    assert [found["session_id"] for found in rest["sessions"]] == [made[0]]
    assert rest["next_cursor"] is None
    status = {"type": "client_finished", "reason": {"type": "interrupted"}, "detail": None}
    assert rest["sessions"][0]["status"] == status
    by_metadata = await ada.ok("sessions/search", {"user_metadata": {"n": "1", "x": "y"}})
    assert [found["session_id"] for found in by_metadata["sessions"]] == [made[1]]
    finished = {"display_name": "search", "statuses": [{"type": "client_finished", "reasons": ["interrupted"]}]}
    assert [found["session_id"] for found in (await ada.ok("sessions/search", finished))["sessions"]] == [made[0]]


async def test_search_finds_nothing_of_others(ada, bob):
    await ada.session(display_name="only adas")
    for owner in (
        {"type": "own"},
        {"type": "accessible"},
        {"type": "user", "owner_urns": [f"tml:user:{ada.user_id}"]},
    ):
        assert (await bob.ok("sessions/search", {"display_name": "only", "owner": owner}))["sessions"] == []
    mine = {"display_name": "only", "owner": {"type": "user", "owner_urns": [f"tml:user:{ada.user_id}"]}}
    assert len((await ada.ok("sessions/search", mine))["sessions"]) == 1


async def test_search_tells_tags_runs_and_the_last_heartbeat_before_it_is_written(server, ada):
    session_id = await ada.session(tags=["blue", "<i>"])
    await ada.run(session_id)
    written = await server.context.store.read(sessions.get_session, session_id)
    await ada.ok("session_heartbeat", {"session_id": session_id, "type": "session_heartbeat"})
    [found] = (await ada.ok("sessions/search", {"session_id": session_id}))["sessions"]
    assert (found["tags"], found["training_runs_count"]) == (["blue", "<i>"], 1)
    assert datetime.fromisoformat(found["last_seen_at"]) > written.last_seen_at


async def test_project_takes_session_and_runs_along(ada):
    session_id = await ada.session(project_id="p1")
    run_id = await ada.run(session_id)
    assert (await ada.send("PUT", f"sessions/{session_id}/project", {"project_id": "p2"})).status_code == 204
    found = await ada.ok("sessions/search", {"session_id": session_id})
    assert found["sessions"][0]["project_id"] == "p2"
    runs = await ada.fetch("training_runs", params={"project_id": "p2"})
    assert [run["training_run_id"] for run in runs["training_runs"]] == [run_id]


async def test_trace_shows_what_ran(ada):
    session_id = await ada.session()
    run_id = await ada.run(session_id)
    await ada.train(run_id, 1)
    await ada.sample(await ada.sampler(session_id))
    export = await ada.fetch(f"sessions/{session_id}/trace_export")
    assert export["status"] == "ready"
    fetched = await ada.http.get(export["url"])
    assert fetched.status_code == 200, fetched.text
    check_trace(fetched.json())
    events = fetched.json()["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"train:0", "sample:0"} <= processes
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert {"create_model", "forward_backward", "sample", "queued", "running"} <= set(names)


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("display_name", "x" * 9000, 413),
        ("user_metadata", {"k": "x" * 70_000}, 413),
        ("tags", ["x" * 1000] * 100, 413),
        ("project_id", "a\0b", 400),
        ("sdk_version", 3, 422),
        ("unknown", 1, 422),
    ],
    ids=["long name", "large metadata", "many tags", "NUL", "wrong type", "unknown field"],
)
async def test_session_with_bad_fields_is_refused(ada, field, value, status):
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", field: value}
    response = await ada.post("create_session", body)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"detail", "code", "request_id"}
    assert field in response.json()["detail"]


async def test_many_sessions_at_once(ada):
    made = await asyncio.gather(*(ada.session() for _ in range(20)))
    assert len(set(made)) == 20


async def test_ended_session_makes_no_runs(ada):
    session_id = await ada.session()
    await ada.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    assert (await ada.post("create_model", body)).status_code == 410
