"""``make demo``: the bundled model learns to add, on the engine alone, in about a minute on two CPU cores.

It shows answers and accuracy on sums it never trains on, before and after supervised LoRA training, with the loss on
the way. The service and the SDK are not needed for it.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import (
    CreateRun,
    Datum,
    ForwardBackward,
    LoadProgress,
    LoraConfig,
    OptimStep,
    PublishSampler,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from lorimer.engine.model import load_tokenizer
from lorimer.engine.process import EngineProcess, Event
from lorimer.errors import LorimerError

NUM_STEPS, BATCH, RANK, LEARNING_RATE = 60, 64, 16, 4e-3
NUM_QUESTIONS = 200
RUN = "demo"

Sum = tuple[int, int]


class Demo:
    def __init__(self, engine: EngineProcess, tokenizer: Any, console: Console, learning_rate: float) -> None:
        self._engine, self._tokenizer, self._console = engine, tokenizer, console
        self._learning_rate = learning_rate
        rng = random.Random(7)
        pairs = [(a, b) for a in range(100) for b in range(100)]
        rng.shuffle(pairs)
        self._questions, self._training = pairs[:NUM_QUESTIONS], pairs[NUM_QUESTIONS:]

    def run(self, num_steps: int) -> tuple[float, float]:
        """Train and show; answers the accuracy before and after."""
        self._engine.submit(CreateRun(request_id="create", model_id=RUN, lora=LoraConfig(rank=RANK, seed=0))).result()
        before, answers_before = self._ask("before")
        losses = list(self._train(num_steps))
        after, answers_after = self._ask("after")
        table = Table("question", "before", "after", title="Sums it never trained on, answered greedily")
        for (a, b), old, new in list(zip(self._questions, answers_before, answers_after, strict=True))[:6]:
            table.add_row(f"What is {a} + {b}?", _marked(old, a + b), _marked(new, a + b))
        self._console.print(table)
        self._console.print(f"loss per answer token: {losses[0]:.3f} -> {losses[-1]:.3f}")
        self._console.print(f"right answers:         {before:.0%} -> [bold]{after:.0%}[/bold] of {NUM_QUESTIONS}")
        return before, after

    def _ask(self, name: str) -> tuple[float, list[str]]:
        """Accuracy and answers of a frozen copy of the run's present weights."""
        self._engine.submit(PublishSampler(request_id=f"publish-{name}", model_id=RUN, sampler_id=name)).result()
        params = SamplingParams(max_tokens=8, temperature=0)
        futures = [
            self._engine.submit(
                SampleRequest(
                    request_id=f"{name}-{i}", prompt=np.array(self._prompt(pair)), sampler_id=name, params=params
                )
            )
            for i, pair in enumerate(self._questions)
        ]
        tokens = [future.result().sequences[0].tokens.tolist() for future in futures]  # type: ignore[union-attr]
        answers = [self._tokenizer.decode(t, skip_special_tokens=True).strip() for t in tokens]
        right = [answer == str(a + b) for answer, (a, b) in zip(answers, self._questions, strict=True)]
        return sum(right) / len(right), answers

    def _train(self, num_steps: int) -> Iterator[float]:
        rng = random.Random(0)
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task("training", total=num_steps, loss=float("nan"))
            for step in range(num_steps):
                data = [self._datum(pair) for pair in rng.sample(self._training, BATCH)]
                operation = ForwardBackward(request_id=f"pass-{step}", model_id=RUN, data=data, loss_fn="cross_entropy")
                (passed,) = self._engine.train(TrainBatch(operations=[operation]))
                # Sent before the pass is done: the engine keeps the order, and never waits for us.
                rate = self._learning_rate * (1 - step / num_steps)
                stepped = self._engine.submit(
                    OptimStep(request_id=f"step-{step}", model_id=RUN, params={"learning_rate": rate})
                )
                metrics = passed.result().metrics  # type: ignore[union-attr]
                stepped.result()
                loss = metrics["loss:sum"] / metrics["weight:sum"]
                progress.update(task, advance=1, loss=loss)
                yield loss

    def _prompt(self, pair: Sum) -> list[int]:
        messages = [{"role": "user", "content": f"What is {pair[0]} + {pair[1]}?"}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _datum(self, pair: Sum) -> Datum:
        """The whole dialogue; only the answer and its end are weighed."""
        prompt = self._prompt(pair)
        answer = [*self._tokenizer.encode(str(sum(pair)), add_special_tokens=False), self._tokenizer.eos_token_id]
        tokens = np.array(prompt + answer)
        weights = np.zeros(len(tokens) - 1, np.float32)
        weights[len(prompt) - 1 :] = 1
        return Datum(tokens=tokens[:-1], loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights})


def _marked(answer: str, right: int) -> str:
    return f"[green]{answer}[/green]" if answer == str(right) else f"[red]{answer or '(nothing)'}[/red]"


class LoadingBar:
    """Shows what the engine does before it is ready."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting the engine", total=None)

    def show(self, event: Event) -> None:
        if isinstance(event, LoadProgress):
            total = None if event.fraction is None else 1.0
            self._progress.update(self._task, description=event.stage, completed=event.fraction or 0.0, total=total)

    def __enter__(self) -> "LoadingBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lorimer.engine.demo", description=__doc__)
    parser.add_argument("--model", default="lorimer/tiny", help="a directory, a .gguf file, an alias or a hub id")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="at the start; it falls to zero")
    options = parser.parse_args(arguments)
    console = Console()
    loading = LoadingBar(console)
    with EngineProcess(EngineConfig(model=options.model), loading.show) as engine:
        with loading:
            info = engine.ready.result()
        console.print(
            f"[bold]{info.model_name}[/bold]: {info.num_parameters:,} parameters, {info.dtype} on {info.device};"
            f" LoRA rank {RANK}, {options.steps} steps of {BATCH} sums"
        )
        tokenizer = load_tokenizer(Path(info.directory))
        Demo(engine, tokenizer, console, options.learning_rate).run(options.steps)


if __name__ == "__main__":
    try:
        main()
    except LorimerError as error:
        sys.exit(f"demo: {error}")
