"""Limits of the scheduler: how much it accepts, how long it keeps it, and how often it takes snapshots."""

from dataclasses import dataclass
from typing import Annotated

from lorimer.types.settings import Setting


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    max_open_operations: Annotated[int, Setting("Most unfinished operations of one run.", 1)] = 4096
    max_open_bytes: Annotated[
        int,
        Setting("Most bytes of unfinished operations of one base model, held in memory; users share them.", 1 << 20),
    ] = 1 << 30
    max_loaded_runs: Annotated[
        int, Setting("Most runs in the memory of one engine; idle ones make room, by a snapshot.", 1)
    ] = 64
    max_full_runs: Annotated[
        int,
        Setting(
            "Most full runs of one base model in memory, each with an engine of its own; 0 refuses full fine-tuning.", 0
        ),
    ] = 2
    full_idle_seconds: Annotated[
        float, Setting("An engine of a full run ends after this long without work; its run is saved first.", 0)
    ] = 600.0
    residence_seconds: Annotated[
        float,
        Setting("Longest stay of a busy run in memory while another waits for room; less where moving is cheap.", 0),
    ] = 30.0
    max_loaded_samplers: Annotated[int, Setting("Most samplers in the memory of one engine.", 1)] = 64
    max_queued_samples: Annotated[
        int, Setting("Most unfinished sample requests of one base model; more are answered 429.", 1)
    ] = 20_000
    max_running_samples: Annotated[
        int, Setting("Most sequences an engine samples concurrently; a request of more than that runs alone.", 1)
    ] = 384
    max_stored_bytes: Annotated[
        int, Setting("Quota: most bytes of a user's checkpoints and rollouts, more are refused with 429; 0 is none.", 0)
    ] = 0
    max_losses_per_session: Annotated[int, Setting("Most custom losses of one session.", 1)] = 64
    max_runs_per_session: Annotated[int, Setting("Most training runs of one session.", 1)] = 4096
    turn_tokens: Annotated[
        int, Setting("Most training tokens of one turn of an engine; 0 takes twice what fits into one pass.", 0)
    ] = 0
    gap_seconds: Annotated[
        float, Setting("How long operations wait for a missing seq_id before theirs, until they fail.", 0)
    ] = 60.0
    snapshot_seconds: Annotated[
        float, Setting("Engine time of a run until its next snapshot: what a replay may take.", 0)
    ] = 10.0
    stall_seconds: Annotated[
        float, Setting("An engine with work that is silent for this long is taken for hung, and replaced.", 1)
    ] = 1800.0
    max_engine_deaths: Annotated[
        int,
        Setting(
            "A request under way at this many deaths of an engine, or a sample that failed so often, is given up.", 1
        ),
    ] = 5
    result_seconds_after_fetch: Annotated[float, Setting("A result that was fetched is kept this long.", 0)] = 600.0
    result_seconds: Annotated[float, Setting("A result that was not fetched is kept this long.", 0)] = 86_400.0
    history_seconds: Annotated[float, Setting("The record of a finished request is kept this long.", 0)] = 7 * 86_400.0
    ephemeral_samplers_per_run: Annotated[
        int, Setting("The newest unnamed samplers of a run, which are kept in any case.", 1)
    ] = 8
    ephemeral_seconds: Annotated[
        float, Setting("The newest unnamed samplers, too, are kept no longer than this after their last use.", 0)
    ] = 86_400.0
    sampler_idle_seconds: Annotated[
        float, Setting("Other unnamed samplers are kept this long after their last use.", 0)
    ] = 3600.0
    run_seconds: Annotated[float, Setting("A run without requests keeps its state this long.", 0)] = 30 * 86_400.0
    episode_idle_seconds: Annotated[
        float, Setting("An episode of a program outside expires this long after its last turn without a reward.", 0)
    ] = 3600.0
    episode_seconds: Annotated[
        float, Setting("An episode of a program outside is kept this long after its end.", 0)
    ] = 7 * 86_400.0
    recent_result_bytes: Annotated[int, Setting("Memory for finished results, besides the database.", 0)] = 64 << 20
