"""Users make, list and revoke keys of their own."""

import pytest
import pytest_asyncio

from .conftest import Client

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def dora(server):
    """A user of one test, with one key."""
    key, secret = await server.context.credentials.create("dora", "first")
    yield Client(server.ada.http, key.user_id, headers={"x-api-key": secret})
    for each in await server.context.credentials.list():
        if each.user_id == key.user_id:
            await server.context.credentials.revoke(each.key_id)


async def listed(client):
    return [one for one in (await client.fetch("keys"))["keys"] if one["revoked_at"] is None]


async def test_a_key_is_made_used_and_revoked(dora, server):
    (first,) = await listed(dora)
    assert (first["name"], first["is_current"]) == ("first", True)
    made = await dora.ok("keys", {"name": "on the train <b>"})
    secret = made.pop("secret")
    assert secret.startswith(made["prefix"]) and made["is_current"] is False
    again, added = await listed(dora)
    assert again.pop("last_used_at") > first["last_used_at"], "each listing is a use"
    assert (again, added) == ({name: first[name] for name in again}, made)
    assert secret not in str(await dora.fetch("keys"))
    other = Client(dora.http, dora.user_id, headers={"x-api-key": secret})
    assert (await other.fetch("whoami"))["user_id"] == dora.user_id
    revoked = await dora.send("DELETE", f"keys/{made['key_id']}")
    assert (revoked.status_code, revoked.content) == (204, b"")
    assert (await other.get("whoami")).status_code == 401
    assert (await dora.send("DELETE", f"keys/{made['key_id']}")).status_code == 204, "it is revoked all the same"
    known = {one["key_id"]: one["revoked_at"] for one in (await dora.fetch("keys"))["keys"]}
    assert known[made["key_id"]] is not None and known[first["key_id"]] is None
    events = [entry["event"] for entry in (await dora.fetch("audit"))["entries"]]
    assert events[:2] == ["key_revoked", "key_created"]


async def test_the_key_in_use_stays(dora):
    (first,) = await listed(dora)
    refused = await dora.send("DELETE", f"keys/{first['key_id']}")
    assert (refused.status_code, refused.json()["code"]) == (409, "key_in_use")
    assert [one["key_id"] for one in await listed(dora)] == [first["key_id"]]


async def test_keys_of_others_do_not_exist(dora, ada):
    (first,) = await listed(dora)
    assert first["key_id"] not in [one["key_id"] for one in (await ada.fetch("keys"))["keys"]]
    answers = [await ada.send("DELETE", f"keys/{key_id}") for key_id in (first["key_id"], 10**9, "x", "%00")]
    assert [answer.status_code for answer in answers] == [404] * 4
    known, unknown = (answer.json()["detail"] for answer in answers[:2])
    assert known.replace(str(first["key_id"]), "N") == unknown.replace(str(10**9), "N")
    assert [one["key_id"] for one in await listed(dora)] == [first["key_id"]]


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b"])
async def test_names_are_checked(dora, name):
    assert (await dora.post("keys", {"name": name})).status_code == 400
    assert len(await listed(dora)) == 1


async def test_a_user_has_so_many_keys(dora, monkeypatch):
    monkeypatch.setattr("lorimer.server.routes.keys.MAX_KEYS", 2)
    await dora.ok("keys", {"name": "second"})
    refused = await dora.post("keys", {"name": "third"})
    assert (refused.status_code, "you have 2 keys; at most 2" in refused.json()["detail"]) == (413, True)


async def test_an_open_server_gets_no_key_from_a_page(start):
    async with start() as running:
        assert (await running.http.get("/api/v1/keys")).json()["keys"] == []
        refused = await running.http.post("/api/v1/keys", json={"name": "mine"})
        assert (refused.status_code, refused.json()["code"]) == (409, "open_server")
        assert (await running.http.get("/api/v1/whoami")).json()["needs_key"] is False
