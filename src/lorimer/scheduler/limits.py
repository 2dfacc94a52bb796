"""How much the scheduler takes on, and how often it secures what it has."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    max_open_operations: int = 4096
    """Of one run, accepted and not finished."""
    max_open_bytes: int = 1 << 30
    """Of one base model, payloads of operations that are not finished; they are held in memory."""
    max_loaded_runs: int = 64
    """In the memory of one engine; idle ones make room, by a snapshot."""
    residence_seconds: float = 30.0
    """A busy run that has been in memory so long makes room too, when others wait; sooner where that costs little."""
    max_loaded_samplers: int = 64
    max_queued_samples: int = 20_000
    """Of one base model; more are answered with 429."""
    max_running_samples: int = 384
    """Sequences handed to an engine concurrently; the rest wait here, where users take turns."""
    max_stored_bytes: int = 0
    """Of a user's checkpoints, where they have no quota of their own; 0 is no limit."""
    max_losses_per_session: int = 64
    max_runs_per_session: int = 4096
    turn_tokens: int = 0
    """Most training tokens handed to an engine in one turn; 0 takes twice what it packs into one pass."""
    gap_seconds: float = 60.0
    """How long operations wait for a number before theirs that has not arrived."""
    snapshot_seconds: float = 10.0
    """Engine time of a run after which it gets a snapshot: about what a replay may take."""
    stall_seconds: float = 1800.0
    """An engine with work that has said nothing for so long is taken for hung, and replaced."""
    max_engine_deaths: int = 5
    """A request that was being computed at so many deaths of an engine is given up; so is a sample that failed so often
    by an error of the engine's own."""
    result_seconds_after_fetch: float = 600.0
    result_seconds: float = 86_400.0
    """How long results are kept once fetched, and if never fetched."""
    history_seconds: float = 7 * 86_400.0
    """How long the record of a finished request is kept."""
    ephemeral_samplers_per_run: int = 8
    """The newest unnamed samplers of a run, which are kept longer than others."""
    ephemeral_seconds: float = 86_400.0
    """How long those are kept after their last use."""
    sampler_idle_seconds: float = 3600.0
    """Unnamed samplers beyond those, and weights of deleted checkpoints, are kept so long after their last use."""
    run_seconds: float = 30 * 86_400.0
    """How long a run can be taken up again after its last use. Its checkpoints stay."""
    recent_result_bytes: int = 64 << 20
    """Finished results held in memory besides the database."""
