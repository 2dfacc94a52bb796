"""Every request gets an id, safe headers and a log line; foreign hosts and origins are turned away."""

import json
import logging
from io import StringIO

from lorimer.server.hosts import HostRule, is_same_origin
from lorimer.server.log_format import configure_logs, remove_logs
from lorimer.server.settings import Settings
from lorimer.types.compression import decompress

HEALTH = "/api/v1/healthz"


FOREIGN = [
    *("evil.test", "evil.test:8000", "127.0.0.1.evil.test", "localhost@evil.test", "", "a b", "[::1", "192.168.1.2"),
    *("[::1].evil.test", "[::1]evil.test:8000", "evil.test[::1]", "[evil.test]", "localhost:80:80", "localhost:http"),
    *("localhost/evil", "localhost?evil", "localhost#evil", "[::1]:8000.evil.test", ".", ":8000"),
]
OWN = ["127.0.0.1:1", "localhost", "LOCALHOST:80", "[::1]:8000", "localhost.", "mine.test"]


async def test_foreign_hosts_are_refused_before_anything_else_and_own_ones_served(start):
    async with start(allowed_hosts=("mine.test",)) as running:
        for host in FOREIGN:
            answer = await running.http.get(HEALTH, headers={"host": host})
            assert (answer.status_code, answer.json()["code"]) == (421, "bad_host"), host
        for host in OWN:
            assert (await running.http.get(HEALTH, headers={"host": host})).status_code == 200, host


async def test_a_target_that_is_no_path_is_refused(start):
    async with start() as running:

        async def ask(path):
            sent = []

            async def send(message):
                sent.append(message)

            async def receive():
                return {"type": "http.request", "body": b"", "more_body": False}

            scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "client": None}
            await running.app(scope | {"headers": [(b"host", b"localhost")]}, receive, send)
            return sent[0]["status"], sent[1]["body"]

        for path in ("http://evil.test/api/v1/healthz", "evil.test:80", "*", ""):
            status, body = await ask(path)
            assert status == 400 and b"bad_target" in body, path
        assert (await ask(HEALTH))[0] == 200


async def test_two_hosts_are_refused(start):
    async with start() as running:
        headers = [("host", "127.0.0.1"), ("host", "evil.test")]
        assert (await running.http.get(HEALTH, headers=headers)).status_code == 421


def test_a_server_on_every_address_answers_to_addresses_but_not_to_any_name():
    rule = HostRule(Settings(host="0.0.0.0", allowed_hosts=("*.lab.test",)))
    assert rule.allows("192.168.1.2:8000")
    assert rule.allows("[fe80::1]:8000")
    assert rule.allows("gpu.lab.test")
    assert not rule.allows("lab.test.evil.org")
    assert not rule.allows("evil.test")
    assert HostRule(Settings(allowed_hosts=("*",))).allows("anything.test")


async def test_foreign_pages_are_refused(start):
    async with start() as running:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            for origin in ("http://evil.test", "null", "http://127.0.0.1:9999", "", "http://["):
                answer = await running.http.request(method, "/api/v1/create_session", headers={"origin": origin})
                assert (answer.status_code, answer.json()["code"]) == (403, "bad_origin"), (method, origin)


async def test_own_page_is_served(start):
    async with start() as running:
        answer = await running.http.post("/size", content=b"abc", headers={"origin": "http://127.0.0.1:8000"})
        assert answer.json() == 3
    assert is_same_origin("https://lab.test", "lab.test")


async def test_length_given_twice_is_refused(start):
    async with start() as running:
        headers = {"content-length": "3", "transfer-encoding": "chunked"}
        answer = await running.http.post("/size", content=b"abc", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (400, "bad_framing")


async def test_every_answer_has_safe_headers_and_an_id_of_its_own(start):
    async with start() as running:
        answers = [await running.http.get(path) for path in (HEALTH, HEALTH, "/nowhere", "/fail")]
        assert len({answer.headers["x-request-id"] for answer in answers}) == 4
        for answer in answers:
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert "'unsafe" not in answer.headers["content-security-policy"]
            assert "access-control-allow-origin" not in answer.headers


async def test_unexpected_error_is_500_in_our_shape_without_its_text(start, caplog):
    async with start() as running:
        answer = await running.http.get("/fail")
        assert answer.status_code == 500
        body = answer.json()
        assert set(body) == {"detail", "code", "request_id"}
        assert "4711" not in answer.text
        assert body["request_id"] == answer.headers["x-request-id"]
        record = next(record for record in caplog.records if record.exc_info)
        assert record.request_id == body["request_id"]


async def test_draining_server_refuses_work_and_answers_polls(start):
    async with start() as running:
        running.context.is_draining = True
        answer = await running.http.post("/api/v1/create_session", json={})
        assert (answer.status_code, answer.json()["code"]) == (503, "shutting_down")
        assert answer.headers["retry-after"]
        assert (await running.http.get(HEALTH)).status_code == 200
        running.context.is_draining = False


async def test_more_requests_than_the_limit_are_answered_429(start):
    async with start(max_concurrent_requests=1) as running:
        inner = []

        async def ask_again():
            inner.append(await running.http.get(HEALTH))
            yield b"abc"

        assert (await running.http.post("/size", content=ask_again())).json() == 3
        assert (inner[0].status_code, inner[0].json()["code"]) == (429, "too_many_requests")
        assert inner[0].headers["retry-after"]
        assert (await running.http.get(HEALTH)).status_code == 200


async def test_websocket_is_closed(start):
    async with start() as running:
        sent = []
        scope = {"type": "websocket", "path": "/", "headers": []}

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "websocket.connect"}

        await running.app(scope, receive, send)
        assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_large_answers_are_compressed_for_those_who_ask_and_others_are_not(start):
    async with start() as running:
        for accepted, encoding in {
            "gzip": "gzip",
            "zstd": "zstd",
            "gzip, deflate, zstd": "zstd",
            "gzip;q=0.5": "gzip",
        }.items():
            async with running.http.stream(
                "GET", "/zeros?count=300000", headers={"accept-encoding": accepted}
            ) as answer:
                packed = b"".join([part async for part in answer.aiter_raw()])
            assert answer.headers["content-encoding"] == encoding
            assert answer.headers["vary"].lower() == "accept-encoding"
            assert int(answer.headers["content-length"]) == len(packed) < 10_000
            assert json.loads(decompress(packed, encoding, 10**7)) == [0] * 300_000
        for count, accepted in ((10, "zstd"), (300_000, "identity"), (300_000, "br, gzip;q=0")):
            answer = await running.http.get(f"/zeros?count={count}", headers={"accept-encoding": accepted})
            assert "content-encoding" not in answer.headers
            assert answer.json() == [0] * count


async def test_log_line_has_ids_and_route_but_no_key_and_no_query(start):
    stream = StringIO()
    handler = configure_logs("json", "debug", stream)
    try:
        async with start() as running:
            key, secret = await running.new_key()
            answer = await running.http.get("/zeros?count=3&q=prompt-canary", headers={"x-api-key": secret})
            await running.http.get("/api/v1/" + secret, headers={"x-api-key": secret})
    finally:
        remove_logs(handler)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    line = next(line for line in lines if line.get("route") == "/zeros")
    assert line["request_id"] == answer.headers["x-request-id"]
    assert line["user_id"] == key.user_id
    assert (line["method"], line["status"], line["level"]) == ("GET", 200, "info")
    assert line["milliseconds"] >= 0
    assert secret not in stream.getvalue()
    assert "canary" not in stream.getvalue()


async def test_what_clients_repeat_is_logged_for_debugging_only(start, caplog):
    caplog.set_level(logging.DEBUG, "lorimer.access")
    async with start() as running:
        await running.http.get(HEALTH)
        await running.http.get("/zeros?count=1")
        levels = {record.route: record.levelname for record in caplog.records if record.name == "lorimer.access"}
        assert levels == {HEALTH: "DEBUG", "/zeros": "INFO"}


async def test_open_pages_of_the_console_do_not_fill_the_log(start, caplog):
    """Its files and all that it polls; what changes something and what fails are still there."""
    caplog.set_level(logging.DEBUG, "lorimer.access")
    async with start() as running:
        for path in ("/", "/console/runs", "/console/static/app.js", "/console/static/style.css"):
            answer = await running.http.get(path)
            again = await running.http.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (answer.status_code, again.status_code) == (200, 304)
        for name in ("whoami", "overview", "keys", "checkpoints", "training_runs", "billing/usage/checkpoints/current"):
            assert (await running.http.get(f"/api/v1/{name}")).status_code == 200, name
        assert (await running.http.post("/api/v1/sessions/search", json={})).status_code == 200
        assert (await running.http.get("/v1/models")).status_code == 200
        assert {r.levelname for r in caplog.records if r.name == "lorimer.access"} == {"DEBUG"}
        caplog.clear()
        await running.http.get("/api/v1/training_runs/none")
        await running.http.get("/console/static/none.js")
        await running.http.post("/api/v1/keys", json={})
        assert [r.levelname for r in caplog.records if r.name == "lorimer.access"] == ["INFO"] * 3


async def test_client_that_leaves_is_no_error(start, caplog):
    async with start() as running:

        async def receive():
            return {"type": "http.disconnect"}

        sent = []

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"localhost")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/size",
            "headers": headers,
            "query_string": b"",
            "client": None,
        }
        await running.app(scope, receive, send)
        assert [record.status for record in caplog.records if record.name == "lorimer.access"] in ([], [499])
        assert sent[0]["status"] == 400, "for one that only sent a broken body"
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
