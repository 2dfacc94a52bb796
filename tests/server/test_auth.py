"""Nobody gets in without a key, wherever they knock; a revoked key ends immediately."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from starlette.routing import Route

from lorimer.errors import InvalidInput, Unauthorized
from lorimer.server import credentials
from lorimer.server.auth import PUBLIC
from lorimer.server.console import is_console
from lorimer.server.signing import DOWNLOADS
from lorimer.store import users

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"]
BAD_KEYS = {
    "empty": {"x-api-key": ""},
    "unknown": {"x-api-key": "tml-" + "a" * 40},
    "not ours": {"x-api-key": "sk-1"},
    "bearer": {"authorization": "Bearer tml-aaaaaaaaaaaaaaaa"},
    "token": {"x-api-key": "eyJhbGciOiJub25lIn0.eyJzdWIiOiJ0bWw6dXNlcjphIn0."},
    "long": {"x-api-key": "tml-" + "a" * 5000},
    "cookie": {"cookie": "key=tml-aaaaaaaaaaaaaaaa"},
}


async def test_every_route_and_method_needs_a_key(start):
    async with start(metrics_access="key", failed_lookups_per_second=0) as running:
        await running.new_key()
        paths = {route.path for route in running.app.routes if isinstance(route, Route)} | {"/", "/nowhere", "/docs"}
        assert len(paths) > 40
        for path in paths:
            for method in METHODS:
                is_public = path in PUBLIC or path.startswith(DOWNLOADS) or is_console(path)
                if is_public and method in ("GET", "HEAD"):
                    continue
                answer = await running.http.request(method, path)
                assert answer.status_code == 401, (method, path)
                assert method == "HEAD" or answer.json()["code"] == "unauthorized"


async def test_other_credentials_are_no_key(start):
    async with start() as running:
        await running.new_key()
        for name, headers in BAD_KEYS.items():
            answer = await running.http.get("/zeros?count=1", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), name


async def test_health_is_public(start):
    async with start() as running:
        await running.new_key()
        for path in ("/api/v1/healthz", "/readyz"):
            assert (await running.http.get(path)).status_code == 200


async def test_method_override_headers_have_no_effect(start):
    async with start() as running:
        await running.new_key()
        headers = {"x-http-method-override": "GET", "x-original-url": "/api/v1/healthz"}
        assert (await running.http.post("/api/v1/create_session", headers=headers)).status_code == 401


async def test_open_server_takes_everybody_for_the_local_user(start):
    async with start() as running:
        assert running.context.credentials.is_open
        for headers in ({}, {"x-api-key": "tml-anything"}, {"x-api-key": "eyJ"}):
            assert (await running.http.get("/zeros?count=1", headers=headers)).status_code == 200


async def test_first_key_ends_open_mode(start):
    async with start() as running:
        assert (await running.http.get("/zeros?count=1")).status_code == 200
        _, secret = await running.new_key()
        assert (await running.http.get("/zeros?count=1")).status_code == 401
        assert (await running.http.get("/zeros?count=1", headers={"x-api-key": secret})).status_code == 200


async def test_revoked_key_is_refused_at_once(start):
    async with start() as running:
        await running.new_key("bob")
        key, secret = await running.new_key()
        for expected in (200, 200):
            assert (await running.http.get("/zeros?count=1", headers={"x-api-key": secret})).status_code == expected
        assert await running.context.credentials.revoke(key.key_id)
        assert (await running.http.get("/zeros?count=1", headers={"x-api-key": secret})).status_code == 401
        assert not await running.context.credentials.revoke(key.key_id)


async def test_revoking_the_last_key_does_not_open_the_server(start):
    async with start() as running:
        key, _ = await running.new_key()
        await running.context.credentials.revoke(key.key_id)
        assert (await running.http.get("/zeros?count=1")).status_code == 401
    async with start() as running:
        assert (await running.http.get("/zeros?count=1")).status_code == 401


async def test_token_stands_for_its_key_until_that_is_revoked(start):
    async with start() as running:
        key, secret = await running.new_key()
        token = (await running.http.post("/api/v1/auth/token", json={}, headers={"x-api-key": secret})).json()["jwt"]
        identity = await running.context.credentials.identify(token)
        assert identity.user.user_id == key.user_id
        assert identity.key.key_id == key.key_id
        assert (await running.http.get("/zeros?count=1", headers={"x-api-key": token})).status_code == 200
        await running.context.credentials.revoke(key.key_id)
        assert (await running.http.get("/zeros?count=1", headers={"x-api-key": token})).status_code == 401


async def test_expired_and_keyless_tokens_are_refused(start):
    async with start() as running:
        key, _ = await running.new_key()
        user = await running.context.store.read(users.get_user, key.user_id)
        old = running.context.signer.issue_token(user, key.key_id, datetime.now(UTC) - timedelta(days=30))
        keyless = running.context.signer.issue_token(user, None, datetime.now(UTC))
        for token in (old, keyless):
            assert (await running.http.get("/zeros?count=1", headers={"x-api-key": token})).status_code == 401


async def test_keys_are_looked_up_again_after_a_while(start, monkeypatch):
    async with start() as running:
        key, secret = await running.new_key()
        await running.context.credentials.identify(secret)
        # Another server of the same database revokes it.
        await running.context.store.write(users.revoke_key, key.key_id)
        assert await running.context.credentials.identify(secret)
        now = time.monotonic() + credentials.REMEMBER_SECONDS + 1
        monkeypatch.setattr(time, "monotonic", lambda: now)
        with pytest.raises(Unauthorized):
            await running.context.credentials.identify(secret)


async def test_memory_of_keys_is_bounded(start, monkeypatch):
    monkeypatch.setattr(credentials, "MAX_REMEMBERED", 3)
    async with start() as running:
        for _ in range(8):
            _, secret = await running.new_key()
            await running.context.credentials.identify(secret)
        assert len(running.context.credentials._found) <= 3


async def test_use_of_a_key_is_recorded(start):
    async with start() as running:
        _, secret = await running.new_key()
        await running.http.get("/zeros?count=1", headers={"x-api-key": secret})
        await running.context.flush()
        assert (await running.context.credentials.list())[0].last_used_at is not None


async def test_every_use_of_a_key_counts_and_is_shown_before_it_is_written(start, monkeypatch):
    """Also a use while the key is remembered, by a token made of it, or by a bearer; one write for all of them."""
    async with start() as running:
        keys = running.context.credentials
        key, secret = await running.new_key()
        writes = []
        write = running.context.store.write

        async def counted(transaction, *arguments, **fields):
            writes.append(transaction)
            return await write(transaction, *arguments, **fields)

        monkeypatch.setattr(running.context.store, "write", counted)
        user = (await keys.holders())[0][key.user_id]
        token = running.context.signer.issue_token(user, key.key_id, datetime.now(UTC))
        for headers in (
            {"x-api-key": secret},
            {"x-api-key": secret},
            {"authorization": f"Bearer {secret}"},
            {"x-api-key": token},
        ):
            before = datetime.now(UTC)
            await running.http.get("/zeros?count=1", headers=headers)
            assert (await keys.list())[0].last_used_at >= before
        assert users.touch_keys not in writes
        shown = (await keys.list())[0].last_used_at
        await running.context.flush()
        await running.context.flush()
        assert writes.count(users.touch_keys) == 1
        (stored,) = await running.context.store.read(users.list_keys)
        assert stored.last_used_at == shown


async def test_uses_that_cannot_be_written_are_written_later(start, monkeypatch):
    async with start() as running:
        _, secret = await running.new_key()
        await running.context.credentials.identify(secret)
        with monkeypatch.context() as patch:
            patch.setattr(users, "touch_keys", lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await running.context.flush()
        await running.context.flush()
        (stored,) = await running.context.store.read(users.list_keys)
        assert stored.last_used_at is not None


async def test_secrets_are_not_in_the_data_directory(start, tmp_path):
    async with start() as running:
        _, secret = await running.new_key()
        await running.http.get("/zeros?count=1", headers={"x-api-key": secret})
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert files
    assert not any(secret.encode() in path.read_bytes() for path in files)


@pytest.mark.parametrize("host", ["0.0.0.0", "gpu.lab.test"])
async def test_address_others_can_reach_needs_keys(start, host):
    with pytest.raises(InvalidInput, match="lorimer key create"):
        async with start(host=host):
            pass
    async with start() as running:
        await running.new_key()
    async with start(host=host) as running:
        assert not running.context.credentials.is_open
        assert (await running.http.get("/zeros?count=1")).status_code == 401


@pytest.mark.parametrize(
    ("access", "headers", "expected"),
    [
        ("loopback", {}, 200),
        ("loopback", {"x-forwarded-for": "1.2.3.4"}, 401),
        ("key", {}, 401),
        ("open", {"x-forwarded-for": "1.2.3.4"}, 200),
    ],
)
async def test_who_may_read_metrics(start, access, headers, expected):
    async with start(metrics_access=access) as running:
        await running.new_key()
        assert (await running.http.get("/metrics", headers=headers)).status_code == expected


async def test_a_database_that_cannot_be_read_is_no_fault_of_the_caller(start):
    """The key is looked up before any route is asked, and that it cannot be is worth a retry."""
    async with start() as running:
        _, secret = await running.new_key()
        running.context.store._readers.close()
        answer = await running.http.get("/api/v1/get_server_capabilities", headers={"x-api-key": secret})
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_error")
        assert answer.headers["retry-after"] == "5"
