"""Compares LoRA of several ranks, LoRA+ and full fine-tuning with several optimisers, on the same data and tokens.

    python -m lorimer.recipes.methods
    python -m lorimer.recipes.methods --data chats.jsonl --model smollm2-135m-instruct --methods lora-8,full,full-muon

A method is `lora-RANK`, `loraplus-RANK` (B learns 16 times as fast as A) or `full`, then `-OPTIMIZER` if it is not
AdamW, then `@RATE` where its search is to begin. Each method first searches its learning rate: three rates, a factor of
three apart, train on the same first batches, and while the best is at an edge the next rate beyond it is tried. The
held-out rows are divided: one half chooses the rate, the other measures the final run, which has a constant rate. Runs
follow each other, so that each has the machine for itself; their tags are `methods` and `methods-final`.
With lorimer/tiny in this process, five methods with three rates of 6 steps each and a final run of 24 steps take 163
seconds of CPU time on an AMD EPYC, two cores and no GPU; held-out nll falls from 1.21 to 0.62 - 0.78 (docs/methods.md).
"""

import asyncio
import csv
import json
import math
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lorimer import RequestFailedError
from lorimer.cookbook import supervised
from lorimer.cookbook.checkpoints import delete_checkpoint, model_id_of, unload_run
from lorimer.cookbook.datasets import chat_dataset, check_conversations, datum_maker, load_rows, split_off
from lorimer.cookbook.engine_memory import watched_memory
from lorimer.cookbook.hyperparams import lora_learning_rate
from lorimer.cookbook.logs import read_metrics, write_atomically
from lorimer.cookbook.methods import Contender, parse, search
from lorimer.cookbook.plots import Chart, draw_png
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.cookbook.word_problems import generate_problems
from lorimer.errors import InvalidInput
from lorimer.terminal import run_recipe

Points = list[tuple[float, float]]
ENGINE_FILE = "engine.json"
"""The peak memory of the engine of a run that has ended and was unloaded."""


def summarize(contender: Contender, directory: Path, rate: float) -> dict[str, Any]:
    """Return a line of the table, from the metrics of a final run."""
    lines = read_metrics(directory)
    measured = [line["test/nll"] for line in lines if "test/nll" in line]
    steps = [line for line in lines if "train/nll" in line]
    # The first step loads the model, and others wait for an evaluation.
    plain = [line for line in steps[1:] if "test/nll" not in line] or steps
    seconds = statistics.median(line["time/step_seconds"] for line in plain)
    last = steps[-1]
    return {
        "method": contender.name,
        "learning_rate": rate,
        "final_nll": measured[-1],
        "best_nll": min(measured),
        "trained_parameters": int(last["optim/num_parameters"]),
        "seconds_per_step": seconds,
        "tokens_per_second": statistics.fmean(line["num_tokens"] for line in plain) / seconds,
        "engine_bytes": json.loads((directory / ENGINE_FILE).read_text("utf-8"))["engine_bytes"],
        "optimizer_state_bytes": int(last["optim/optimizer_state_bytes"]),
        "num_tokens": sum(line["num_tokens"] for line in steps),
    }


def choose(name: str, found: dict[float, float]) -> float:
    """Return the best learning rate of a search; tell if a better one may be beyond those that were tried."""
    rate = min(found, key=lambda rate: found[rate])
    if rate in (min(found), max(found)):
        print(f"{name}: {rate:.3g} is at the edge of the rates that were tried; --max-rates allows more")
    return rate


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the results, best first."""
    columns = (
        "method",
        "learning rate",
        "final nll",
        "best nll",
        "trained",
        "s/step",
        "tokens/s",
        "engine",
        "optimiser",
    )
    table = Table(*columns)
    for row in sorted(rows, key=lambda row: row["final_nll"]):
        engine, state = row["engine_bytes"], row["optimizer_state_bytes"] / 2**20
        table.add_row(
            row["method"],
            f"{row['learning_rate']:.2g}",
            f"{row['final_nll']:.4f}",
            f"{row['best_nll']:.4f}",
            f"{row['trained_parameters']:,}",
            f"{row['seconds_per_step']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            "-" if engine is None else f"{engine / 2**20:.0f} MiB",
            f"{state:.1f} MiB",
        )
    Console(emoji=False, width=120).print(table)


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main(
    methods: Annotated[
        str, typer.Option(help="separated by commas: lora-RANK, loraplus-RANK, full; with -OPTIMIZER and @RATE")
    ] = "lora-1,lora-8,lora-64,loraplus-8,full,full-muon",
    data: Annotated[str | None, typer.Option(help="conversations; without any, word problems are generated")] = None,
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="a directory for each run goes there")] = Path("runs/methods"),
    steps: Annotated[int, typer.Option(help="of each final run", min=1)] = 60,
    search_steps: Annotated[int, typer.Option(help="of each learning rate that is tried", min=1)] = 20,
    max_rates: Annotated[int, typer.Option(help="learning rates that a method may try; 1: no search", min=1)] = 5,
    batch_size: Annotated[int, typer.Option(help="conversations in a step", min=1)] = 16,
    max_length: Annotated[int, typer.Option(help="tokens of a conversation; the rest is cut off", min=1)] = 512,
    num_held_out: Annotated[int, typer.Option(help="conversations to measure with", min=2)] = 64,
    eval_every: Annotated[int, typer.Option(help="steps between measurements; 0: at the end", min=0)] = 10,
    save_every: Annotated[int, typer.Option(help="steps between checkpoints; 0: at the end", min=0)] = 0,
    seed: int = 0,
) -> None:
    import matplotlib  # noqa: F401 (draws the result; fail now if it is missing)

    everything = check_conversations(load_rows(data)) if data else generate_problems(2000, seed)
    rows, held_out = split_off(everything, num_held_out, seed)
    with recipe_service(model, base_url) as service:
        tokenizer = get_tokenizer(service, model)
        lora, full = (
            lora_learning_rate(model, directory=tokenizer.name_or_path, is_full=flag) for flag in (False, True)
        )
        contenders = [parse(text, lora.value, full.value) for text in methods.split(",")]
        if len({contender.name for contender in contenders}) < len(contenders):
            raise InvalidInput(f"--methods names a method twice: {methods}")
        renderer = get_renderer("auto", tokenizer)
        convert = datum_maker(renderer, max_length=max_length)
        chosen_by, measured_by = (
            [datum for row in part for datum in convert(row)] for part in (held_out[::2], held_out[1::2])
        )
        num_epochs = -(-max(steps, search_steps) * batch_size // len(rows))

        async def train(contender: Contender, rate: float, directory: Path, is_final: bool) -> supervised.Result:
            kind = "final" if is_final else "search"
            config = supervised.Config(
                log_dir=directory,
                base_model=model,
                dataset=chat_dataset(
                    rows, renderer, batch_size=batch_size, max_length=max_length, num_epochs=num_epochs, seed=seed
                ),
                max_steps=steps if is_final else search_steps,
                learning_rate=rate,
                schedule="constant",
                method=contender.method,
                optimizer=contender.optimizer,
                optimizer_params=contender.fields(rate),
                rank=contender.rank,
                seed=seed,
                test_data=measured_by if is_final else chosen_by,
                eval_every=eval_every if is_final else 0,
                save_every=save_every if is_final else 0,
                sinks=["jsonl", "server"],
                name=f"{contender.name} {kind} {rate:.2g}",
                tags=["methods", f"methods-{kind}", contender.name],
                notes={"data": data, "batch_size": batch_size, "max_length": max_length, "held_out": num_held_out},
            )
            done = directory / ENGINE_FILE
            async with watched_memory(service) as memory:
                result = await supervised.train(config, service)
                if not done.exists():
                    peak = await memory.peak_of(model_id_of(result.checkpoint))
                    write_atomically(done, json.dumps({"engine_bytes": peak}) + "\n")
                    if not is_final:
                        await delete_checkpoint(service, result.checkpoint)
                    await unload_run(service, result.checkpoint)
            return result

        async def measure(contender: Contender, rate: float) -> float:
            """Train a learning rate for a few steps; return the nll of the rows that choose it."""
            directory = log_dir / "search" / f"{contender.name},learning_rate={rate:.3g}"
            try:
                nll = float((await train(contender, rate, directory, is_final=False)).metrics["test/nll"])
            except RequestFailedError as error:
                if "finite" not in error.message:
                    raise
                nll = math.inf  # this rate diverges
            print(f"{contender.name}, learning rate {rate:.3g}: nll {nll:.4f} after {search_steps} steps", flush=True)
            return nll

        async def compare(contender: Contender) -> tuple[Points, dict[str, Any]]:
            found, rate = dict[float, float](), contender.start_rate
            if max_rates > 1:
                found = await search(lambda rate: measure(contender, rate), rate, max_rates)
                rate = choose(contender.name, found)
            result = await train(contender, rate, log_dir / contender.name, is_final=True)
            row = summarize(contender, log_dir / contender.name, rate)
            print(
                f"{contender.name}: held-out nll {row['final_nll']:.4f}, {result.checkpoint.sampler_path}", flush=True
            )
            return [(rate, nll) for rate, nll in found.items() if math.isfinite(nll)], row

        async def compare_all() -> list[tuple[Points, dict[str, Any]]]:
            return [await compare(contender) for contender in contenders]

        results = asyncio.run(compare_all())
    table = [row for _, row in results]
    print_table(table)
    write_csv(table, log_dir / "methods.csv")
    curves = {
        row["method"]: [
            (line["step"], line["test/nll"]) for line in read_metrics(log_dir / row["method"]) if "test/nll" in line
        ]
        for row in table
    }
    charts = [Chart("held-out nll", curves)]
    if searches := {row["method"]: points for points, row in results if points}:
        title = f"nll after {search_steps} steps of the search"
        charts.append(Chart(title, searches, x_label="learning rate", is_log_x=True))
    title = f"{model}, {table[0]['num_tokens']:,} tokens each"
    print(f"table: {log_dir / 'methods.csv'}")
    print(f"plot: {draw_png(charts, log_dir / 'methods.png', title=title)}")


if __name__ == "__main__":
    run_recipe(main)
