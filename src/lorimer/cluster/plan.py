"""Computes from the settings which workers an installation needs, and what Ray reserves for each.

A worker owns ``worker_replicas`` replicas of one base model, by default one. Ranks and vLLM servers are processes of
their worker's node, so one reservation, which is always on one node, covers them. Does not import Ray.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lorimer.engine.config import EngineConfig
from lorimer.errors import InvalidInput
from lorimer.scheduler.placement import is_sampler, replica_configs
from lorimer.server.setting_sources import plain
from lorimer.server.settings import Settings, redacted_url

GIB = 2**30


@dataclass(frozen=True)
class Resources:
    """What Ray reserves on one node."""

    num_gpus: int
    num_cpus: int
    memory_bytes: int

    def __add__(self, other: "Resources") -> "Resources":
        return Resources(
            num_gpus=self.num_gpus + other.num_gpus,
            num_cpus=self.num_cpus + other.num_cpus,
            memory_bytes=self.memory_bytes + other.memory_bytes,
        )

    def fits(self, node: "Resources") -> bool:
        """Return whether a node that has nothing else to do has room for this."""
        return (
            self.num_gpus <= node.num_gpus and self.num_cpus <= node.num_cpus and self.memory_bytes <= node.memory_bytes
        )

    def __str__(self) -> str:
        parts = [f"{self.num_gpus} GPU", f"{self.num_cpus} CPU", f"{self.memory_bytes / GIB:.1f} GiB"]
        return ", ".join(part for part in parts if not part.startswith(("0 ", "0.0 "))) or "nothing"


@dataclass(frozen=True)
class Worker:
    """One ``lorimer worker``."""

    name: str
    """That of its first replica, and a digest of the settings: with other settings it is another worker."""
    replicas: tuple[str, ...]
    """It claims these and no others."""
    resources: Resources
    flags: tuple[str, ...]
    """Of its command line, besides those that only its node knows."""


def plan_workers(settings: Settings, config: str, *, has_gpus: bool) -> list[Worker]:
    """Return the workers that own all replicas, the largest first.

    ``config`` is the file that they read. With ``has_gpus`` the device ``auto`` is a GPU.
    """
    engines = replica_configs(settings.engine_configs(), settings.num_replicas())
    values = json.dumps([plain(settings), config], sort_keys=True, default=str)
    digest = hashlib.sha256(values.encode()).hexdigest()[:8]
    size = settings.worker_replicas or 1
    workers: list[Worker] = []
    for _, group in itertools.groupby(engines, lambda place: (engines[place][0], is_sampler(place))):
        places = list(group)
        for start in range(0, len(places), size):
            chosen = tuple(places[start : start + size])
            parts = [_resources(*engines[place], has_gpus) for place in chosen]
            resources = sum(parts[1:], parts[0])
            flags = _flags(settings, config, chosen, len(workers))
            workers.append(Worker(f"{chosen[0]}@{digest}", chosen, resources, flags))
    return sorted(workers, key=lambda worker: (-worker.resources.num_gpus, -worker.resources.num_cpus))


def _resources(base_model: str, config: EngineConfig, has_gpus: bool) -> Resources:
    """Return what one replica needs. Threads and memory are those of each of its devices."""
    if config.device == "mps":
        raise InvalidInput(f"device of {base_model!r} is 'mps'; with cluster 'ray' auto, cpu and cuda are accepted")
    if config.device == "cuda" or (config.device == "auto" and has_gpus):
        num_cpus = config.num_devices * max(1, config.num_threads)
        return Resources(num_gpus=config.num_devices, num_cpus=num_cpus, memory_bytes=0)
    if not config.num_threads:
        raise InvalidInput(
            f"num_threads of {base_model!r} is 0, which takes all cores; with cluster 'ray' an engine on the CPU needs"
            " the number of cores that Ray reserves for it: at least 1 is accepted"
        )
    return Resources(
        num_gpus=0,
        num_cpus=config.num_devices * config.num_threads,
        memory_bytes=config.num_devices * config.memory_bytes,
    )


def _flags(settings: Settings, config: str, replicas: Sequence[str], number: int) -> tuple[str, ...]:
    values = {"worker_claims": ",".join(replicas), "worker_replicas": str(len(replicas))}
    # Several workers may be on one node, where each needs ports of its own.
    ports = {"worker_port": settings.worker_port, "worker_metrics_port": settings.worker_metrics_port}
    values |= {name: str(port + number) for name, port in ports.items() if port}
    if settings.objects:  # then a data directory holds copies, of one process
        values["data"] = str(settings.data / "workers" / re.sub(r"[^A-Za-z0-9._-]+", "-", replicas[0]))
    flags = [f"--set={name}={value}" for name, value in values.items()]
    return (*(["--config", config] if config else []), *flags)


def namespace_of(settings: Settings) -> str:
    """Return what names of actors begin with, so that several installations can share a Ray cluster."""
    return f"lorimer-{hashlib.sha256(redacted_url(settings.database).encode()).hexdigest()[:8]}"
