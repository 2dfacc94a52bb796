"""Reinforcement learning in one flat loop on the bare SDK: a model learns addition by trial and error.

    python -m lorimer.recipes.rl_loop

Each step samples 8 answers to each of 32 sums, rewards the correct ones, and makes answers with a reward above the mean
of their group more likely. With lorimer/tiny it takes 160 s of CPU time on 2 virtual cores without bfloat16; 27 % of
the answers are correct in the first five steps, 61 % in the last five. After an interruption it resumes from its last
checkpoint.

P: sums of a step, G: answers to one sum.
"""

import json
import random
from pathlib import Path
from typing import Annotated, Any

import typer

from lorimer import types
from lorimer.cookbook.program import recipe_service
from lorimer.terminal import run_recipe


def main(
    model: Annotated[str, typer.Option(help="base model")] = "lorimer/tiny",
    base_url: Annotated[str | None, typer.Option(help="server; else one that runs, else in this process")] = None,
    log_dir: Annotated[Path, typer.Option(help="where the run is kept")] = Path("runs/rl_loop"),
    steps: Annotated[int, typer.Option(min=1)] = 80,
    batch_size: Annotated[int, typer.Option(help="sums in a step", min=1)] = 32,
    group_size: Annotated[int, typer.Option(help="answers to each sum", min=1)] = 8,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 4e-3,
    rank: Annotated[int, typer.Option(min=1)] = 16,
    save_every: Annotated[int, typer.Option(min=1)] = 10,
    seed: int = 0,
) -> None:
    state_file = log_dir / "state.json"
    state: dict[str, Any] = json.loads(state_file.read_text()) if state_file.exists() else {"step": 0, "rewards": []}
    with recipe_service(model, base_url) as service:
        if state["step"]:
            trainer = service.create_training_client_from_state_with_optimizer(state["path"])
            print(f"resumed at step {state['step']} from {state['path']}, with rank {trainer.get_info().lora_rank}")
        else:
            trainer = service.create_lora_training_client(model, rank=rank, seed=seed)
        tokenizer = trainer.get_tokenizer()

        num_idle = 0
        for step in range(state["step"], steps):
            rng = random.Random(f"{seed} {step}")  # depends only on the step, so that a resumed run draws the same sums
            sums_P = [(rng.randrange(100), rng.randrange(100)) for _ in range(batch_size)]
            prompts_P = [prompt_tokens(tokenizer, a, b) for a, b in sums_P]

            # Sample. Submit all requests before waiting for the first.
            sampler = trainer.save_weights_and_get_sampling_client()
            sampled_P = [
                sampler.sample(
                    types.ModelInput.from_ints(prompt),
                    num_samples=group_size,
                    sampling_params=types.SamplingParams(max_tokens=8, seed=rng.getrandbits(31)),
                )
                for prompt in prompts_P
            ]

            # Compute the rewards, and the advantages within each group.
            data, mean_rewards_P = [], []
            for (a, b), prompt, sampled in zip(sums_P, prompts_P, sampled_P, strict=True):
                answers_G = sampled.result().sequences
                texts_G = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers_G]
                rewards_G = [float(text.strip() == str(a + b)) for text in texts_G]
                mean_reward = sum(rewards_G) / group_size
                mean_rewards_P.append(mean_reward)
                for answer, reward in zip(answers_G, rewards_G, strict=True):
                    if reward != mean_reward:
                        data.append(make_datum(prompt, answer, advantage=reward - mean_reward))

            # Update the weights.
            if data:
                trainer.forward_backward(data, "importance_sampling")
                # Warm up: the first steps of Adam are large, and these few answers are noisy.
                rate = learning_rate * min((step + 1) / 9, 1 - step / steps)
                trainer.optim_step(types.AdamParams(learning_rate=rate)).result()
            state["rewards"].append(sum(mean_rewards_P) / batch_size)
            print(f"step {step + 1}/{steps}  reward {state['rewards'][-1]:.3f}  answers learned from {len(data)}")
            num_idle = 0 if data else num_idle + 1
            if num_idle == 3:
                print(
                    "warning: nothing was learned in the last 3 steps, because no sum had answers of different rewards"
                )
                print("look at the answers; a larger --group-size or an easier task gives a signal")

            if (step + 1) % save_every == 0 or step + 1 == steps:
                state |= {"step": step + 1, "path": trainer.save_state(f"{step + 1:06d}", overwrite=True).result().path}
                log_dir.mkdir(parents=True, exist_ok=True)
                part = state_file.with_suffix(".part")
                part.write_text(json.dumps(state))
                part.replace(state_file)

    first, last = (sum(rewards) / len(rewards) for rewards in (state["rewards"][:5], state["rewards"][-5:]))
    print(f"right answers in the first five steps {first:.0%}, in the last five {last:.0%}")
    print(f"saved as {state['path']}")


def prompt_tokens(tokenizer: Any, a: int, b: int) -> list[int]:
    messages = [{"role": "user", "content": f"What is {a} + {b}?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def make_datum(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """Build a datum that predicts each next token. Prompt tokens have no advantage, and therefore no gradient."""
    assert answer.logprobs is not None
    tokens = prompt + answer.tokens
    before = len(prompt) - 1
    inputs: dict[str, Any] = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * before + answer.logprobs,
        "advantages": [0.0] * before + [advantage] * len(answer.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


if __name__ == "__main__":
    run_recipe(main)
