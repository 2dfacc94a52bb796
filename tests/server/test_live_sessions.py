"""How many sessions of a user may be alive concurrently."""

import pytest

from lorimer.errors import TooLarge
from lorimer.server import live_sessions
from lorimer.server.live_sessions import LiveSessions

SESSION = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}


def test_finished_and_silent_sessions_make_room(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(live_sessions.time, "monotonic", lambda: now)
    alive = LiveSessions(2)
    for name in ("a", "b"):
        alive.check_room("ada")
        alive.touch("ada", name)
    with pytest.raises(TooLarge, match=r"you have 2 open sessions; at most 2 is accepted \(max_sessions_per_user\)"):
        alive.check_room("ada")
    alive.check_room("bob")
    alive.end("ada", "a")
    alive.end("ada", "unknown")
    alive.end("nobody", "a")
    alive.check_room("ada")
    alive.touch("ada", "c")
    now += live_sessions.ALIVE_SECONDS - 1
    alive.touch("ada", "b")
    now += 2
    alive.check_room("ada")
    alive.touch("ada", "d")
    with pytest.raises(TooLarge):
        alive.check_room("ada")


def test_those_who_went_away_take_no_memory(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(live_sessions.time, "monotonic", lambda: now)
    alive = LiveSessions(10)
    for number in range(50):
        alive.touch(f"user-{number}", "s")
    now += live_sessions.ALIVE_SECONDS + 1
    alive.touch("user-7", "t")
    alive.evict_expired()
    assert alive._last_seen == {"user-7": {"t": now}}


async def test_one_session_too_many_is_refused_and_room_is_made_by_finishing(start):
    async with start(max_sessions_per_user=2) as running:
        made = [(await running.http.post("/api/v1/create_session", json=SESSION)).json() for _ in range(2)]
        refused = await running.http.post("/api/v1/create_session", json=SESSION)
        assert (refused.status_code, refused.json()["code"]) == (413, "too_large")
        assert "max_sessions_per_user" in refused.json()["detail"]
        beat = {"session_id": made[1]["session_id"]}
        assert (await running.http.post("/api/v1/session_heartbeat", json=beat)).status_code == 200
        finish = f"/api/v1/sessions/{made[0]['session_id']}/finish"
        assert (await running.http.post(finish, json={"reason": {"type": "success"}})).status_code == 204
        assert (await running.http.post("/api/v1/create_session", json=SESSION)).status_code == 200
        assert (await running.http.post("/api/v1/create_session", json=SESSION)).status_code == 413


async def test_heartbeats_count_sessions_made_before_a_restart(start):
    async with start() as running:
        made = (await running.http.post("/api/v1/create_session", json=SESSION)).json()["session_id"]
    async with start(max_sessions_per_user=1) as running:
        assert (await running.http.post("/api/v1/session_heartbeat", json={"session_id": made})).status_code == 200
        assert (await running.http.post("/api/v1/create_session", json=SESSION)).status_code == 413
