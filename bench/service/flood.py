"""A process that sends large bodies without pause: ``python -m bench.service.flood HOST PORT KEY DATUMS TOKENS``.

A line on its standard input starts or pauses it; at each pause it prints the number of bodies sent since the start. The
bodies have the maximum accepted size: compressed protobuf training requests; prompts and metrics in JSON.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from bench.service.client import Session
from bench.service.http import PROTOBUF, HttpError, HttpPool
from lorimer import types
from lorimer.types.compression import compress_zstd
from lorimer.types.encoding import encode_training_request

NICENESS = 19
"""It represents a client on another machine, and must not compete with the clients being timed."""
MAX_PROMPT = 131_072
MAX_METRIC_NAMES = 1000
MAX_METRIC_VALUES = 10_000


@dataclass
class Flood:
    """The benchmark's handle of the process."""

    process: asyncio.subprocess.Process
    num_bytes: int = 0
    num_sent: int = 0

    async def begin(self) -> None:
        self._say("begin")

    async def pause(self) -> None:
        self._say("pause")
        self.num_sent += int(await self._line())

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError("the flood ended by itself")
        return line


@asynccontextmanager
async def flood(host: str, port: int, key: str, num_datums: int, num_tokens: int) -> AsyncIterator[Flood]:
    """Start a process that is ready to send; it ends with the block."""
    command = [sys.executable, "-m", "bench.service.flood", host, str(port), key, str(num_datums), str(num_tokens)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        started = Flood(process)
        started.num_bytes = int(await started._line())
        yield started
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def send(host: str, port: int, key: str, num_datums: int, num_tokens: int) -> None:
    pool = HttpPool(host, port, key)
    session = await Session.create(pool)
    run = await session.create_run()
    sampler = await session.create_sampler()
    training = training_body(run.model_id, num_datums, num_tokens)
    packed = compress_zstd(training)
    prompt = prompt_body(sampler.sampling_session_id)

    async def train() -> None:
        await pool.post("/api/v1/forward_backward", packed, PROTOBUF, "zstd")

    async def sample() -> None:
        await pool.post("/api/v1/asample", prompt)

    async def report() -> None:
        await pool.post(f"/api/v1/training_runs/{run.model_id}/metrics", REPORT)

    await train()
    print(len(training), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        tasks = [Sender(call) for call in (train, sample, report)]
        await reader.readline()
        print(sum([await task.end() for task in tasks]), flush=True)


class Sender:
    """Sends repeatedly over one connection."""

    def __init__(self, call: Callable[[], Awaitable[None]]) -> None:
        self.num_sent, self._is_ending = 0, False
        self._task = asyncio.ensure_future(self._send(call))

    async def _send(self, call: Callable[[], Awaitable[None]]) -> None:
        while not self._is_ending:
            try:
                await call()
                self.num_sent += 1
            except HttpError as error:
                if "answered 429" not in str(error):
                    raise
                await asyncio.sleep(0.05)

    async def end(self) -> int:
        self._is_ending = True
        await self._task
        return self.num_sent


def training_body(model_id: str, num_datums: int, num_tokens: int) -> bytes:
    """Return operation 2 of a run whose operation 1 never arrives; each retry is decoded and deduplicated."""
    ids = np.random.default_rng(5).integers(3, 259, num_tokens + 1)
    inputs = {
        "target_tokens": types.TensorData.from_numpy(ids[1:]),
        "weights": types.TensorData.from_numpy(np.ones(num_tokens, np.float32)),
    }
    datum = types.Datum(types.ModelInput.from_ints(ids[:-1].tolist()), inputs)
    return encode_training_request(types.TrainingRequest(model_id, 2, [datum] * num_datums, "cross_entropy"))


def prompt_body(sampling_session_id: str) -> bytes:
    """Return the longest accepted prompt; a small model fails it afterwards."""
    tokens = np.random.default_rng(5).integers(3, 259, MAX_PROMPT).tolist()
    chunk = {"type": "encoded_text", "tokens": tokens}
    fields = {"sampling_params": {"max_tokens": 1}, "sampling_session_id": sampling_session_id, "seq_id": 1}
    return msgspec.json.encode({"prompt": {"chunks": [chunk]}, **fields})


def report_body() -> bytes:
    """Return the largest accepted report; sent again, it takes no more space."""
    values = {f"metric/{number}": 0.5 for number in range(MAX_METRIC_NAMES)}
    points = [{"step": step, "values": values} for step in range(MAX_METRIC_VALUES // MAX_METRIC_NAMES)]
    return msgspec.json.encode({"points": points})


REPORT = report_body()


def main() -> None:
    os.nice(NICENESS)
    host, port, key, num_datums, num_tokens = sys.argv[1:]
    asyncio.run(send(host, int(port), key, int(num_datums), int(num_tokens)))


if __name__ == "__main__":
    main()
