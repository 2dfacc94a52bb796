"""Bodies within and beyond every limit."""

import asyncio
import gzip
import json
import math
import zlib

import pytest
import zstandard
from tinker import types as official

from lorimer.errors import InvalidJson
from lorimer.server.decoding import field_path, parse_json
from lorimer.server.settings import Settings
from lorimer.types.json_bounds import JsonLimits
from tests.memory import resident_peak

EVENT = {
    "events": [],
    "platform": "linux",
    "sdk_version": "0.36.0",
    "session_id": "s",
}


async def test_body_in_every_encoding(start):
    body = bytes(range(256)) * 4096
    encoded = {
        "zstd": zstandard.ZstdCompressor().compress(body),
        "gzip": gzip.compress(body),
        "deflate": zlib.compress(body),
        "identity": body,
        "": body,
    }
    async with start() as running:
        for name, content in encoded.items():
            answer = await running.http.post("/size", content=content, headers={"content-encoding": name})
            assert answer.json() == len(body), name


async def test_torn_and_unknown_encodings(start):
    async with start() as running:
        for name in ("zstd", "gzip", "deflate"):
            answer = await running.http.post(
                "/size", content=b"\x28\xb5\x2f\xfd no", headers={"content-encoding": name}
            )
            assert answer.status_code == 400, name
            assert answer.json()["detail"]
        for name in ("br", "zstd, gzip", "nonsense"):
            answer = await running.http.post("/size", content=b"abc", headers={"content-encoding": name})
            assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_encoding")


async def test_body_beyond_the_limit(start):
    async with start(max_body_bytes=2048) as running:
        assert (await running.http.post("/size", content=b"a" * 2048)).json() == 2048
        answer = await running.http.post("/size", content=b"a" * 2049)
        assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
        assert "2049" in answer.json()["detail"]
        assert "2048" in answer.json()["detail"]


async def test_body_of_unknown_length_is_stopped_at_the_limit(start):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1024
            yield b"a" * 1024

    async with start(max_body_bytes=4096) as running:
        answer = await running.http.post("/size", content=endless())
        assert answer.status_code == 413
        assert sent < 10_000


async def test_bodies_together_have_a_limit_too(start):
    async with start(max_incoming_bytes=8192, max_body_bytes=4096) as running:
        inner = []

        async def first():
            yield b"a" * 3000
            assert running.context.incoming_bytes.held == 3000
            inner.append(await running.http.post("/size", content=b"b" * 3000))
            inner.append(await running.http.post("/size", content=b"b" * 1000))
            yield b"a"

        assert (await running.http.post("/size", content=first())).json() == 3001
        assert [answer.status_code for answer in inner] == [429, 200]
        assert inner[0].json()["code"] == "too_many_bytes"
        assert inner[0].headers["retry-after"]
        assert running.context.incoming_bytes.held == 0
        assert (await running.http.post("/size", content=b"b" * 4096)).json() == 4096


async def test_half_sent_bodies_of_one_user_leave_room_for_another(start):
    async with start(max_incoming_bytes=8192, max_body_bytes=4096) as running:
        keys = [{"x-api-key": (await running.new_key(user))[1]} for user in ("greedy", "other")]
        release = asyncio.Event()

        async def half_sent():
            yield b"a" * 2000
            await release.wait()
            yield b"a"

        sent = [asyncio.create_task(running.http.post("/size", content=half_sent(), headers=keys[0])) for _ in range(4)]
        done, held = await asyncio.wait(sent, timeout=1)
        assert [one.result().status_code for one in done] == [429, 429]
        detail = next(iter(done)).result().json()["detail"]
        assert "4000 bytes of bodies are arriving from you" in detail and "max_incoming_bytes" in detail
        other = await running.http.post("/size", content=b"b" * 2000, headers=keys[1])
        assert (other.status_code, other.json()) == (200, 2000)
        release.set()
        assert {(await one).json() for one in held} == {2001}
        assert running.context.incoming_bytes.held == 0


async def test_a_body_without_a_key_is_not_read(start):
    async with start() as running:
        await running.new_key()
        num_read = 0

        async def receive():
            nonlocal num_read
            num_read += 1
            return {"type": "http.request", "body": b"a" * 1000, "more_body": True}

        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/size", "query_string": b"", "client": ("192.0.2.1", 1)}
        await running.app(scope | {"headers": [(b"host", b"localhost")]}, receive, send)
        assert (sent[0]["status"], num_read) == (401, 0)
        assert running.context.incoming_bytes.held == running.context.requests.held == 0


def test_a_user_must_be_able_to_send_one_body():
    with pytest.raises(ValueError, match=r"max_incoming_bytes is 4096; at least 134217728, twice max_body_bytes"):
        Settings(max_incoming_bytes=4096)


async def test_announced_size_is_refused_unread(start):
    async with start(max_body_bytes=4096) as running:
        answer = await running.http.post("/size", content=b"", headers={"content-length": "9" * 30})
        assert answer.status_code == 413


async def test_bombs_are_stopped(start):
    zeros = bytes(64 << 20)
    async with start(max_decompressed_bytes=1 << 20) as running:
        for name, bomb in (("zstd", zstandard.ZstdCompressor().compress(zeros)), ("gzip", gzip.compress(zeros, 1))):
            answer = await running.http.post("/size", content=bomb, headers={"content-encoding": name})
            assert (answer.status_code, answer.json()["code"]) == (413, "decompressed_too_large"), name


async def test_body_that_does_not_arrive(start):
    async def stalled():
        yield b"a"
        await asyncio.sleep(5)
        yield b"a"

    async with start(body_seconds=0.1) as running:
        answer = await running.http.post("/size", content=stalled())
        assert (answer.status_code, answer.json()["code"]) == (408, "body_timeout")


INVALID = {
    "text": b"hello",
    "brackets": b"[" * 200_000,
    "nested": b'{"a":' * 70 + b"1" + b"}" * 70,
    "nested lists": b'{"a":' + b"[" * 65 + b"]" * 65 + b"}",
    "twice": b'{"a": 1, "a": 2}',
    "twice escaped": b'{"a": 1, "\\u0061": 2}',
    "twice below": b'{"a": {"b": 1, "b" : 2}, "c": "\\":"}',
    "digits": b'{"a": ' + b"9" * 200_000 + b"}",
    "nan": b'{"a": NaN}',
    "infinity": b'{"a": 1e999}',
    "utf-8": b'{"a": "\xff"}',
    "surrogate": b'{"a": "\\ud800"}',
    "trailing": b"{} {}",
    "null byte": b'{"a": "\x00"}',
}


async def test_invalid_json(start):
    async with start() as running:
        for name, body in INVALID.items():
            answer = await running.http.post("/decoded", content=body)
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_json"), name
            assert answer.json()["detail"]


LIMITS = JsonLimits(64, 1_000_000, 100_000)


def test_many_keys_are_parsed_and_one_twice_among_them_is_found():
    for number, name in ((4000, "key 'k7'"), (100_000, "a key of one object")):
        items = {f"k{index}": index for index in range(number)}
        text = json.dumps(items)
        assert parse_json(text.encode(), LIMITS) == items
        with pytest.raises(InvalidJson, match=f"{name} comes twice"):
            parse_json((text[:-1] + ', "k7": 0}').encode(), LIMITS)


def test_text_that_looks_like_keys_is_no_reason_to_refuse():
    value = {"prompt": '{"a": 1, "a": 2}', "x": '":":":'}
    assert parse_json(json.dumps(value).encode(), LIMITS) == value


async def test_fields_that_do_not_fit_are_named(start):
    async with start() as running:
        assert (await running.http.post("/decoded", json=EVENT)).json() == "0.36.0"
        answer = await running.http.post("/decoded", json=EVENT | {"sdk_version": 3})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_field")
        assert answer.json()["detail"].startswith("sdk_version: ")
        assert "got 3" in answer.json()["detail"]
        answer = await running.http.post("/decoded", json=EVENT | {"events": [{"event": "x"}] * 9})
        assert "events[0]" in answer.json()["detail"]
        assert len(answer.json()["detail"]) < 2000
        for body in (b"", b"[]", b"null", b"3"):
            assert (await running.http.post("/decoded", content=body)).status_code == 422


def test_field_path():
    assert field_path(("data", 3, "loss_fn_inputs", "weights", 17)) == "data[3].loss_fn_inputs.weights[17]"
    assert field_path(()) == "body"


MILLION_KEYS = b'{"session_id":"s",' + b",".join(b'"k%d":1' % number for number in range(1_000_000)) + b"}"
LISTS = b"[" + b"[]," * (16 * 2**20 // 3) + b"[]]"


@pytest.mark.parametrize("path", ["telemetry", "session_heartbeat", "create_session", "optim_step", "retrieve_future"])
async def test_small_routes_refuse_large_bodies_before_anything_is_built(start, path):
    """Those that take a few hundred bytes of the network and become hundreds of megabytes of objects."""
    async with start() as running:
        for body in (LISTS, MILLION_KEYS):
            bomb = zstandard.ZstdCompressor().compress(body)
            with resident_peak() as peak:
                answer = await running.http.post(f"/api/v1/{path}", content=bomb, headers={"content-encoding": "zstd"})
            if path == "telemetry":  # a client that hears of an error asks again every second
                assert answer.json() == {"status": "accepted"}
            else:
                assert answer.status_code == 413
                assert "max_small_body_bytes" in answer.json()["detail"]
            assert peak.num_bytes < 16 * 2**20 + 2 * len(bomb)


async def test_values_and_unknown_fields_of_small_bodies_are_bounded(start):
    async with start() as running:
        wide = b'{"session_id":"s","x":[' + b"[]," * 100_000 + b"[]]}"
        answer = await running.http.post("/api/v1/session_heartbeat", content=wide)
        assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
        assert "max_json_values" in answer.json()["detail"]
        unknown = json.dumps({f"k{number}": 1 for number in range(10_000)})
        for path in ("session_heartbeat", "create_session", "create_model"):
            answer = await running.http.post(f"/api/v1/{path}", content=unknown)
            assert answer.status_code == 422
            assert "k0" in answer.json()["detail"]
            assert "k1" not in answer.json()["detail"]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", list(official.AdamParams.model_fields))
async def test_numbers_that_are_none_in_a_step_of_the_official_sdk_are_refused_by_name(start, field, number):
    """They arrive as null, which must not become the default."""
    params = official.AdamParams(**{field: number})
    step = official.OptimStepRequest(optim_params=params, model_id="s:train:0", seq_id=1)
    body = step.model_dump_json(exclude_none=True)
    assert f'"{field}":null' in body
    async with start() as running:
        answer = await running.http.post("/api/v1/optim_step", content=body)
        assert answer.status_code == 422
        assert f".{field}: " in answer.json()["detail"]
        assert "null" in answer.json()["detail"]
        sample = {"prompt": {"chunks": []}, "sampling_params": {"temperature": None}, "sampling_session_id": "s"}
        answer = await running.http.post("/api/v1/asample", json=sample)
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith("sampling_params.temperature: ")
