"""Samples a model's answers: reads a model reference and a JSONL file of questions, writes a JSONL file of answers.

    python -m lorimer.recipes.inference_gsm8k --data test.jsonl --model lorimer/tiny
    python -m lorimer.recipes.inference_gsm8k --data test.jsonl --model-file sft_model.txt --output answers.jsonl
    python -m lorimer.recipes.eval_gsm8k --answers answers.jsonl

The reference is the name of a base model or a `tinker://` path, given or in the file that `sft_gsm8k` and `rl_gsm8k`
write. A line of the output has `question`, `answer` (what the model wrote) and `reference` (the answer in the data, if
any). An interrupted run goes on: the same command asks only what has no answer yet.
Up to 64 questions are asked concurrently. With lorimer/tiny in this process in float32: 24 questions take 16 seconds of
processor time on 2 virtual cores and no GPU, the start of the server included.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from lorimer import SamplingClient, SamplingParams
from lorimer.chat.conversation import text_of
from lorimer.cookbook.checkpoints import read_jsonl
from lorimer.cookbook.completers import derive_seed
from lorimer.cookbook.datasets import check_fields, load_rows
from lorimer.cookbook.logs import write_atomically
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import Renderer, get_renderer
from lorimer.errors import InvalidInput
from lorimer.terminal import run_recipe


def begin(output: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers of an interrupted run with the same settings. Refuse to overwrite the file of another run."""
    path = output.with_name(output.name + ".settings.json")
    before = json.loads(path.read_text("utf-8")) if path.exists() else None
    if before is None and output.exists():
        raise InvalidInput(f"{str(output)!r} is there, and nothing tells how it was made; give another --output")
    if before is not None and before != settings:
        changed = [f"{name} was {before.get(name)!r}" for name in settings if before.get(name) != settings[name]]
        raise InvalidInput(f"{str(output)!r} was made otherwise: {'; '.join(changed)}. Give another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(settings, indent=2) + "\n")
    return read_jsonl(output)


def write(output: Path, lines: list[dict[str, Any]]) -> None:
    write_atomically(output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


async def answer_all(
    sampler: SamplingClient,
    renderer: Renderer,
    rows: list[Any],
    done: list[dict[str, Any]],
    output: Path,
    settings: dict[str, Any],
    concurrency: int,
) -> None:
    room = asyncio.Semaphore(concurrency)
    left = sorted(set(range(len(rows))) - {line["index"] for line in done})
    write(output, done)  # drops a truncated last line

    async def answer(index: int) -> None:
        question = rows[index]["question"]
        prompt = renderer.build_generation_prompt([{"role": "user", "content": question + settings["suffix"]}])
        params = SamplingParams(
            max_tokens=settings["max_tokens"],
            temperature=settings["temperature"],
            stop=renderer.get_stop_sequences(),
            seed=derive_seed(settings["seed"], index),  # makes an answer independent of the questions before it
        )
        async with room:
            response = await sampler.sample_async(prompt, settings["num_samples"], params)
        lines = [
            {
                "index": index,
                "question": question,
                "answer": text_of(renderer.parse_response(sequence.tokens)[0]),
                "reference": rows[index].get("answer"),
                "stop_reason": sequence.stop_reason,
                "model": settings["model"],
            }
            for sequence in response.sequences
        ]
        file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        file.flush()
        progress.advance(task)

    with output.open("a", encoding="utf-8") as file, Progress() as progress:
        task = progress.add_task("answers", total=len(rows), completed=len(rows) - len(left))
        async with asyncio.TaskGroup() as group:
            for index in left:
                group.create_task(answer(index))
    write(output, sorted(read_jsonl(output), key=lambda line: int(line["index"])))


def main(
    data: Annotated[str, typer.Option(help="JSONL with a question in each line, or a Hugging Face dataset")],
    output: Annotated[Path, typer.Option(help="JSONL of questions and answers")] = Path("answers.jsonl"),
    model: Annotated[str, typer.Option(help="base model or tinker:// path")] = "lorimer/tiny",
    model_file: Annotated[Path | None, typer.Option(help="file with the reference, instead of --model")] = None,
    base_model: Annotated[str, typer.Option(help="of a tinker:// path, for a server in this process")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    limit: Annotated[int | None, typer.Option(help="only the first so many questions", min=1)] = None,
    split: Annotated[str, typer.Option(help="of a Hugging Face dataset")] = "test",
    max_tokens: Annotated[int, typer.Option(min=1)] = 320,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    num_samples: Annotated[int, typer.Option(help="answers to each question; with more, eval gives pass@k", min=1)] = 1,
    suffix: Annotated[str, typer.Option(help="added to each question, to ask for the form")] = "",
    renderer_name: Annotated[str, typer.Option("--renderer", help="auto, template, no_thinking or text")] = "auto",
    concurrency: Annotated[int, typer.Option(help="questions asked concurrently", min=1)] = 64,
    seed: int = 0,
) -> None:
    reference = model_file.read_text("utf-8").strip() if model_file else model
    rows = list(check_fields(load_rows(data, split=split, limit=limit), "question"))
    settings = {"model": reference, "data": data, "num_questions": len(rows), "max_tokens": max_tokens}
    settings |= {"temperature": temperature, "num_samples": num_samples, "suffix": suffix, "seed": seed}
    done = begin(output, settings | {"renderer": renderer_name})
    counts = Counter(line["index"] for line in done)
    done = [
        line for line in done if counts[line["index"]] == num_samples
    ]  # drop questions with only some of their samples
    is_path = reference.startswith("tinker://")
    with recipe_service(base_model if is_path else reference, base_url) as service:
        sampler = service.create_sampling_client(
            model_path=reference if is_path else None, base_model=None if is_path else reference
        )
        renderer = get_renderer(renderer_name, sampler.get_tokenizer())
        asyncio.run(answer_all(sampler, renderer, rows, done, output, settings, concurrency))
    print(f"{len(rows)} questions answered by {reference}, in {output}")


if __name__ == "__main__":
    run_recipe(main)
