"""Requests are counted by where they come from; nobody can choose that, and nobody takes the places of others."""

import asyncio

import httpx2
import pytest

from lorimer.server.address_limiter import AddressLimiter, network_of
from lorimer.server.settings import Settings

HEALTH = "/api/v1/healthz"


def address(client: str, *forwarded: str, proxies: tuple[str, ...] = ()) -> str:
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    scope = {"type": "http", "client": (client, 1234) if client else None, "headers": headers}
    return AddressLimiter(Settings(trusted_proxies=proxies)).address_of(scope)


def test_a_header_that_anybody_can_send_is_not_believed():
    assert address("10.0.0.5") == "10.0.0.5"
    assert address("10.0.0.5", "1.2.3.4") == "10.0.0.5"
    assert address("10.0.0.5", "1.2.3.4", proxies=("10.0.0.6",)) == "10.0.0.5"
    assert address("") == ""


@pytest.mark.parametrize(
    ("forwarded", "found"),
    [
        (("1.2.3.4",), "1.2.3.4"),
        (("6.6.6.6, 1.2.3.4",), "1.2.3.4"),
        (("6.6.6.6", "1.2.3.4, 10.0.0.7"), "1.2.3.4"),
        (("10.0.0.8, 10.0.0.7",), "10.0.0.5"),
        ((" , ",), "10.0.0.5"),
        ((), "10.0.0.5"),
        (("2001:db8:1:2:3:4:5:6",), "2001:db8:1:2::/64"),
        (("made up",), "made up"),
    ],
    ids=["one", "first is made up", "two proxies", "only proxies", "nothing", "absent", "IPv6", "text"],
)
def test_a_proxy_names_the_last_that_is_no_proxy(forwarded, found):
    assert address("10.0.0.5", *forwarded, proxies=("10.0.0.0/24", "::1")) == found


def test_a_machine_with_many_addresses_is_one():
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.1.2.3") == network_of("10.1.2.3") == "10.1.2.3"
    assert network_of("fe80::1%eth0").startswith("fe80::")


def test_wrong_proxies_are_named():
    with pytest.raises(ValueError, match=r"trusted_proxies has 'proxy\.lab'; an address or a network"):
        Settings(trusted_proxies=("10.0.0.1", "proxy.lab"))


async def test_one_address_does_not_take_the_places_of_others(start):
    async with start(max_requests_per_address=2) as running:
        clients = {
            name: httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app=running.app, client=(name, 1)), base_url="http://127.0.0.1:8000"
            )
            for name in ("192.0.2.1", "192.0.2.2")
        }
        greedy, other = clients.values()
        inner = []

        async def second():
            inner.append(await greedy.get(HEALTH))
            inner.append(await other.get(HEALTH))
            yield b"abc"

        async def first():
            await greedy.post("/size", content=second())
            yield b"abc"

        assert (await greedy.post("/size", content=first())).json() == 3
        assert [answer.status_code for answer in inner] == [429, 200]
        assert inner[0].json()["code"] == "too_many_requests"
        assert "2 requests from your address" in inner[0].json()["detail"]
        assert inner[0].headers["retry-after"]
        assert (await greedy.get(HEALTH)).status_code == 200
        for client in clients.values():
            await client.aclose()


async def test_one_user_does_not_take_the_places_of_others(start):
    async with start(max_concurrent_requests=6) as running:
        greedy, other = [{"x-api-key": (await running.new_key(user))[1]} for user in ("greedy", "other")]
        release = asyncio.Event()

        async def held():
            yield b"a"
            await release.wait()

        waiting = [asyncio.create_task(running.http.post("/size", content=held(), headers=greedy)) for _ in range(4)]
        done, _ = await asyncio.wait(waiting, timeout=1)
        (refused,) = [one.result() for one in done]
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
        assert "3 requests of yours are being held" in refused.json()["detail"]
        assert refused.headers["retry-after"]
        assert (await running.http.get("/zeros?count=1", headers=other)).status_code == 200
        release.set()
        assert [(await one).status_code for one in waiting].count(200) == 3
        assert running.context.requests.held == 0


def test_counts_are_forgotten_with_their_requests():
    limiter = AddressLimiter(Settings(max_requests_per_address=1))
    for number in range(1000):
        with limiter.held(f"10.0.0.{number}") as has_room:
            assert has_room
    assert not limiter._held
