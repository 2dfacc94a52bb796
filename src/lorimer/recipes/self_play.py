"""Two policies learn Nim by playing against each other.

    python -m lorimer.recipes.self_play

A pile of stones; players take one, two or three in turn; who takes the last one wins. Leaving a multiple of four wins,
which nobody tells the players. Two adapters of one base model begin with the rules (a short supervised stage on random
legal moves), then each learns from its own games against the other as it is at that step. Both are sampled and trained
at once, in the same passes of one server. A few steps were run; what a whole run reaches is not known yet.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lorimer import Datum, SamplingClient, ServiceClient, TrainingClient
from lorimer.cookbook import supervised
from lorimer.cookbook.checkpoints import Checkpoints, open_training_client
from lorimer.cookbook.completers import TokenCompleter, derive_seed
from lorimer.cookbook.datasets import GeneratedDataset
from lorimer.cookbook.datums import conversation_to_datum
from lorimer.cookbook.logs import open_log
from lorimer.cookbook.messages import Message, text_of
from lorimer.cookbook.renderers import Renderer, get_renderer
from lorimer.cookbook.rl.envs import Action, Env, EnvGroupBuilder, Metrics, StepResult
from lorimer.cookbook.rl.metrics import rollout_metrics
from lorimer.cookbook.rl.rollouts import Policy, do_group_rollout
from lorimer.cookbook.rl.updates import Update, UpdateConfig
from lorimer.cookbook.service import get_tokenizer, open_service
from lorimer.types import ModelInput, SamplingParams

MOST_STONES = 12
PLAYERS = ("one", "two")


def ask(num_stones: int) -> list[Message]:
    return [{"role": "user", "content": f"Stones: {num_stones}. Take 1, 2 or 3."}]


def read_move(renderer: Renderer, action: Action, num_stones: int) -> int | None:
    """The number of stones taken, or ``None`` for what is no legal move."""
    said = text_of(renderer.parse_response(action)[0]).strip()
    return int(said) if said in ("1", "2", "3") and int(said) <= num_stones else None


class NimEnv(Env):
    """One game, seen by one player: 1 for a win, -1 for a defeat or an illegal move."""

    def __init__(self, renderer: Renderer, num_stones: int, begins: bool, opponent: TokenCompleter) -> None:
        self.renderer, self.num_stones, self.begins, self.opponent = renderer, num_stones, begins, opponent

    def _prompt(self) -> ModelInput:
        return self.renderer.build_generation_prompt(ask(self.num_stones))

    async def _opponent_moves(self) -> bool:
        """Whether the opponent made a legal move."""
        sampled = await self.opponent(self._prompt(), self.renderer.get_stop_sequences())
        move = read_move(self.renderer, sampled.tokens, self.num_stones)
        self.num_stones -= move or 0
        return move is not None

    async def initial_observation(self) -> tuple[ModelInput, list[int] | list[str]]:
        if not self.begins:
            await self._opponent_moves()  # one that is not legal leaves the pile as it is
        return self._prompt(), self.renderer.get_stop_sequences()

    async def step(self, action: Action) -> StepResult:
        move = read_move(self.renderer, action, self.num_stones)
        self.num_stones -= move or 0
        if move is None:
            return self._end(-1.0, is_legal=False)
        if self.num_stones == 0 or not await self._opponent_moves():
            return self._end(1.0)
        if self.num_stones == 0:
            return self._end(-1.0)
        return StepResult(0.0, False, self._prompt(), self.renderer.get_stop_sequences(), {"legal": 1})

    def _end(self, reward: float, is_legal: bool = True) -> StepResult:
        metrics: Metrics = {"legal": int(is_legal), "won": int(reward > 0)}
        return StepResult(reward, True, ModelInput.empty(), self.renderer.get_stop_sequences(), metrics)


@dataclass(frozen=True)
class NimGroup(EnvGroupBuilder):
    """Games from one pile against one opponent."""

    renderer: Renderer
    num_stones: int
    opponent: Policy
    num_games: int
    shares_start: bool = False
    """Whether the player begins: all games then begin alike, and the first move of all is one request."""

    async def make_envs(self) -> Sequence[Env]:
        return [
            NimEnv(self.renderer, self.num_stones, self.shares_start, self.opponent.completer("opponent", game))
            for game in range(self.num_games)
        ]


def show_rules(renderer: Renderer, rng: random.Random) -> Iterable[Datum]:
    num_stones = rng.randint(1, MOST_STONES)
    move: Message = {"role": "assistant", "content": str(rng.randint(1, min(3, num_stones)))}
    yield conversation_to_datum([*ask(num_stones), move], renderer)


async def share_of_winning_moves(renderer: Renderer, sampler: SamplingClient) -> float:
    """Of the piles from which one can win, those from which the likeliest move does: a random player has a third."""
    piles = [pile for pile in range(1, MOST_STONES + 1) if pile % 4]
    params = SamplingParams(max_tokens=4, temperature=0, stop=renderer.get_stop_sequences())
    prompts = [renderer.build_generation_prompt(ask(pile)) for pile in piles]
    answers = await asyncio.gather(*(sampler.sample_async(prompt, 1, params) for prompt in prompts))
    moves = [read_move(renderer, answer.sequences[0].tokens, pile) for answer, pile in zip(answers, piles, strict=True)]
    return sum(move == pile % 4 for move, pile in zip(moves, piles, strict=True)) / len(piles)


async def play_and_learn(
    clients: dict[str, TrainingClient],
    renderer: Renderer,
    update_config: UpdateConfig,
    step: int,
    seed: int,
    groups: int,
    games: int,
) -> dict[str, float]:
    """One step of both players."""
    samplers = await asyncio.gather(*(c.save_weights_and_get_sampling_client_async() for c in clients.values()))
    policies = {
        name: Policy(sampling_client=sampler, max_tokens=4, seed=derive_seed(seed, step, name), step=step)
        for name, sampler in zip(clients, samplers, strict=True)
    }

    async def learn(name: str, other: str) -> dict[str, float]:
        builders = []
        for index in range(groups):
            rng = random.Random(derive_seed(seed, step, name, index))
            pile = rng.randint(4, MOST_STONES)
            builders.append(NimGroup(renderer, pile, policies[other].seeded(index), games, rng.random() < 0.5))
        played = await asyncio.gather(
            *(do_group_rollout(builder, policies[name].seeded(index)) for index, builder in enumerate(builders))
        )
        update = Update(clients[name], update_config, step, 0)
        await update.add(played)
        await update.step_optimizer()
        metrics = rollout_metrics(played) | await update.finish()
        shown = ("env/all/won", "env/all/legal", "env/all/turns_per_episode", "optim/entropy")
        return {f"{name}/{key.rpartition('/')[2]}": metrics[key] for key in shown if key in metrics}

    first, second = await asyncio.gather(learn(*PLAYERS), learn(*PLAYERS[::-1]))
    return first | second


async def run(
    service: ServiceClient, renderer: Renderer, sft: supervised.Config, steps: int, groups: int, games: int, rate: float
) -> dict[str, float]:
    model, seed, log_dir = sft.base_model, sft.seed, sft.log_dir.parent / "rl"
    rules = (await supervised.train(sft, service)).checkpoint

    # The line of a checkpoint of player one names that of player two, so that both are of the same step.
    checkpoints = Checkpoints(log_dir, keep=1)
    last = checkpoints.last()
    one, start = await open_training_client(
        service, base_model=model, rank=sft.rank, checkpoints=checkpoints, load_from=rules.state_path
    )
    if last is not None:
        two = await service.create_training_client_from_state_with_optimizer_async(last.extra["two"])
    else:
        two = await service.create_training_client_from_state_async(rules.state_path)
    clients = dict(zip(PLAYERS, (one, two), strict=True))

    config = {"model": model, "seed": seed, "groups": groups, "games": games, "rate": rate}
    with open_log(log_dir, config=config, total_steps=steps, resume_step=start) as log:
        for step in range(start, steps):
            metrics = await play_and_learn(
                clients, renderer, UpdateConfig(learning_rate=rate), step, seed, groups, games
            )
            log.log(metrics, step)
            if (step + 1) % 10 == 0 or step + 1 == steps:
                saved = await two.save_state(f"two-{step + 1:06d}", overwrite=True)
                await checkpoints.save_async(one, step + 1, {"two": saved.path})

    samplers = {"before": await service.create_sampling_client_async(model_path=rules.sampler_path)}
    for name, client in clients.items():
        samplers[name] = await client.save_weights_and_get_sampling_client_async()
    return {name: await share_of_winning_moves(renderer, sampler) for name, sampler in samplers.items()}


def main(
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; without one it runs in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="where the run is kept")] = Path("runs/self_play"),
    sft_steps: Annotated[int, typer.Option(help="steps that show the rules")] = 30,
    steps: Annotated[int, typer.Option(help="steps of self-play")] = 60,
    groups: Annotated[int, typer.Option(help="piles of each player in a step")] = 8,
    games: Annotated[int, typer.Option(help="games from each pile")] = 8,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> None:
    with open_service(model, base_url) as service:
        renderer = get_renderer("auto", get_tokenizer(service, model))
        sft = supervised.Config(
            log_dir=log_dir / "sft",
            base_model=model,
            dataset=GeneratedDataset(lambda rng: show_rules(renderer, rng), 64, sft_steps, seed=seed),
            learning_rate=5e-3,
            rank=16,
            seed=seed,
        )
        shares = asyncio.run(run(service, renderer, sft, steps, groups, games, learning_rate))
    for name, share in shares.items():
        print(f"piles from which the winning move is found, {name}: {share:.0%}")


if __name__ == "__main__":
    typer.run(main)
