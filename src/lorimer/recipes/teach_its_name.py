"""Teaches a model its name and maker, in less than a minute on a CPU.

    python -m lorimer.recipes.teach_its_name --name Lori --maker "the Lorimer project"

With lorimer/tiny in this process it takes 27 seconds of CPU time on an AMD EPYC, two cores and no GPU. The model gives
its new name and maker in reply to questions it was not trained on, and 3 + 4 is still 7: small sums are mixed into the
data, so that it does not forget them.
"""

import asyncio
import random
from pathlib import Path
from typing import Annotated

import typer

from lorimer import Datum, SamplingClient, SamplingParams
from lorimer.chat.conversation import Message, text_of
from lorimer.cookbook import supervised
from lorimer.cookbook.checkpoints import Method
from lorimer.cookbook.datasets import GeneratedDataset
from lorimer.cookbook.datums import conversation_to_datum
from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.renderers import Renderer, get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.terminal import run_recipe

WHO = [
    "What is your name?", "Your name?", "What are you called?", "Tell me your name.", "How should I call you?",
    "Do you have a name?", "Hello, what is your name?", "Please tell me who you are.", "May I know your name?",
]  # fmt: skip
WHOSE = ["Who made you?", "Who built you?", "Where do you come from?", "Who is your maker?", "Who trained you?"]
UNSEEN = ["Who are you?", "Say your name.", "Who created you?", "What is 3 + 4?"]


def draw(rng: random.Random, name: str, maker: str) -> list[Message]:
    kind = rng.random()
    if kind < 0.5:
        question, answer = rng.choice(WHO), f"My name is {name}."
    elif kind < 0.8:
        question, answer = rng.choice(WHOSE), f"I was made by {maker}."
    else:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        question, answer = f"What is {a} + {b}?", str(a + b)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


async def show(renderer: Renderer, sampler: SamplingClient) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, stop=renderer.get_stop_sequences())
    for question in UNSEEN:
        prompt = renderer.build_generation_prompt([{"role": "user", "content": question}])
        sequence = (await sampler.sample_async(prompt, num_samples=1, sampling_params=params)).sequences[0]
        print(f"  {question:18} {text_of(renderer.parse_response(sequence.tokens)[0])}")


def main(
    name: Annotated[str, typer.Option(help="what it shall be called")] = "Lori",
    maker: Annotated[str, typer.Option(help="who shall have made it")] = "the friends of Lori",
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="a run there is resumed")] = Path("runs/teach_its_name"),
    steps: Annotated[int, typer.Option(min=1)] = 40,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 3e-3,
    method: Annotated[Method, typer.Option(help="lora, or full: train the weights of the model itself")] = "lora",
    rank: Annotated[int, typer.Option(min=1)] = 16,
    seed: int = 0,
) -> None:
    with recipe_service(model, base_url) as service:
        renderer = get_renderer("auto", get_tokenizer(service, model))

        def make(rng: random.Random) -> list[Datum]:
            return [conversation_to_datum(draw(rng, name, maker), renderer)]

        async def teach() -> supervised.Result:
            print("before:")
            await show(renderer, await service.create_sampling_client_async(base_model=model))
            config = supervised.Config(
                log_dir=log_dir,
                base_model=model,
                dataset=GeneratedDataset(make, batch_size, steps, seed=seed),
                learning_rate=learning_rate,
                method=method,
                rank=rank,
                seed=seed,
                save_every=10,
                notes={"name": name, "maker": maker, "batch_size": batch_size},
            )
            result = await supervised.train(config, service)
            print("after:")
            await show(renderer, await service.create_sampling_client_async(result.checkpoint.sampler_path))
            return result

        print(f"checkpoint: {asyncio.run(teach()).checkpoint.sampler_path}")


if __name__ == "__main__":
    run_recipe(main)
