"""Whoever guesses ids or keys is slowed down; whoever has valid ones does not notice."""

import httpx2
import pytest

from lorimer.server.settings import Settings

SESSION = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
RATE = 0.5
"""Failed lookups each second: so few that a slow machine is slowed down as well."""
BURST = round(20 * RATE)
LOOKUPS = {
    "session": ("GET", "/api/v1/sessions/{}", None),
    "run": ("GET", "/api/v1/training_runs/{}", None),
    "checkpoint": ("GET", "/api/v1/training_runs/{}/checkpoints", None),
    "sampler": ("GET", "/api/v1/samplers/{}", None),
    "future": ("POST", "/api/v1/retrieve_future", {"request_id": "{}"}),
    "cancelled future": ("POST", "/api/v1/cancel_future", {"request_id": "{}"}),
    "key": ("DELETE", "/api/v1/keys/{}", None),
    "path": ("POST", "/api/v1/weights_info", {"tinker_path": "tinker://{}/weights/a"}),
}


async def ask(http: httpx2.AsyncClient, secret: str, lookup: str, name: str) -> httpx2.Response:
    method, path, body = LOOKUPS[lookup]
    body = {key: value.format(name) for key, value in body.items()} if body else None
    return await http.request(method, path.format(name), json=body, headers={"x-api-key": secret})


async def test_guessed_ids_of_all_kinds_are_slowed_down_and_valid_ones_are_not(start):
    async with start(failed_lookups_per_second=RATE) as running:
        (_, eve), (_, ada) = await running.new_key("eve"), await running.new_key("ada")
        created = await running.http.post("/api/v1/create_session", json=SESSION, headers={"x-api-key": eve})
        own = created.json()["session_id"]
        kinds = list(LOOKUPS)
        answers = [await ask(running.http, eve, kinds[n % len(kinds)], f"{n:032x}") for n in range(200)]
        statuses = [answer.status_code for answer in answers]
        assert set(statuses[: BURST - 1]) == {404, 410}
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) > 100
        assert refused[0].json()["code"] == "too_many_failures"
        assert "failed_lookups_per_second" in refused[0].json()["detail"]
        assert int(refused[0].headers["retry-after"]) >= 1
        for kind in LOOKUPS:  # the first may have become due just now
            assert 429 in [(await ask(running.http, eve, kind, "f" * 32)).status_code for _ in range(2)], kind
        assert {(await ask(running.http, eve, "session", own)).status_code for _ in range(50)} == {200}
        assert (await ask(running.http, ada, "session", "f" * 32)).status_code == 404, "nobody else is slowed down"


async def test_wrong_keys_are_slowed_down_by_address_and_right_ones_are_not(start):
    async with start(failed_lookups_per_second=RATE) as running:
        _, secret = await running.new_key()

        def client(address: str) -> httpx2.AsyncClient:
            transport = httpx2.ASGITransport(app=running.app, client=(address, 1))
            return httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")

        async with client("192.0.2.1") as guesser, client("192.0.2.2") as other:
            answers = [await ask(guesser, f"tml-{number}", "session", "0") for number in range(2 * BURST + 100)]
            statuses = [answer.status_code for answer in answers]
            assert set(statuses[:BURST]) == {401}
            assert statuses.count(429) > 50
            assert "retry-after" in answers[statuses.index(429)].headers
            assert (await ask(other, "tml-wrong", "session", "0")).status_code == 401
            listed = [await guesser.get("/api/v1/sessions", headers={"x-api-key": secret}) for _ in range(20)]
            assert {answer.status_code for answer in listed} == {200}


async def test_forged_addresses_of_downloads_are_slowed_down(start):
    async with start(failed_lookups_per_second=RATE) as running:
        await running.new_key()
        path = "/api/v1/downloads/traces/{}.json?expires=99999999999&signature=x"
        statuses = [(await running.http.get(path.format(number))).status_code for number in range(2 * BURST + 100)]
        assert statuses.count(429) > 50, set(statuses)


async def test_a_limit_of_none(start):
    async with start(failed_lookups_per_second=0) as running:
        _, secret = await running.new_key()
        statuses = {(await ask(running.http, secret, "session", str(number))).status_code for number in range(500)}
        assert statuses == {404}
        assert len(running.context.failed_lookups) == 0


async def test_a_result_of_ones_own_that_has_expired_is_no_guess(start):
    async with start(failed_lookups_per_second=RATE) as running:
        _, secret = await running.new_key()
        finished = (
            await running.http.post("/api/v1/create_session", json=SESSION, headers={"x-api-key": secret})
        ).json()
        body = {"reason": {"type": "success"}, "detail": None}
        await running.http.post(
            f"/api/v1/sessions/{finished['session_id']}/finish", json=body, headers={"x-api-key": secret}
        )
        beat = {"session_id": finished["session_id"]}
        answers = [
            await running.http.post("/api/v1/session_heartbeat", json=beat, headers={"x-api-key": secret})
            for _ in range(2 * BURST)
        ]
        assert {answer.status_code for answer in answers} == {410}


def test_a_negative_rate_is_refused():
    with pytest.raises(ValueError, match=r"failed_lookups_per_second is -1"):
        Settings(failed_lookups_per_second=-1)
