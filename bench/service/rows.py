"""Defines the loads, each against its own server.

Every load counts lost requests: accepted and not answered, or answered wrongly.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from bench.service.client import ENGINE_DATUM, RANK, SEED, Run, Sampler, Session, wait
from bench.service.figures import Figure, median, percentile, spread
from bench.service.hostile import hostile
from bench.service.http import HttpPool
from bench.service.pollers import pollers
from bench.service.samplers import samplers
from bench.service.scaling import scaling
from bench.service.sdk import sdk
from bench.service.server import MODEL, Weight, allow_files, running_server
from bench.service.setting import Bench, timed
from bench.service.sweep import sweep
from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import CreateRun, ForwardBackward, LoraConfig, TrainBatch
from lorimer.engine.process import EngineProcess

MIB = 1024 * 1024
SAME_LOSS = 1e-3
POLLERS_PER_RUN = 2500
FIRST_NUMBER = 2
"""First seq_id of the operations that wait for operation 1, which is sent last."""
HEARTBEAT_SECONDS = 0.01
SETTLE_SECONDS = 1.0


# ── start ─────────────────────────────────────────────────────────────────────────────────────────────


async def start(bench: Bench) -> list[Figure]:
    """Start servers and count the CPU time until they are ready; one before them compiles what is not in the cache."""
    engine, api, wall = [], [], []
    for number in range(bench.sizes.num_starts + 1):
        began = time.perf_counter()
        with running_server(bench.root / f"start-{number}", bench.num_threads, "lorimer/tiny") as server:
            if number > 0:
                wall.append(time.perf_counter() - began)
                engine.append(server.engine_cpu_seconds())
                api.append(server.cpu_seconds())
    longest = f"slowest {max(engine):.2f} s (n={len(engine)})"
    details = f"{longest}; API process {median(api):.2f} s, ready after {median(wall):.1f} s"
    text = "Start, `lorimer/tiny`, from import to ready: CPU time of the engine's processes, median"
    return [Figure(text=text, value=median(engine), unit="s", details=details, aim="engine start")]


# ── latency ───────────────────────────────────────────────────────────────────────────────────────────


async def latency(bench: Bench) -> list[Figure]:
    """Time a tiny forward through an idle server and through an engine process directly, alternating."""
    config = EngineConfig(model=MODEL, dtype="float32", num_threads=bench.num_threads)
    with EngineProcess(config) as engine:
        async with bench.server("latency") as (server, pool):
            await asyncio.wrap_future(engine.ready)
            lora = LoraConfig(rank=RANK, seed=SEED)
            await asyncio.wrap_future(engine.submit(CreateRun(request_id="create", model_id="run", lora=lora)))
            run = await (await Session.create(pool)).create_run()
            for number in range(bench.sizes.num_calls // 10 + 1):
                await run.forward()
                await direct_forward(engine, f"warm {number}")
            served, direct, bare = [], [], []
            worked = server.cpu_seconds()
            for number in range(bench.sizes.num_calls):
                served.append(await timed(run.forward()))
                direct.append(await timed(direct_forward(engine, str(number))))
                bare.append(await timed(pool.get("/api/v1/healthz")))
            worked = (server.cpu_seconds() - worked) / len(served)
            published = []
            for _ in range(bench.sizes.num_calls // 10 + 1):
                await run.train_and_step()
                published.append(await timed(publish(run)))
    details = (
        f"served {spread(served)}; engine alone {spread(direct)}; an empty HTTP request {spread(bare)}; "
        f"the API process computes {1000 * worked:.1f} ms for the three requests"
    )
    at_median = 1000 * (median(served) - median(direct))
    at_p99 = 1000 * (percentile(served, 99) - percentile(direct, 99))
    name = "Idle server, tiny `forward`, submit to result: added to the engine's own time"
    return [
        Figure(text=f"{name}, median", value=at_median, unit="ms", details=details, aim="added latency"),
        Figure(text=f"{name}, p99", value=at_p99, unit="ms", aim="added latency p99"),
        Figure(
            text="Idle server, new weights published for sampling, submit to result: median",
            value=1000 * median(published),
            unit="ms",
            details=spread(published),
            aim="publish",
        ),
    ]


async def publish(run: Run) -> None:
    await wait(run.pool, await run.publish())


async def direct_forward(engine: EngineProcess, request_id: str) -> None:
    operation = ForwardBackward(
        request_id=request_id, model_id="run", data=[ENGINE_DATUM], loss_fn="cross_entropy", forward_only=True
    )
    await asyncio.wrap_future(engine.train(TrainBatch(operations=[operation]))[0])


# ── samples ───────────────────────────────────────────────────────────────────────────────────────────


async def samples(bench: Bench) -> list[Figure]:
    """Submit many concurrent samples: with one poll each, then with a single poll of the sampling session."""
    figures: list[Figure] = []
    async with bench.server("samples") as (server, pool):
        num_samples = allow_files(bench.sizes.num_samples)
        num_tokens = bench.sizes.sample_tokens
        session = await Session.create(pool)
        warm = await session.create_sampler(0)
        await wait(pool, await warm.submit(num_tokens))
        ways: dict[str, Callable[[Sampler, int, int], Awaitable[list[float]]]] = {
            "a long poll each": poll_each,
            "one session poller": poll_session,
        }
        for number, (name, sample) in enumerate(ways.items(), start=1):
            before = server.weigh()
            sampler = await session.create_sampler(number)
            start = time.perf_counter()
            seconds = await sample(sampler, num_samples, num_tokens)
            wall = time.perf_counter() - start
            figures += sample_figures(name, num_samples, seconds, wall, grown(before, server.weigh()))
            bench.progress(f"samples: {name} {wall:.1f} s")
    return figures


async def poll_each(sampler: Sampler, num_samples: int, num_tokens: int) -> list[float]:
    async def one() -> None:
        await wait(sampler.pool, await sampler.submit(num_tokens))

    return await asyncio.gather(*(timed(one()) for _ in range(num_samples)))


async def poll_session(sampler: Sampler, num_samples: int, num_tokens: int) -> list[float]:
    """Submit while a single loop polls, fetches finished samples and acknowledges them."""
    began: dict[str, float] = {}
    done: dict[str, float] = {}

    async def submit() -> None:
        start = time.perf_counter()
        began[await sampler.submit(num_tokens)] = start

    async def fetch(request_id: str) -> None:
        await wait(sampler.pool, request_id)
        done[request_id] = time.perf_counter()

    submits = asyncio.gather(*(submit() for _ in range(num_samples)))
    cursor, fetched = 0, list[str]()
    while len(done) < num_samples:
        found, cursor = await sampler.finished(cursor, fetched)
        fetched = [request_id for request_id in found if request_id not in done]
        await asyncio.gather(*map(fetch, fetched))
    await submits
    return [done[request_id] - start for request_id, start in began.items()]


def sample_figures(name: str, num_samples: int, seconds: list[float], wall: float, growth: str) -> list[Figure]:
    text = f"{num_samples} concurrent samples, {name}"
    slowest = max(seconds) / median(seconds)
    details = f"{wall:.1f} s in all, {num_samples / wall:.0f} samples/s, {spread(seconds)}; {growth}"
    return [
        Figure(text=f"{text}: lost", value=num_samples - len(seconds), details=details, aim="lost"),
        Figure(text=f"{text}: slowest over median", value=slowest, aim="sample fairness"),
    ]


def grown(before: Weight, after: Weight) -> str:
    return (
        f"API process {before.api / MIB:.0f} to {after.api / MIB:.0f} MiB, "
        f"engine {before.engine / MIB:.0f} to {after.engine / MIB:.0f} MiB"
    )


# ── training clients ──────────────────────────────────────────────────────────────────────────────────


async def clients(bench: Bench) -> list[Figure]:
    """Train many clients concurrently, each with its own run. Equal data and seeds must give equal losses.

    Once with all runs loaded, once with the default limit, beyond which runs are evicted in turn.
    """
    sizes = bench.sizes
    figures: list[Figure] = []
    loads: dict[str, dict[str, Any]] = {"all in memory": {"max_loaded_runs": sizes.num_clients}, "as configured": {}}
    for name, settings in loads.items():
        async with bench.server(f"clients-{len(figures)}", **settings) as (server, pool):
            allow_files(2 * sizes.num_clients)
            runs = await asyncio.gather(*(new_client(pool) for _ in range(sizes.num_clients)))
            start = time.perf_counter()
            found = await asyncio.gather(*(train(run, sizes.num_steps) for run in runs))
            wall = time.perf_counter() - start
            weight = server.weigh()
        seconds = [duration for duration, _, _ in found]
        expected = sorted(losses[-1] for _, losses, _ in found)[len(found) // 2]
        good = [losses for _, losses, _ in found if abs(losses[-1] - expected) < SAME_LOSS < losses[0] - losses[-1]]
        steps = [each for _, _, durations in found for each in durations]
        details = (
            f"{wall:.1f} s in all, {2 * len(steps) / wall:.0f} operations/s; a step of two operations {spread(steps)}; "
            f"API process {weight.api / MIB:.0f} MiB, engine {weight.engine / MIB:.0f} MiB"
        )
        text = f"{sizes.num_clients} concurrent clients of {sizes.num_steps} steps, {name}"
        ratio = max(seconds) / min(seconds)
        figures += [
            Figure(text=f"{text}: lost", value=sizes.num_clients - len(good), details=details, aim="lost"),
            Figure(text=f"{text}: slowest over fastest client", value=ratio, aim="client fairness"),
            Figure(
                text=f"{text}: operations a second",
                value=2 * len(steps) / wall,
                aim="client throughput" if name == "all in memory" else "",
            ),
        ]
        bench.progress(f"clients: {name} {wall:.1f} s")
    return figures


async def new_client(pool: HttpPool) -> Run:
    return await (await Session.create(pool)).create_run()


async def train(run: Run, num_steps: int) -> tuple[float, list[float], list[float]]:
    """Return the total seconds, the losses and the seconds of each step."""
    start, losses, seconds = time.perf_counter(), [], []
    for _ in range(num_steps):
        began = time.perf_counter()
        losses.append(await run.train_and_step())
        seconds.append(time.perf_counter() - began)
    return time.perf_counter() - start, losses, seconds


# ── waiting futures ───────────────────────────────────────────────────────────────────────────────────


async def waiting(bench: Bench) -> list[Figure]:
    """Hold a poll for each of many operations whose predecessor is missing; time requests of other clients."""
    async with bench.server("waiting", gap_seconds=3600) as (server, pool):
        count = allow_files(bench.sizes.num_waiting)
        session = await Session.create(pool)
        runs = [await session.create_run(number) for number in range(-(-count // POLLERS_PER_RUN))]
        submits, request_ids = await submit_waiting(runs, count)
        async with pollers(server.host, server.port, request_ids) as waiters:
            await until_held(pool, count)
            bench.progress(f"waiting: {count} polls are held")
            weight = server.weigh()
            await asyncio.sleep(SETTLE_SECONDS)
            other = await session.create_run(len(runs))
            beats, others = await asyncio.gather(
                repeat(session.heartbeat, bench.sizes.num_heartbeats),
                repeat(partial(other.train, forward_only=True), bench.sizes.num_heartbeats // 4),
            )
            start = time.perf_counter()
            await asyncio.gather(*(run.train(forward_only=True, number=1) for run in runs))
            output, _ = await waiters.communicate()
            release = time.perf_counter() - start
    text = f"{count} waiting futures, each polled"
    details = (
        f"submitting them {spread(submits)}; API process {weight.api / MIB:.0f} MiB; "
        f"once released all results within {release:.1f} s"
    )
    return [
        Figure(text=f"{text}: lost", value=count - int(output or 0), details=details, aim="lost"),
        Figure(
            text=f"{text}: heartbeat p99",
            value=1000 * percentile(beats, 99),
            unit="ms",
            details=spread(beats),
            aim="heartbeat",
        ),
        Figure(
            text=f"{text}: submit p99",
            value=1000 * percentile(others, 99),
            unit="ms",
            details=spread(others),
            aim="submit",
        ),
    ]


async def submit_waiting(runs: list[Run], count: int) -> tuple[list[float], list[str]]:
    """Submit all but the first operation of each run, a few at a time. Return the time of each and the ids."""
    seconds: list[float] = []
    request_ids: list[str] = []

    async def submit(run: Run, numbers: range) -> None:
        for number in numbers:
            start = time.perf_counter()
            request_ids.append(await run.train(forward_only=True, number=number))
            seconds.append(time.perf_counter() - start)

    shares = [len(range(index, count, len(runs))) for index in range(len(runs))]
    await asyncio.gather(
        *(
            submit(run, range(FIRST_NUMBER + part, FIRST_NUMBER + share, 4))
            for run, share in zip(runs, shares, strict=True)
            for part in range(4)
        )
    )
    return seconds, request_ids


async def until_held(pool: HttpPool, count: int) -> None:
    """Wait until the server reports this many open requests, besides this one."""
    while True:
        lines = (await pool.get("/metrics")).body.decode().splitlines()
        held = next(float(line.split()[1]) for line in lines if line.startswith("lorimer_http_requests_in_flight "))
        if held > count:
            return
        await asyncio.sleep(0.2)


async def repeat(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Time sequential calls with a pause between them."""
    seconds = []
    for _ in range(count):
        seconds.append(await timed(call()))
        await asyncio.sleep(HEARTBEAT_SECONDS)
    return seconds


# ── growth ────────────────────────────────────────────────────────────────────────────────────────────


async def growth(bench: Bench) -> list[Figure]:
    """Train and sample for a long time, with short retention; sample memory and disk usage."""
    sizes = bench.sizes
    settings: dict[str, Any] = {
        "result_seconds_after_fetch": 1,
        "history_seconds": 5,
        "sweep_seconds": 0.5,
        "snapshot_seconds": 1,
        "recent_result_bytes": 65536,
        # The prefix cache grows up to the memory limit; a small limit is reached soon.
        "memory_bytes": 8 * MIB,
    }
    async with bench.server("growth", **settings) as (server, pool):
        session = await Session.create(pool)
        runs = [await session.create_run(number) for number in range(sizes.long_clients)]
        sampler = await session.create_sampler()
        weights, start = [server.weigh()], time.perf_counter()
        for number in range(sizes.num_weighings):
            steps = sizes.long_steps // sizes.num_weighings // sizes.long_clients
            await asyncio.gather(*(train_and_sample(run, sampler, steps) for run in runs))
            weights.append(server.weigh())
            latest = weights[-1]
            sizes_text = f"{latest.api / MIB:.1f} / {latest.engine / MIB:.1f} / {latest.disk / MIB:.2f} MiB"
            bench.progress(f"growth: {number + 1} of {sizes.num_weighings}: API / engine / disk {sizes_text}")
        num_steps = steps * sizes.long_clients * sizes.num_weighings
        rate = num_steps / (time.perf_counter() - start)
    return [
        growth_figure(f"{num_steps} steps, {what}", [getattr(weight, key) for weight in weights], rate)
        for what, key in {"API process": "api", "engine": "engine", "data directory": "disk"}.items()
    ]


async def train_and_sample(run: Run, sampler: Sampler, num_steps: int) -> None:
    for _ in range(num_steps):
        await run.train_and_step()
        await wait(run.pool, await sampler.submit(2))


def growth_figure(text: str, sizes: list[int], rate: float) -> Figure:
    """Return the last quarter over the second; the first quarter fills caches."""
    quarter = max(1, len(sizes) // 4)
    early, late = sizes[quarter : 2 * quarter], sizes[-quarter:]
    shown = ", ".join(f"{size / MIB:.1f}" for size in sizes[::quarter])
    details = f"{shown} MiB over time; {rate:.0f} steps/s with a sample each"
    ratio = median(late) / median(early)
    return Figure(text=f"{text}: last quarter over second", value=ratio, details=details, aim="growth")


ROWS: dict[str, Callable[[Bench], Coroutine[Any, Any, list[Figure]]]] = {
    "start": start,
    "latency": latency,
    "samples": samples,
    "clients": clients,
    "waiting": waiting,
    "hostile": hostile,
    "growth": growth,
    "scaling": scaling,
    "sdk": sdk,
    "sweep": sweep,
    "samplers": samplers,
}
