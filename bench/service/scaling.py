"""The row ``scaling``: API replicas and owners over a PostgreSQL server, with engines that wait instead of computing.

Measures operations per second and the processor time of each kind of process for several numbers of them, what an
operation costs with 100 and with 10,000 runs in the database, and what it writes: transactions, rows, bytes, objects.
"""

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from functools import partial

import msgspec
import psutil

from bench.service.client import Run, Sampler, Session, datum, wait
from bench.service.figures import Figure, percentile
from bench.service.http import HttpPool
from bench.service.server import MODEL
from bench.service.setting import Bench
from bench.service_times import ServiceTimes, fit
from bench.simulated_engine import TIMES
from lorimer import types
from lorimer.engine.launch import PROGRAM
from lorimer.types.encoding import encode_training_request
from tests.cluster.installation import Installation, Member, missing_programs
from tests.store.buckets import BUCKET, FaultProxy, moto, variables

NUM_OWNERS = NUM_APIS = (1, 2, 4)
REPLICAS_PER_OWNER = 2
NUM_RUNS = (100, 10_000)
OPERATIONS_PER_RUN = 10
NUM_DATUMS, DATUM_TOKENS = 64, 1024
"""A training operation of the size that the arithmetic of a large installation assumes."""
SETTLE_SECONDS = 2.0
"""PostgreSQL publishes its statistics about once a second."""

COUNTS = (
    "SELECT xact_commit, tup_returned + tup_fetched, tup_inserted + tup_updated + tup_deleted,"
    " CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text) AS bigint),"
    " CAST(pg_current_wal_insert_lsn() - '0/0' AS bigint)"
    " FROM pg_stat_database WHERE datname = current_database()"
)
FILL = """
INSERT INTO sessions SELECT (jsonb_populate_record(s, jsonb_build_object('session_id', 'fill' || n))).*
  FROM sessions s, generate_series({first}, {last}) n WHERE s.session_id = (SELECT min(session_id) FROM sessions);
INSERT INTO runs SELECT (jsonb_populate_record(r, jsonb_build_object(
    'session_id', 'fill' || n, 'model_id', 'fill' || n || ':train:0', 'model_seq_id', 0, 'replica', NULL))).*
  FROM runs r, generate_series({first}, {last}) n WHERE r.model_id = (SELECT min(model_id) FROM runs);
INSERT INTO futures SELECT (jsonb_populate_record(f, jsonb_build_object(
    'request_id', 'fill' || n || ':' || k, 'session_id', 'fill' || n, 'lane', 'fill' || n || ':train:0', 'seq_id', k,
    'holds_bytes', false))).*
  FROM futures f, generate_series({first}, {last}) n, generate_series(1, {operations}) k
  WHERE f.request_id = (SELECT min(request_id) FROM futures WHERE state = 'done');
ANALYZE;
"""


@dataclass(frozen=True)
class Counts:
    """What was counted so far, or between two moments."""

    api: float
    """Processor seconds."""
    owner: float
    database: float
    client: float
    transactions: int
    rows_read: int
    rows_written: int
    writes: int
    """Transactions that wrote something."""
    log_bytes: int
    """Of PostgreSQL's write-ahead log."""

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(Counts)))


@dataclass(frozen=True)
class Measured:
    seconds: float
    latencies: list[float]
    """Of one call each, which is ``num_operations`` operations."""
    num_operations: int
    spent: Counts

    @property
    def operations(self) -> int:
        return len(self.latencies) * self.num_operations

    @property
    def throughput(self) -> float:
        return self.operations / self.seconds

    def each(self, name: str) -> float:
        return float(getattr(self.spent, name)) / self.operations

    def together(self, other: "Measured | None") -> "Measured":
        """Return both measurements as one."""
        if other is None:
            return self
        spent = Counts(*(getattr(self.spent, one.name) + getattr(other.spent, one.name) for one in fields(Counts)))
        return Measured(self.seconds + other.seconds, self.latencies + other.latencies, self.num_operations, spent)

    def details(self) -> str:
        used = ", ".join(f"{name} {1e3 * self.each(name):.2f}" for name in ("api", "owner", "database", "client"))
        return (
            f"p50 {1e3 * percentile(self.latencies, 50):.0f} ms, p99 {1e3 * percentile(self.latencies, 99):.0f} ms; "
            f"processor ms an operation: {used}; {self.each('writes'):.2f} write transactions, "
            f"{self.each('rows_written'):.1f} rows written, {self.each('rows_read'):.0f} read, "
            f"{self.each('log_bytes') / 1024:.1f} KiB of log"
        )


class Cluster:
    """An installation with waiting engines, and clients of it."""

    def __init__(
        self, bench: Bench, name: str, times: ServiceTimes, num_owners: int, num_apis: int, bucket: str = ""
    ) -> None:
        """``bucket``: the endpoint of an object store."""
        extra = {PROGRAM: "bench.simulated_engine", TIMES: msgspec.json.encode(times).decode()}
        extra |= {"PYTHONPATH": os.pathsep.join(["src", "."])} | (variables(bucket) if bucket else {})
        self.installation = Installation(
            bench.root / name,
            {MODEL: MODEL},
            num_apis=num_apis,
            num_workers=num_owners,
            num_replicas=REPLICAS_PER_OWNER,
            users=("bench",),
            objects=f"s3://{BUCKET}/bench" if bucket else "",
            extra=extra,
            lease_seconds=10.0,
        )

    def pools(self) -> list[HttpPool]:
        return [HttpPool("127.0.0.1", port, self.installation.keys["bench"]) for port in self.installation.ports]

    async def runs(self, count: int) -> list[Run]:
        """Create runs, each with a session of its own, spread over the API replicas."""
        pools = itertools.cycle(self.pools())
        return [await (await Session.create(next(pools))).create_run() for _ in range(count)]

    def counts(self) -> Counts:
        postgres = self.installation.postgres
        server = psutil.Process(int((postgres.data / "postmaster.pid").read_text().split()[0]))
        transactions, read, written, writes, log_bytes = postgres.execute(COUNTS)[0]
        return Counts(
            api=_cpu(self.installation.apis),
            owner=_cpu(self.installation.workers),
            database=sum(_cpu_of(one) for one in [server, *server.children()]),
            client=_cpu_of(psutil.Process()),
            transactions=transactions,
            rows_read=read,
            rows_written=written,
            writes=writes,
            log_bytes=log_bytes,
        )

    async def measure(
        self, calls: Sequence[Callable[[], Awaitable[object]]], seconds: float, num_operations: int
    ) -> Measured:
        """Repeat each call until the time is over; the calls run concurrently."""
        latencies: list[float] = []

        async def repeat(call: Callable[[], Awaitable[object]]) -> None:
            while time.perf_counter() < stop:
                began = time.perf_counter()
                await call()
                latencies.append(time.perf_counter() - began)

        await asyncio.sleep(SETTLE_SECONDS)
        before, start = self.counts(), time.perf_counter()
        stop = start + seconds
        await asyncio.gather(*(repeat(call) for call in calls))
        took = time.perf_counter() - start
        await asyncio.sleep(SETTLE_SECONDS)
        return Measured(took, latencies, num_operations, self.counts().since(before))


def _cpu(members: Sequence[Member]) -> float:
    """Return the processor time of processes, without engines."""
    found = 0.0
    for member in members:
        process = psutil.Process(member.pid)
        others = [child for child in process.children() if "bench.simulated_engine" not in child.cmdline()]
        found += sum(_cpu_of(one) for one in [process, *others])
    return found


def _cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def scaling(bench: Bench) -> list[Figure]:
    """Measure every number of owners and API replicas, then what an operation costs."""
    if missing := missing_programs():
        raise RuntimeError(missing)
    bench.progress("scaling: fitting service times")
    times = fit(bench.num_threads, MODEL)
    figures = []
    numbers = list(itertools.product(NUM_OWNERS, NUM_APIS))[: bench.sizes.num_clusters]
    for num_owners, num_apis in numbers:
        cluster = Cluster(bench, f"scaling-{num_owners}-{num_apis}", times, num_owners, num_apis)
        with cluster.installation:
            runs = await cluster.runs(bench.sizes.cluster_clients)
            found = await cluster.measure([run.train_and_step for run in runs], bench.sizes.cluster_seconds, 2)
        text = f"{num_owners} owners, {num_apis} API replicas: training operations"
        figures.append(Figure(text=text, value=found.throughput, unit="/s", details=found.details()))
        bench.progress(f"scaling: {text} {found.throughput:.0f}/s; {found.details()}")
    return [*figures, *await compare_databases(bench, times), *await count_objects(bench, times)]


async def compare_databases(bench: Bench, times: ServiceTimes) -> list[Figure]:
    """Compare what an operation costs with few and with many runs in the database, in turns; measure samples too."""
    found: dict[int, Measured] = {}
    with ExitStack() as ending:
        clusters = {count: Cluster(bench, f"scaling-{count}-runs", times, 1, 1) for count in NUM_RUNS}
        calls = {}
        for count, cluster in clusters.items():
            ending.enter_context(cluster.installation)
            runs = await cluster.runs(bench.sizes.cluster_clients)
            await asyncio.gather(*(run.train_and_step() for run in runs))
            statements = FILL.format(first=len(runs), last=count - 1, operations=OPERATIONS_PER_RUN)
            await asyncio.to_thread(cluster.installation.postgres.execute, statements)
            calls[count] = [run.train_and_step for run in runs]
        for _, (count, cluster) in itertools.product(range(bench.sizes.cluster_rounds), clusters.items()):
            measured = await cluster.measure(calls[count], bench.sizes.cluster_seconds, 2)
            found[count] = measured.together(found.get(count))
            bench.progress(f"scaling: {count} runs {measured.throughput:.0f}/s; {measured.details()}")
        sampled = await measure_samples(bench, cluster)
    few, many = found.values()
    ratio = f"with {NUM_RUNS[1]:,} runs in the database, over that with {NUM_RUNS[0]}"
    details = f"{NUM_RUNS[0]} runs: {few.details()}; {NUM_RUNS[1]:,} runs: {many.details()}"
    used = [sum(one.each(name) for name in ("api", "owner", "database")) for one in (few, many)]
    return [
        Figure(
            text=f"Processor time of an operation {ratio}", value=used[1] / used[0], details=details, aim="operation"
        ),
        Figure(
            text=f"Rows read for an operation {ratio}",
            value=many.each("rows_read") / few.each("rows_read"),
            aim="operation",
        ),
        Figure(
            text=f"1 owner, 1 API replica: samples of {bench.sizes.sample_tokens} tokens",
            value=sampled.throughput,
            unit="/s",
            details=sampled.details(),
        ),
    ]


async def measure_samples(bench: Bench, cluster: Cluster) -> Measured:
    pools = itertools.cycle(cluster.pools())
    samplers = [await (await Session.create(next(pools))).create_sampler() for _ in range(bench.sizes.cluster_clients)]

    async def sample(sampler: Sampler) -> None:
        await wait(sampler.pool, await sampler.submit(bench.sizes.sample_tokens))

    return await cluster.measure([partial(sample, one) for one in samplers], bench.sizes.cluster_seconds, 1)


async def count_objects(bench: Bench, times: ServiceTimes) -> list[Figure]:
    """Count the requests to an object store for steps with large payloads, each followed by a new sampler."""
    folder = bench.root / "bucket"
    folder.mkdir()
    data = [datum(DATUM_TOKENS)] * NUM_DATUMS
    num_steps = bench.sizes.object_steps
    with moto(folder) as url, closing(FaultProxy(url)) as proxy:
        cluster = Cluster(bench, "scaling-objects", times, 1, 1, proxy.url)
        with cluster.installation:
            [run] = await cluster.runs(1)

            async def step() -> None:
                for request_id in (await run.train(data=data), await run.step(), await run.publish()):
                    await wait(run.pool, request_id)

            await step()
            proxy.seen.clear()
            for _ in range(num_steps):
                await step()
            methods = Counter(request.split()[0] for request in proxy.seen)
    tokens = NUM_DATUMS * DATUM_TOKENS
    request = types.TrainingRequest(run.model_id, 1, data, "cross_entropy", {}, False)
    text = (
        f"Requests to the object store for a step of {NUM_DATUMS} datums of {DATUM_TOKENS:,} tokens and a new sampler"
    )
    used = ", ".join(f"{count / num_steps:.1f} {method}" for method, count in sorted(methods.items()))
    size = len(encode_training_request(request)) / tokens
    details = f"{used}; the payload has {size:.1f} bytes a token"
    return [Figure(text=text, value=methods.total() / num_steps, details=details)]
