"""Large bodies are decoded in processes of their own: the same result, bounded, and nobody else waits."""

import asyncio
import json
import time

import msgspec
import pytest
import zstandard

from lorimer import types
from lorimer.errors import InvalidField, InvalidJson, TooLarge
from lorimer.server.decoders import BodyMemory, DecodingMemory
from lorimer.server.decoding import (
    CheckJson,
    DecodeSample,
    DecodeTelemetry,
    DecodeTraining,
    SampleHead,
    TelemetryHead,
    TrainingHead,
    perform,
    sample_request,
)
from lorimer.server.errors import Refusal
from lorimer.server.settings import Settings
from lorimer.types.encoding import TooLargeTrainingRequest
from tests.server.decoding import MIB, PROTOBUF, TRAIN, job, training_body

# ── the same as here ──────────────────────────────────────────────────────────────────────────────────


async def test_results_are_those_of_this_process(pool):
    decoders = pool()
    body = training_body(300)
    sample = {
        "prompt": {"chunks": [{"tokens": list(range(5000))}, {"tokens": [7]}]},
        "sampling_params": {"seed": 3, "stop": ["x"], "temperature": 0.5},
        "sampling_session_id": "s",
        "target_prompt_logprobs": {"data": [1] * 10_000, "dtype": "int64", "shape": [5000, 2]},
    }
    events = {"session_id": "s", "events": [{"event": "x", "authorization": "secret"}] * 900}
    for task, content, head in (
        (TRAIN, body, TrainingHead),
        (DecodeSample(), json.dumps(sample).encode(), SampleHead),
        (DecodeTelemetry(), json.dumps(events).encode(), TelemetryHead),
    ):
        expected, payload = perform(task, content, Settings())
        packed = zstandard.ZstdCompressor().compress(content)
        for found in (
            await decoders.decode("ada", job(task, content), [content[:99], content[99:]]),
            await decoders.decode("ada", job(task, packed, "zstd"), [packed]),
        ):
            assert msgspec.msgpack.encode(msgspec.msgpack.decode(found[0], type=head)) == msgspec.msgpack.encode(
                expected
            )
            assert found[1] == payload
    assert decoders.memory.total == 0
    expected, payload = perform(DecodeSample(), json.dumps(sample).encode(), Settings())
    made = sample_request(expected)
    assert made.model_dump() == types.SampleRequest.model_validate(sample).model_dump()
    assert json.loads(payload) == json.loads(made.model_dump_json(exclude_none=True))


async def test_errors_are_those_of_this_process(pool):
    decoders = pool(max_datums_per_operation=100)
    cases = [
        (TRAIN, b"\x1a\x00" * 1000, TooLargeTrainingRequest),
        (DecodeSample(), b'{"prompt": 3}', InvalidField),
        (CheckJson(64, 10, 10, "x"), b"[" + b"1," * 100 + b"1]", TooLarge),
        (CheckJson(64, 10, 10, "x"), b'{"a": 1, "a": 2}', InvalidJson),
    ]
    for task, body, kind in cases:
        with pytest.raises(kind) as here:
            perform(task, body, Settings(max_datums_per_operation=100))
        with pytest.raises(kind) as there:
            await decoders.decode("ada", job(task, body), [body])
        assert (type(here.value), str(here.value)) == (type(there.value), str(there.value))
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * MIB))
    with pytest.raises(TooLarge, match="when decompressed"):
        await decoders.decode("ada", job(TRAIN, bomb, "zstd", max_bytes=MIB), [bomb])
    assert len(decoders.pids) == 1
    assert decoders.memory.total == 0


# ── what it may take ──────────────────────────────────────────────────────────────────────────────────


def test_memory_has_a_share_for_each_user_and_a_limit_in_all():
    memory = DecodingMemory(Settings(max_decoding_bytes=10_000, max_decoding_bytes_per_user=5000))
    first, second, third = BodyMemory("ada"), BodyMemory("ada"), BodyMemory("bob")
    memory.grow(first, 4000)
    with pytest.raises(Refusal, match="max_decoding_bytes_per_user") as raised:
        memory.grow(second, 1001)
    assert raised.value.status == 429
    memory.grow(second, 1000)
    memory.grow(third, 5000)
    fourth = BodyMemory("eve")
    with pytest.raises(Refusal, match=r"\(max_decoding_bytes\)"):
        memory.grow(fourth, 1)
    memory.grow(first, 1)  # the oldest goes on
    for body in (first, second, third, fourth):
        memory.release(body)
    assert memory.total == 0
    alone = BodyMemory("ada")
    memory.grow(alone, 6000)
    memory.grow(alone, 6000)  # would be refused for ever otherwise
    assert memory.total == 12_000
    memory.release(alone)
    assert memory.total == 0


async def test_decompressed_bytes_of_a_user_are_limited_while_they_grow(pool):
    """Two small bodies that unpack to much: together they are more than the user may have."""
    decoders = pool(max_decoding_bytes_per_user=24 * MIB, decoder_processes=3)
    bomb = zstandard.ZstdCompressor().compress(b'{"a":"' + b"x" * (20 * MIB) + b'"}')
    task = CheckJson(64, 10, 10, "x")
    answers = await asyncio.gather(
        *(decoders.decode("ada", job(task, bomb, "zstd"), [bomb]) for _ in range(2)),
        decoders.decode("bob", job(task, bomb, "zstd"), [bomb]),
        return_exceptions=True,
    )
    refused = [answer for answer in answers[:2] if isinstance(answer, Refusal)]
    assert len(refused) <= 1
    assert isinstance(answers[2], tuple)
    for answer in refused:
        assert (answer.status, answer.code) == (429, "too_many_bytes")
    assert decoders.memory.total == 0


async def test_a_body_that_needs_too_much_memory_fails_alone(pool):
    decoders = pool(decoder_memory_bytes=256 * MIB)
    body = b"[" + b"[1.5]," * (6 * MIB) + b"[]]"
    with pytest.raises(Refusal) as raised:
        await decoders.decode("ada", job(CheckJson(64, 10**9, 10**9, "x"), body), [body])
    assert (raised.value.status, raised.value.code) == (413, "too_large")
    small = training_body(10)
    assert (await decoders.decode("ada", job(TRAIN, small), [small]))[1] == small


async def test_a_user_leaves_a_decoder_to_others(pool):
    decoders = pool(decoder_processes=2)
    large, small = training_body(3000), training_body(10)
    await asyncio.gather(*(decoders.decode(name, job(TRAIN, small), [small]) for name in ("ada", "bob")))
    order: list[str] = []

    async def decode(user: str, body: bytes) -> None:
        await decoders.decode(user, job(TRAIN, body), [body])
        order.append(user)

    flood = [asyncio.ensure_future(decode("ada", large)) for _ in range(6)]
    await asyncio.sleep(0)
    await decode("bob", small)
    assert len(order) <= 2, "bob waited behind ada's bodies"
    await asyncio.gather(*flood)


# ── nobody waits ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["protobuf", "json", "sample"])
async def test_the_event_loop_does_little_for_a_body_that_takes_long(start, form):
    """Told by the processor time of its thread, which a busy machine does not change."""
    tokens = list(range(3, 203)) * 600
    if form == "protobuf":
        path, content, media = "forward_backward", training_body(4000), PROTOBUF
    elif form == "json":
        inputs = {
            "target_tokens": {"data": tokens, "dtype": "int64"},
            "weights": {"data": [0.5] * 120_000, "dtype": "float32"},
        }
        datum = {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": inputs}
        fields = {"model_id": "s:train:0", "seq_id": 1}
        content = json.dumps(fields | {"forward_backward_input": {"data": [datum] * 5, "loss_fn": "ppo"}}).encode()
        path, media = "forward_backward", "application/json"
    else:
        targets = {"data": [5] * 600_000, "dtype": "int64", "shape": [120_000, 5]}
        fields = {"prompt": {"chunks": [{"tokens": tokens}]}, "sampling_params": {}, "sampling_session_id": "s"}
        content = json.dumps(fields | {"target_prompt_logprobs": targets}).encode()
        path, media = "asample", "application/json"
    task = DecodeSample() if form == "sample" else DecodeTraining(media, False)
    began = time.thread_time()
    perform(task, content, Settings())
    here = time.thread_time() - began
    async with start() as running:
        answer = await running.http.post(f"/api/v1/{path}", content=content, headers={"content-type": media})
        assert answer.status_code == 404, answer.text  # after it was decoded
        began = time.thread_time()
        answer = await running.http.post(f"/api/v1/{path}", content=content, headers={"content-type": media})
        there = time.thread_time() - began
        assert answer.status_code == 404
    assert there < here / 3, (there, here)
