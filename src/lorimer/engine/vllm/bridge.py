"""The process of a vLLM sampler: takes the engine's sampling commands, asks its vLLM server, and replies.

To the scheduler it is an engine that only samples. It ends when its server ends or hangs, and is restarted as an engine
is. Adapters are loaded by `LoadSampler` under their name and unloaded by `DropSampler`; the scheduler decides which.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil

from lorimer.engine.channel import Connection
from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import (
    Cancel,
    Command,
    Done,
    DropSampler,
    Failed,
    GetStatus,
    LoadProgress,
    LoadSampler,
    Ready,
    Reply,
    SampleRequest,
    SampleResult,
    Shutdown,
    StateResult,
    Status,
    decode_command,
    encode,
)
from lorimer.engine.model.base_model import load_tokenizer
from lorimer.engine.model.device import Device, open_device
from lorimer.engine.sampling.stops import Stop
from lorimer.engine.validation import check_sample
from lorimer.engine.vllm.base_files import BaseFiles, check_adapter
from lorimer.engine.vllm.exchange import Collected, completion_body, refuse_inexact, to_result
from lorimer.engine.vllm.routes import BASE, HUNG_SECONDS, Vllm, VllmError, watch
from lorimer.engine.vllm.server import VllmServer
from lorimer.engine.vllm.start_check import check_mixed_batch
from lorimer.errors import EngineError, LorimerError, NotFound
from lorimer.models.sources import resolve


class Bridge:
    """Answers commands with the help of one vLLM server."""

    def __init__(self, config: EngineConfig, connection: Connection, base: BaseFiles, tokenizer: Any, vllm: Vllm):
        assert config.vllm is not None
        self._max_rank = config.vllm.max_lora_rank
        self._connection, self._info, self._tokenizer, self._vllm = connection, base.info, tokenizer, vllm
        self._directories: dict[str, str] = {}
        """Of the adapters that the scheduler has loaded, by sampler_id."""
        self._samples: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_sampled = self._num_prefilled = self._num_cached = 0
        self._broken = asyncio.Event()

    async def run(self, first: "asyncio.Task[Command | None]", others: "asyncio.Queue[Command | None]") -> None:
        """Take commands until one to stop arrives or the other end is gone."""
        command = await first
        while command is not None and not isinstance(command, Shutdown):
            self._take(command)
            command = await others.get()

    async def wait_until_broken(self) -> None:
        """Wait until vLLM has failed a command and is not healthy."""
        await self._broken.wait()

    def _take(self, command: Command) -> None:
        match command:
            case SampleRequest(request_id=request_id):
                task = self._samples[request_id] = self._begin(self._answer(request_id, self._sample(command)))
                task.add_done_callback(lambda _: self._samples.pop(request_id, None))
            case Cancel(request_id=request_id):
                if (running := self._samples.pop(request_id, None)) is not None and running.cancel():
                    self.send(Failed(request_id=request_id, category="cancelled", error="cancelled by the client"))
            case LoadSampler(request_id=request_id):
                self._begin(self._answer(request_id, self._load(command)))
            case DropSampler(request_id=request_id, sampler_id=name):
                self._begin(self._answer(request_id, self._drop(name)))
            case GetStatus(request_id=request_id):
                self.send(Done(request_id=request_id, result=self._status()))
            case _:
                error = f"{type(command).__name__} is not accepted: this process only samples"
                request_id = getattr(command, "request_id", "")
                self.send(Failed(request_id=request_id, category="user", error=error))

    def _begin(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, request_id: str, work: Any) -> None:
        try:
            reply: Reply = Done(request_id=request_id, result=await work)
        except asyncio.CancelledError:
            return  # answered by whoever cancelled it
        except Exception as error:
            if is_of_server(error) and not await self._vllm.is_healthy():
                self._broken.set()  # this process ends, and the command is repeated with the next one
                return
            reply = failure(request_id, error)
        self.send(reply)

    # ── adapters ──────────────────────────────────────────────────────────────────────────────────────

    async def _load(self, command: LoadSampler) -> StateResult:
        check_adapter(command.directory, self._max_rank)
        await self._vllm.load_adapter(command.sampler_id, command.directory)
        self._directories[command.sampler_id] = command.directory
        return StateResult()

    async def _drop(self, name: str) -> StateResult:
        del self._directories[name]
        await self._vllm.unload_adapter(name)
        return StateResult()

    async def _load_again(self, name: str, error: VllmError) -> None:
        """Load an adapter that vLLM has dropped."""
        if error.status != 404 or name not in self._directories:
            raise error
        await self._vllm.load_adapter(name, self._directories[name])

    # ── samples ───────────────────────────────────────────────────────────────────────────────────────

    async def _sample(self, request: SampleRequest) -> SampleResult:
        refuse_inexact(request)
        check_sample(request, vocab_size=self._info.vocab_size, max_context=self._info.max_context)
        if request.sampler_id is not None and request.sampler_id not in self._directories:
            raise NotFound(f"there is no sampler {request.sampler_id!r}")
        stop = Stop(request.params.stop, self._info.eos_token_ids, self._tokenizer)
        try:
            result = await self._compute(request, stop)
        except VllmError as error:
            await self._load_again(request.sampler_id or "", error)
            result = await self._compute(request, stop)
        self._num_sampled += sum(len(sequence.tokens) for sequence in result.sequences)
        self._num_cached += result.prompt_cache_hit_tokens
        self._num_prefilled += result.prompt_tokens - result.prompt_cache_hit_tokens
        return result

    async def _compute(self, request: SampleRequest, stop: Stop) -> SampleResult:
        if request.stream or stop.strings:
            # Each has a request of its own, which ends when the sequence meets a stop string.
            try:
                async with asyncio.TaskGroup() as group:
                    indexes = range(request.num_samples)
                    tasks = [group.create_task(self._stream(request, stop, index)) for index in indexes]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            streamed = [task.result() for task in tasks]
            return to_result(request, [collected for collected, _ in streamed], streamed[0][1])
        found = await self._vllm.complete(self._body(request, stop, is_streamed=False))
        sequences = []
        for choice in sorted(found["choices"], key=lambda choice: choice["index"]):
            collected = Collected()
            collected.add(choice, request.topk_sample_logprobs)
            sequences.append(collected)
        if not request.params.temperature:
            sequences *= request.num_samples
        return to_result(request, sequences, found.get("usage"))

    def _body(self, request: SampleRequest, stop: Stop, *, is_streamed: bool) -> dict[str, Any]:
        name = BASE if request.sampler_id is None else request.sampler_id
        return completion_body(request, name, sorted(stop.ids), self._info.max_context, is_streamed=is_streamed)

    async def _stream(self, request: SampleRequest, stop: Stop, index: int) -> tuple[Collected, dict[str, Any] | None]:
        """Sample one sequence, token by token. Return it with the usage, if vLLM told it."""
        collected, watch, usage = Collected(), stop.begin(), None
        async with contextlib.aclosing(self._vllm.stream(self._body(request, stop, is_streamed=True))) as pieces:
            async for piece in pieces:
                usage = piece.get("usage") or usage
                is_cut = False
                for choice in piece["choices"]:
                    first = len(collected.tokens)
                    collected.add(choice, request.topk_sample_logprobs)
                    for length in range(first + 1, len(collected.tokens) + 1):
                        if watch.ends(collected.tokens[:length]):
                            is_cut = collected.stop_reason is None
                            collected.cut(length)
                            break
                    if request.stream and (len(collected.tokens) > first or collected.stop_reason):
                        self.send(collected.progress(request.request_id, index, first))
                if is_cut:  # vLLM does not know of the stop, and would go on
                    break
        if collected.stop_reason is None:
            raise EngineError("vLLM ended a stream before its sequence")
        return collected, usage

    def _status(self) -> Status:
        return Status(
            num_runs=0,
            num_samplers=len(self._directories),
            num_sampling=len(self._samples),
            num_waiting=0,
            memory_bytes=psutil.Process().memory_info().rss,
            train_tokens=0,
            sampled_tokens=self._num_sampled,
            prefilled_tokens=self._num_prefilled,
            cached_tokens=self._num_cached,
        )

    def send(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):  # the other end is gone, and `run` ends
            self._connection.send(encode(reply))


def is_of_server(error: Exception) -> bool:
    """Return whether an error may mean that vLLM is broken."""
    return isinstance(error, httpx2.HTTPError) or (isinstance(error, VllmError) and error.status >= 500)


def failure(request_id: str, error: Exception) -> Failed:
    if isinstance(error, LorimerError) and not isinstance(error, EngineError):
        return Failed(request_id=request_id, category="user", error=str(error))
    if not isinstance(error, LorimerError | httpx2.HTTPError):
        traceback.print_exception(error)
    return Failed(request_id=request_id, category="server", error=f"{type(error).__name__}: {error}")


def read_commands(connection: Connection) -> "asyncio.Queue[Command | None]":
    """Read commands on a thread of its own; None stands for the end of the connection."""
    loop, commands = asyncio.get_running_loop(), asyncio.Queue[Command | None]()

    def read() -> None:
        command: Command | None = Shutdown()
        while command is not None:
            data = connection.receive()
            command = None if data is None else decode_command(data)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(commands.put_nowait, command)

    threading.Thread(target=read, name="reader", daemon=True).start()
    return commands


async def serve(config: EngineConfig, connection: Connection) -> str:
    """Start vLLM, and serve until the other end is gone. Return why vLLM ended, if it did."""

    def report(stage: str, fraction: float | None = None) -> None:
        connection.send(encode(LoadProgress(stage=stage, fraction=fraction)))

    cache = Path(config.cache_directory) if config.cache_directory else None
    source = resolve(config.model, cache_directory=cache, progress=report)
    report("choosing device and precision")
    device = open_device(config)
    tokenizer = load_tokenizer(source.directory)
    base = BaseFiles(source, config, device, tokenizer)
    report("starting vLLM")
    server = VllmServer(config, source.directory, device, base.info.max_context)
    try:
        async with server.client() as client:
            vllm, commands = Vllm(client), read_commands(connection)
            first = asyncio.create_task(commands.get())
            ready = asyncio.create_task(make_ready(server, client, vllm, base, device, report))
            await asyncio.wait([first, ready], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():  # before it is ready, nothing comes but the end
                ready.cancel()
                return ""
            ready.result()
            bridge = Bridge(config, connection, base, tokenizer, vllm)
            bridge.send(Ready(info=base.info))
            tasks = {
                asyncio.create_task(bridge.run(first, commands)): "",
                asyncio.create_task(server.wait_until_ended()): "vLLM ended",
                asyncio.create_task(bridge.wait_until_broken()): "vLLM failed",
                asyncio.create_task(watch(vllm)): f"vLLM computed nothing for {HUNG_SECONDS:.0f} s, or refused a probe",
            }
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return min(tasks[task] for task in done)
    finally:
        await asyncio.to_thread(server.close)


async def make_ready(
    server: VllmServer,
    client: httpx2.AsyncClient,
    vllm: Vllm,
    base: BaseFiles,
    device: Device,
    report: Callable[[str], None],
) -> None:
    await server.wait_until_ready(client)
    report("comparing adapters alone and in a mixed batch")
    await check_mixed_batch(vllm, base, server.folder, device.dtype)


def main(descriptor: int) -> None:
    """Serve the process at the other end of the socket ``descriptor``."""
    # Ctrl-C reaches the whole group; the process that owns this one decides what to do about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=descriptor))
    data = connection.receive()
    if data is None:
        return
    try:
        reason = asyncio.run(serve(msgspec.msgpack.decode(data, type=EngineConfig), connection))
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(encode(failure("", error)))
        sys.exit(1)
    if reason:
        sys.stderr.write(f"vllm: {reason}\n")
        sys.stderr.flush()
        os._exit(1)
