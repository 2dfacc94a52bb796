"""``lorimer worker``: an owner process, which computes replicas of base models and serves no HTTP but its metrics."""

import asyncio
import gc
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack

from lorimer.scheduler import spans
from lorimer.scheduler.doors import Door, door_token
from lorimer.scheduler.leases import LeaseConfig, Leases
from lorimer.scheduler.owner import Owner
from lorimer.scheduler.results import FinishedSamples, Results
from lorimer.scheduler.stats import SchedulerStats, combine, take_stats
from lorimer.scheduler.usage_buffer import UsageBuffer
from lorimer.server.health import serve_worker
from lorimer.server.prometheus import Metrics
from lorimer.server.roles import node_name, open_store, secret_of, shares_directory
from lorimer.server.serve import install_signal_handlers, run_on_loop
from lorimer.server.settings import Settings
from lorimer.server.system import Sampler
from lorimer.server.upkeep import Periodic
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.objects import open_objects
from lorimer.store.scratch import Scratch

logger = logging.getLogger(__name__)

FENCED = 75
"""The exit code of a worker that lost its lease; it can be started again."""

Announce = Callable[[str], None]
"""Called with the id of the owner once it has a lease."""


def run_worker(settings: Settings, announce: Announce) -> None:
    """Run `work` until it ends."""
    run_on_loop(work(settings, announce))


async def work(settings: Settings, announce: Announce) -> None:
    """Compute replicas until SIGINT or SIGTERM, then finish what runs and leave the replicas to others."""
    stop = asyncio.Event()
    install_signal_handlers(stop)
    async with AsyncExitStack() as stack:
        spans.start(settings.otlp_endpoint)
        stack.callback(spans.stop)
        directory = DataDirectory(settings.data)
        directory.lock(is_shared=shares_directory(settings))
        stack.callback(directory.unlock)
        scratch = Scratch(await open_objects(settings.objects, directory), directory, max_bytes=settings.scratch_bytes)
        stack.callback(scratch.remover.close)
        store = await asyncio.to_thread(open_store, settings, directory, scratch)
        stack.callback(store.close)
        results = Results(FinishedSamples(store), 0)
        usage = UsageBuffer(store)
        scratch.reads = lambda: {one.reads for one in results.open.values() if one.reads is not None}
        scratch.adopt()
        owner = Owner(store, scratch, settings.scheduler_limits(), results, usage)
        door = Door(owner.drivers, door_token(secret_of(settings, directory)))
        address = await door.start(settings.worker_host, settings.worker_port)
        stack.push_async_callback(door.stop)
        config = LeaseConfig(
            node=node_name(settings),
            door=address,
            lease_seconds=settings.lease_seconds,
            max_replicas=settings.worker_replicas,
            claims=settings.worker_claims,
            sweep_seconds=settings.sweep_seconds,
        )
        leases = Leases(owner, settings.engine_configs(), settings.num_replicas(), config, end_fenced)
        if settings.worker_metrics_port:
            metrics = Metrics(lambda: stats_of(owner))
            health = await serve_worker(settings.worker_host, settings.worker_metrics_port, metrics)
            stack.callback(health.close)
        await leases.start()
        sampler = Periodic(
            settings.system_sample_seconds, make_sampler(settings, store, directory, owner).sample, "system samples"
        )
        sampler.start()
        stack.push_async_callback(sampler.stop)
        gc.freeze()  # objects created at startup are permanent: exempt them from garbage collection
        announce(leases.owner_id)
        await stop.wait()
        logger.info("shutting down: the running batch is finished, other workers take the replicas")
        await leases.close(settings.shutdown_seconds)
        await usage.flush()


def make_sampler(settings: Settings, store: Store, directory: DataDirectory, owner: Owner) -> Sampler:
    """Return the sampler of a worker with its engines and queues."""
    return Sampler(
        store,
        f"{node_name(settings)} worker {owner.owner_id[:8]}",
        directory.path,
        lambda: [driver.status() for driver in owner.drivers.values()],
        lambda: stats_of(owner).requests_by_kind,
    )


def stats_of(owner: Owner) -> SchedulerStats:
    """Return the statistics of the replicas of this process, by base model."""
    drivers = list(owner.drivers.values())
    names = sorted({driver.name for driver in drivers})
    served = [combine([driver.status() for driver in drivers if driver.name == name], lambda _: True) for name in names]
    return take_stats(owner.results.open.values(), [driver.core for driver in drivers], served)


def end_fenced(reason: str) -> None:
    """End this process without writing anything: another one computes its replicas. Its engines end with it."""
    logger.error("this worker ends: %s", reason)
    logging.shutdown()
    os._exit(FENCED)
