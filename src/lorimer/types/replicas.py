"""The replicas of base models, who computes them, and how runs move between them."""

from datetime import datetime

from lorimer.types.base import Response
from lorimer.types.overview import TokensPerSecond


class ReplicaEntry(Response):
    """One replica of a base model. Its numbers are totals of all users."""

    name: str
    """The base model and a number, such as ``Qwen/Qwen3-8B#0``."""
    base_model: str
    state: str
    """idle, starting, ready or failed; lost if no process computes it."""
    stage: str = ""
    """What a starting engine is doing."""
    error: str | None = None
    """Why the last engine ended or failed to start."""
    owner_id: str | None = None
    """The beginning of the id of the process that computes it, which is new at each start; none if it is lost."""
    node: str | None = None
    """The machine of that process."""
    changed_at: datetime
    """When it got this owner, or lost one."""
    lease_seconds: float | None = None
    """Until the lease of its owner runs out; none if it is lost, or if the server computes it itself."""
    num_loaded_runs: int
    num_waiting_samples: int
    num_running_samples: int
    num_open_operations: int
    tokens_per_second: TokensPerSecond
    engine_bytes: int | None = None
    """The resident memory of the engine's process; none if it runs elsewhere, or the system does not report it."""
    num_deaths: int
    """How often its engine ended unexpectedly since its owner started."""


class RunMove(Response):
    """A run of the caller that was placed on another replica than before."""

    at: datetime
    run_id: str
    from_replica: str
    to_replica: str


class ReplicasResponse(Response):
    replicas: list[ReplicaEntry]
    moves: list[RunMove]
    """Of the caller's own runs in the last 24 hours, newest first."""
