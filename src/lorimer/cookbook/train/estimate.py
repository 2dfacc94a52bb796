"""What a training will take, from its data and from two real steps on a run that is thrown away.

The steps are those of the loop itself, with its batches, without evaluations. The run's checkpoints are deleted and the
run is unloaded afterwards; its entry in the list of runs stays.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lorimer import ServiceClient
from lorimer.cookbook import preference, supervised
from lorimer.cookbook.checkpoints import archive_run, delete_checkpoint, model_id_of, unload_run
from lorimer.cookbook.data_check import Form, check_data, count_problems
from lorimer.cookbook.datums import num_tokens
from lorimer.cookbook.engine_memory import watched_memory
from lorimer.cookbook.evals.running import TaskEvaluator
from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.rl import training as rl
from lorimer.cookbook.service import get_tokenizer
from lorimer.cookbook.train.kinds import Given, Job

NUM_MEASURED = 2
TIMES = ("time/step_seconds", "time/total", "time/latency_seconds")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    num_examples: int
    num_held_out: int
    num_steps: int
    num_tokens: int
    """Of the whole training: read, or in RL and distillation sampled, as the measured steps suggest."""
    num_truncated: int
    """Examples of an epoch that are longer than max_length."""
    problems: dict[str, int]
    """What ``lorimer data check`` finds."""
    seconds_per_step: float
    seconds: float
    """Of all steps; loading the model, evaluations and checkpoints come on top."""
    num_evaluations: int
    """How often held-out rows and the tasks of eval_tasks are measured."""
    eval_items: dict[str, int]
    """Items of each of these tasks."""
    engine_bytes: int | None
    """Peak memory of the engine while it was measured; none where the server does not tell."""
    available_bytes: int | None
    """Memory of the server's machine that was free at least."""


async def estimate(given: Given, job: Job, service: ServiceClient) -> Estimate:
    """Measure two steps, and return what all of them will take."""
    with TemporaryDirectory(prefix="lorimer-dry-run-") as directory:
        async with watched_memory(service) as memory:
            result = await job.train(_shortened(job.config, Path(directory)), service)
            saved = getattr(result, "checkpoint", result)
            engine_bytes = await memory.peak_of(model_id_of(saved))
        measured = [line for line in read_metrics(directory) if any(name in line for name in TIMES)]
    await delete_checkpoint(service, saved)
    await unload_run(service, saved)
    await archive_run(service, model_id_of(saved))
    seconds = next(float(measured[-1][name]) for name in TIMES if name in measured[-1])
    renderer = get_renderer(given.values.get("renderer_name", "auto"), get_tokenizer(service, given["base_model"]))
    num_steps = job.config.num_steps
    if isinstance(job.config, rl.Config) and num_steps is None:
        num_steps = len(job.config.dataset_builder(renderer)[0])
    assert num_steps is not None
    data = given.data()
    report = None
    form: Form = "sft" if given.name == "full" else given.name
    if data.data is not None:
        report = check_data(
            data.data,
            renderer,
            form=form,
            held_out_data=data.held_out_data,
            num_held_out=data.num_held_out,
            max_length=getattr(data, "max_length", None),
            seed=given.values.get("seed", 0),
            num_shown=0,
            **({"train_on": data.train_on} if form == "sft" else {}),
        )
    return Estimate(
        num_examples=job.num_examples,
        num_held_out=job.num_held_out,
        num_steps=num_steps,
        num_tokens=_count_tokens(job.config, num_steps, measured),
        num_truncated=report.num_truncated if report else 0,
        problems=dict(count_problems(report.findings)) if report else {},
        seconds_per_step=seconds,
        seconds=seconds * num_steps,
        num_evaluations=_count_evaluations(job.config.eval_every, num_steps),
        eval_items={
            one.task.name: len(one.task.items) for one in job.config.evaluators if isinstance(one, TaskEvaluator)
        },
        engine_bytes=engine_bytes,
        available_bytes=min(memory.available, default=None),
    )


def _count_evaluations(every: int, num_steps: int) -> int:
    """Count the end, and the steps before which the loops evaluate."""
    return 1 + (-(-num_steps // every) if every else 0)


def _shortened(config: Any, directory: Path) -> Any:
    """Return the configuration with two steps, in another directory, without evaluations."""
    changes: dict[str, Any] = {"log_dir": directory, "eval_every": 0, "evaluators": (), "sinks": ("jsonl",)}
    if isinstance(config, rl.Config):
        builder = config.dataset_builder
        return replace(config, **changes, num_steps=NUM_MEASURED, dataset_builder=lambda one: (builder(one)[0], None))
    if isinstance(config, supervised.Config):
        changes["test_data"] = ()
    if isinstance(config, preference.Config):
        changes["test_pairs"] = ()
    return replace(config, **changes, max_steps=min(NUM_MEASURED, config.num_steps))


def _count_tokens(config: Any, num_steps: int, measured: list[dict[str, Any]]) -> int:
    """Count the tokens of every batch where they are known, else as many in each step as were measured."""
    if isinstance(config, supervised.Config):
        batches = range(num_steps * config.batches_per_step)
        return sum(num_tokens(config.dataset.get_batch(batch)) for batch in batches)
    if isinstance(config, preference.Config):
        pairs = [pair for step in range(num_steps) for pair in config.dataset.get_batch(step)]
        return sum(num_tokens([pair.chosen, pair.rejected]) for pair in pairs)
    return round(num_steps * sum(float(line["num_tokens"]) for line in measured) / len(measured))
