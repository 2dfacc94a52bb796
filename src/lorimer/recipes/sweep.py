"""Trains several learning rates and ranks concurrently on one server: the runs share the base model and its passes.

    python -m lorimer.recipes.sweep --learning-rates 1e-3,3e-3,1e-2 --ranks 4,16

With lorimer/tiny in this process six runs take 80 seconds of CPU time on an AMD EPYC, two cores and no GPU. The rate
3e-3 is best at both ranks (held-out nll 0.276 at rank 16, 0.283 at rank 4), and the rank hardly matters below it. Each
run learns sums from the same batches and is evaluated on held-out sums. Every run has its own directory below the log
directory; after an interruption each run resumes from its last checkpoint. All runs report to the server under the tag
``sweep``, where the console compares them and `lorimer run list tag=sweep --sort min.test/nll` ranks them.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lorimer.cookbook import supervised
from lorimer.cookbook.arithmetic import sum_rows
from lorimer.cookbook.datasets import chat_dataset, datum_maker
from lorimer.cookbook.evaluation import accuracy, exact_match
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.errors import InvalidInput
from lorimer.recipes.sl_loop import HELD_OUT, TRAINING
from lorimer.terminal import run_recipe

Results = dict[tuple[float, int], supervised.Result]
"""Keyed by learning rate and rank."""


def print_table(results: Results) -> None:
    """Print the results, best first."""
    ranked = sorted(results.items(), key=lambda item: item[1].metrics["test/nll"])
    table = Table("learning rate", "rank", "held-out nll", "held-out accuracy")
    for (rate, rank), result in ranked:
        table.add_row(
            f"{rate:g}", f"{rank}", f"{result.metrics['test/nll']:.4f}", f"{result.metrics['test/accuracy']:.0%}"
        )
    Console(emoji=False).print(table)
    print(f"best: {ranked[0][1].checkpoint.sampler_path}")


def plot(results: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel="held-out nll", title="after the last step")
    for rank in sorted({rank for _, rank in results}):
        points = sorted((rate, result.metrics["test/nll"]) for (rate, r), result in results.items() if r == rank)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"rank {rank}")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(
    learning_rates: Annotated[str, typer.Option(help="separated by commas")] = "1e-3,3e-3,1e-2",
    ranks: Annotated[str, typer.Option(help="separated by commas")] = "4,16",
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="a directory for each run goes there")] = Path("runs/sweep"),
    steps: Annotated[int, typer.Option(min=1)] = 40,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    num_questions: Annotated[int, typer.Option(help="held-out sums to ask each model", min=1)] = 100,
    seed: int = 0,
) -> None:
    import matplotlib  # noqa: F401 (draws the result; fail now if it is missing)

    try:
        choices = [(float(rate), int(rank)) for rate in learning_rates.split(",") for rank in ranks.split(",")]
    except ValueError as error:
        raise InvalidInput(f"--learning-rates and --ranks are numbers separated by commas: {error}") from None
    with recipe_service(model, base_url) as service:
        renderer = get_renderer("auto", get_tokenizer(service, model))

        held_out = sum_rows(HELD_OUT[:num_questions])

        async def run(rate: float, rank: int) -> supervised.Result:
            config = supervised.Config(
                log_dir=log_dir / f"learning_rate={rate:g},rank={rank}",
                base_model=model,
                dataset=chat_dataset(sum_rows(TRAINING), renderer, batch_size=batch_size, seed=seed),
                max_steps=steps,
                learning_rate=rate,
                rank=rank,
                seed=seed,
                test_data=[datum for row in held_out for datum in datum_maker(renderer)(row)],
                evaluators=[accuracy(held_out, renderer, exact_match(), max_tokens=8)],
                save_every=20,
                sinks=["jsonl", "server"],
                tags=["sweep"],
                notes={"batch_size": batch_size, "num_questions": num_questions},
            )
            result = await supervised.train(config, service)
            print(f"learning rate {rate:g}, rank {rank}: done, train nll {result.metrics['train/nll']:.4f}", flush=True)
            return result

        async def run_all() -> list[supervised.Result]:
            return await asyncio.gather(*(run(*choice) for choice in choices))

        results = dict(zip(choices, asyncio.run(run_all()), strict=True))
    print_table(results)
    plot(results, log_dir / "sweep.png")
    print(f"plot: {log_dir / 'sweep.png'}")


if __name__ == "__main__":
    run_recipe(main)
