"""Measures the peak memory of one phase of one side in a separate process: ``python -m bench.memory SETTINGS``.

Samples the resident size every few milliseconds, which includes libraries and weights, and reports the increase over
the loaded model too. The process imports only the libraries of its side.
"""

import contextlib
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
import transformers

from bench import workloads
from bench.models import SHAPES, ModelShape, Sizes
from lorimer.engine.config import EngineConfig

if TYPE_CHECKING:
    from bench.contest import Contest
    from lorimer.engine.config import Dtype


@dataclass(frozen=True)
class Phase:
    row: str
    """The row whose fastest contestants are measured."""
    part: str
    """Team names in that row, without the side."""
    likely: str
    """Contestant used for the peers if the row was not run."""


PHASES = {
    "SFT": Phase("sft", "", "packed float32"),
    "full": Phase("full", "", "micro-batch 1 float32"),
    "RL batch": Phase("rl_batch", "", "completions float32"),
    "sampling": Phase("sample_32x1", " adapter", "generate float32"),
}
_INTERVAL_SECONDS = 0.002


@dataclass(frozen=True)
class Peak:
    name: str
    """Name of the contestant."""
    peak_bytes: int
    added_bytes: int

    def __str__(self) -> str:
        return f"{self.peak_bytes / 2**30:.2f} GiB (+{self.added_bytes / 2**30:.2f})"


@dataclass(frozen=True)
class Settings:
    """Arguments of the process."""

    model: str
    directory: str
    adapter: str
    phase: str
    team: str
    name: str
    num_threads: int


def measure(contest: "Contest", phase: str, team: str) -> Peak:
    """Run a phase in a new process, with the fastest contestant of the team."""
    row, part, likely = PHASES[phase].row, PHASES[phase].part, PHASES[phase].likely
    return measure_one(
        contest, phase, contest.fastest.get((row, team + part), "ours float32" if team == "ours" else likely)
    )


def measure_one(contest: "Contest", phase: str, name: str) -> Peak:
    """Run a phase in a new process, with the contestant of that name."""
    settings = Settings(
        model=contest.shape.name,
        directory=str(contest.directory),
        adapter=str(contest.adapter),
        phase=phase,
        team="ours" if name.startswith("ours") else "peer",
        name=name,
        num_threads=contest.num_threads,
    )
    peak = Peak(name, **_run_apart(settings))
    contest.progress(f"{contest.shape.name} memory: {phase}, {name}, {peak}")
    return peak


def _run_apart(settings: Settings) -> Any:
    """Return what a new process with these settings prints."""
    command = [sys.executable, "-m", "bench.memory", json.dumps(asdict(settings))]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Loaded:
    """What it takes to load a base model."""

    weight_bytes: int
    resident_bytes: int
    """Added by loading, once it is over."""
    peak_bytes: int
    """Added at most while it is loaded."""
    processor_seconds: float


def measure_base(contest: "Contest", shape: ModelShape, dtype: "Dtype") -> Loaded:
    """Load a base model in a new process, from a directory that has it in that dtype."""
    directory = contest.directory.parent / f"{shape.name}-{dtype}"
    if not directory.exists():
        shape.write(directory, dtype)
    settings = Settings(
        model=shape.name,
        directory=str(directory),
        adapter="",
        phase="base",
        team="ours",
        name=dtype,
        num_threads=contest.num_threads,
    )
    loaded = Loaded(**_run_apart(settings))
    contest.progress(f"{shape.name} base: {dtype}, {loaded}")
    return loaded


def load_base(settings: Settings) -> dict[str, float]:
    """Load the base model of the settings in this process. Return the fields of ``Loaded``."""
    from lorimer.engine.engine import Engine
    from lorimer.engine.model.base_model import register_implementations

    register_implementations()  # the libraries of models are imported before it is measured
    config = EngineConfig(
        model=settings.directory, dtype=cast("Dtype", settings.name), num_threads=settings.num_threads
    )
    process = psutil.Process()
    with _peak_of(process) as peak:
        before, began = process.memory_info().rss, time.process_time()
        engine = Engine(config)
        seconds = time.process_time() - began
    storages = {id(s): s for s in (p.untyped_storage() for p in engine.model.transformer.parameters())}
    return {
        "weight_bytes": sum(storage.nbytes() for storage in storages.values()),
        "resident_bytes": process.memory_info().rss - before,
        "peak_bytes": peak[0] - before,
        "processor_seconds": seconds,
    }


def run_phase(settings: Settings) -> dict[str, int]:
    """Load the side and run the phase once. Return the fields of ``Peak``."""
    torch.set_num_threads(settings.num_threads)
    transformers.utils.logging.disable_progress_bar()
    side = _open(settings)
    gc.collect()
    process = psutil.Process()
    with _peak_of(process) as peak:
        before = process.memory_info().rss
        _run(side, settings, SHAPES[settings.model].sizes, SHAPES[settings.model].vocab_size)
    return {"peak_bytes": peak[0], "added_bytes": peak[0] - before}


@contextlib.contextmanager
def _peak_of(process: psutil.Process) -> Iterator[list[int]]:
    """Watch the resident size of this process within the block; the list has the largest."""
    peak, is_over = [process.memory_info().rss], threading.Event()

    def watch() -> None:
        while not is_over.wait(_INTERVAL_SECONDS):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()


def _open(settings: Settings) -> Any:
    directory, adapter = Path(settings.directory), Path(settings.adapter)
    dtype: Dtype = "bfloat16" if "bfloat16" in settings.name else "float32"
    # Each side imports in its own process only what it needs.
    if settings.team == "ours":
        from bench.ours import FullLorimer, Lorimer

        if settings.phase == "full":
            return FullLorimer(directory, dtype, settings.num_threads)
        return Lorimer(directory, adapter, dtype, settings.num_threads)
    from bench.peers import Peft, Plain

    return Plain(directory, dtype) if settings.phase == "full" else Peft(directory, adapter, dtype)


def _run(side: Any, settings: Settings, sizes: Sizes, vocab_size: int) -> None:
    if settings.phase == "sampling":
        asked = workloads.prompts(sizes.sample_prompts, sizes.sample_prompt, vocab_size, 0)
        side.sample(asked, 1, sizes.sample_new, with_adapter=True)
        return
    if settings.phase in ("SFT", "full"):
        data, loss_fn = workloads.sft_data(sizes.sft_lengths, vocab_size, 0), "cross_entropy"
    else:
        data = workloads.rl_data(sizes.rl_sequences, sizes.rl_prompt, sizes.rl_completion, vocab_size, 0)
        loss_fn = "importance_sampling"
    if settings.team == "ours":
        train = side.train if settings.phase == "full" else side.train_one
    else:
        train = partial(side.train, layout=settings.name.rpartition(" ")[0])
    # The moments of a full run, as large as its weights, come with the first step.
    for _ in range(2 if settings.phase == "full" else 1):
        train(data, loss_fn)


if __name__ == "__main__":
    asked = Settings(**json.loads(sys.argv[1]))
    print(json.dumps(load_base(asked) if asked.phase == "base" else run_phase(asked)))
