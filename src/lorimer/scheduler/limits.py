"""Limits of the scheduler: how much it accepts, how long it keeps it, and how often it takes snapshots."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    max_open_operations: int = 4096
    """Maximum number of accepted, unfinished operations per run."""
    max_open_bytes: int = 1 << 30
    """Maximum bytes of unfinished operations' payloads per base model; they are held in memory."""
    max_loaded_runs: int = 64
    """Maximum number of runs in the memory of one engine; idle ones are evicted after a snapshot."""
    residence_seconds: float = 30.0
    """A busy run loaded for this long may be evicted if others wait; sooner if that is cheap."""
    max_loaded_samplers: int = 64
    max_queued_samples: int = 20_000
    """Maximum number of queued samples per base model; more are answered with 429."""
    max_running_samples: int = 384
    """Maximum number of sequences an engine decodes concurrently; the rest wait here, where users take turns."""
    max_stored_bytes: int = 0
    """Default storage quota for the checkpoints of a user; 0 means no limit."""
    max_losses_per_session: int = 64
    max_runs_per_session: int = 4096
    turn_tokens: int = 0
    """Maximum training tokens per turn of an engine; 0 means twice what it packs into one pass."""
    gap_seconds: float = 60.0
    """How long operations wait for a lower seq_id that has not arrived."""
    snapshot_seconds: float = 10.0
    """A run gets a snapshot after this much engine time, which bounds the time of a replay."""
    stall_seconds: float = 1800.0
    """An engine with work that is silent for this long counts as hung and is replaced."""
    max_engine_deaths: int = 5
    """A request fails after this many engine deaths while it ran; so does a sample after this many engine errors."""
    result_seconds_after_fetch: float = 600.0
    result_seconds: float = 86_400.0
    """How long results are kept after they were fetched, and if they are never fetched."""
    history_seconds: float = 7 * 86_400.0
    """How long the row of a finished request is kept."""
    ephemeral_samplers_per_run: int = 8
    """The number of newest unnamed samplers per run that are kept longer than others."""
    ephemeral_seconds: float = 86_400.0
    """How long those are kept after their last use."""
    sampler_idle_seconds: float = 3600.0
    """How long other unnamed samplers, and weights of deleted checkpoints, are kept after their last use."""
    run_seconds: float = 30 * 86_400.0
    """How long a run can be resumed after its last use. Its checkpoints stay."""
    recent_result_bytes: int = 64 << 20
    """Maximum bytes of finished results cached in memory."""
