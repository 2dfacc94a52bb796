"""Preferences: the gradient of DPO against plain torch, the loop on a real server, interrupted and not."""

import math
import random
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

import lorimer
from lorimer.cookbook import preference
from lorimer.cookbook.datasets import ShuffledDataset
from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.preference import Pair, dpo_pair, pairwise_loss, read_preference, reward_async, reward_pair
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.errors import InvalidInput
from tests.cookbook.weights import weights_of

MODEL = "lorimer/tiny"


@pytest.fixture(scope="module")
def renderer(service):
    return get_renderer("auto", get_tokenizer(service, MODEL))


def rows(number, seed=0):
    """Right sums are chosen, wrong ones rejected."""
    rng = random.Random(seed)
    made = []
    for _ in range(number):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        made.append({"prompt": f"What is {a} + {b}?", "chosen": str(a + b), "rejected": str(a + b + rng.randint(1, 3))})
    return made


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "hm?", "chosen": "a", "rejected": "b"}, "hm?"),
        ({"instruction": "say", "input": "it", "chosen": "a", "rejected": "b"}, "say\n\nit"),
        ({"instruction": "say", "input": "", "chosen": "a", "rejected": "b"}, "say"),
        (
            {
                name: [{"role": "user", "content": "hm?"}, {"role": "assistant", "content": text}]
                for name, text in (("chosen", "a"), ("rejected", "b"))
            },
            "hm?",
        ),
    ],
)
def test_rows_are_read_in_every_usual_form(row, asked):
    conversation, *answers = read_preference(row)
    assert conversation == [{"role": "user", "content": asked}]
    assert [answer["content"] for answer in answers] == ["a", "b"]


def test_rows_without_a_pair_are_refused():
    with pytest.raises(InvalidInput, match="'prompt'"):
        read_preference({"prompt": "hm?", "chosen": "a"})
    other = {"chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}], "rejected": "b"}
    with pytest.raises(InvalidInput, match="different conversations"):
        read_preference(other)


def adapter_of(service, client, directory: Path) -> Path:
    exported = client.save_weights_external(directory.name).result().path
    urls = service.create_rest_client().get_external_weights_urls(exported).result().urls
    directory.mkdir()
    for name, url in urls.items():
        (directory / name).write_bytes(httpx2.get(url).raise_for_status().content)
    return directory


def test_gradient_of_dpo_is_that_of_plain_torch(service, renderer, tmp_path):
    """One step of Adam with a huge eps moves weights by the gradient itself, which torch and PEFT find on their own."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    beta, eps = 0.7, 1e4
    pairs = [dpo_pair(row, renderer) for row in rows(3)]
    data = preference._flat(pairs)
    client = service.create_lora_training_client(MODEL, rank=4, seed=3, train_unembed=False)
    before = adapter_of(service, client, tmp_path / "before")
    base = AutoModelForCausalLM.from_pretrained(Path(lorimer.__file__).parent / "models" / "tiny", dtype=torch.float32)

    def answers_logprob(model, datum):
        tokens = torch.tensor([datum.model_input.to_ints()])
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].to_numpy().copy())
        found = model(tokens).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return found[torch.tensor(datum.loss_fn_inputs["weights"].to_numpy().copy()) == 1].sum()

    with torch.no_grad():
        reference = [answers_logprob(base, datum).item() for datum in data]
    result = client.forward_backward_custom(data, pairwise_loss(beta, reference)).result()
    client.optim_step(lorimer.AdamParams(learning_rate=eps, eps=eps)).result()
    moved = load_file(adapter_of(service, client, tmp_path / "after") / "adapter_model.safetensors")

    model = PeftModel.from_pretrained(base, before, is_trainable=True)
    policy = [answers_logprob(model, datum) for datum in data]
    margins = [beta * ((policy[i] - reference[i]) - (policy[i + 1] - reference[i + 1])) for i in range(0, len(data), 2)]
    loss = sum(-torch.log(1 / (1 + torch.exp(-margin))) for margin in margins) / len(margins)
    loss.backward()
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), abs=1e-4)
    grads: dict[str, Any] = {name: weight.grad for name, weight in model.named_parameters() if "lora_B" in name}
    found = {name: -moved[name.replace(".default", "")] for name in grads}
    assert len(found) > 10
    total = torch.sqrt(sum(grad.square().sum() for grad in grads.values()))
    apart = torch.sqrt(sum((found[name] - grad).square().sum() for name, grad in grads.items()))
    assert total > 1e-2
    assert apart / total < 2e-3


def test_loss_and_metrics_of_known_margins(renderer):
    pairs = [dpo_pair(row, renderer) for row in rows(2)]
    data = preference._flat(pairs)
    # Sums of logprobs: 1 and -1 above the reference, then -2 and 0.
    above = [1.0, -1.0, -2.0, 0.0]
    logprobs = [torch.zeros(datum.model_input.length) for datum in data]
    loss, metrics = pairwise_loss(0.5, [-value for value in above])(data, logprobs)
    expected = (math.log1p(math.exp(-1.0)) + math.log1p(math.exp(1.0))) / 2
    assert loss.item() == pytest.approx(expected)
    assert metrics == pytest.approx(
        {"loss": expected, "accuracy": 0.5, "margin": 0.0, "chosen_reward": -0.25, "rejected_reward": -0.25}
    )


def config(log_dir, renderer, *, make=dpo_pair, dataset=ShuffledDataset, **changes):
    pairs = [make(row, renderer) for row in rows(24)]
    values = {
        "log_dir": log_dir,
        "base_model": MODEL,
        "dataset": dataset(pairs, 8, num_epochs=2),
        "learning_rate": 2e-3,
        "rank": 4,
        "sinks": ["jsonl"],
        "test_pairs": [make(row, renderer) for row in rows(12, seed=1)],
    }
    return preference.Config(**(values | changes))


class Interrupted(Exception):
    pass


class Breaking(ShuffledDataset[Pair]):
    def get_batch(self, step):
        if step == 5:
            raise Interrupted
        return super().get_batch(step)


async def test_dpo_prefers_what_was_chosen_and_goes_on_where_it_was(service, renderer, log_dir):
    options = {"save_every": 2, "eval_every": 3}
    whole = await preference.train(config(log_dir / "whole", renderer, **options), service)
    listed = service.create_rest_client().list_runs("whole", archived="yes").result().runs
    assert [run.name for run in listed] == ["whole (reference)"], "it is not among the user's runs"
    first, *_, last = lines = read_metrics(log_dir / "whole")
    assert [line["step"] for line in lines] == list(range(7))
    assert first["train/margin"] == first["test/margin"] == 0, "the reference is where it began"
    assert first["train/accuracy"] == 0.5, "neither is preferred yet"
    assert first["train/loss"] == pytest.approx(math.log(2))
    assert last["test/margin"] > 0.05 > first["test/margin"]
    assert last["test/accuracy"] >= 0.75

    with pytest.raises(Interrupted):
        await preference.train(config(log_dir / "cut", renderer, dataset=Breaking, **options), service)
    assert 2 <= len(read_metrics(log_dir / "cut")) < 6
    resumed = await preference.train(config(log_dir / "cut", renderer, **options), service)

    def logged(directory):
        return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(directory)]

    assert logged(log_dir / "cut") == logged(log_dir / "whole")
    assert resumed.checkpoint.step == whole.checkpoint.step == 6
    assert len({weights_of(service, result.checkpoint.state_path) for result in (whole, resumed)}) == 1
    assert await preference.train(config(log_dir / "cut", renderer, **options), service) == resumed


async def test_reference_is_the_checkpoint_that_a_run_begins_with(service, renderer, log_dir):
    first = await preference.train(config(log_dir / "first", renderer, max_steps=2), service)
    options = {"load_from": first.checkpoint.state_path, "eval_every": 1, "max_steps": 1}
    await preference.train(config(log_dir / "second", renderer, **options), service)
    before, after = read_metrics(log_dir / "second")
    assert before["train/margin"] == before["test/margin"] == before["test/chosen_reward"] == 0
    assert after["test/margin"] != 0


async def test_reward_model_judges_as_it_was_taught(service, renderer, log_dir):
    settings = config(log_dir, renderer, make=reward_pair, kind="reward_model", beta=1.0, learning_rate=1e-2)
    result = await preference.train(settings, service)
    metrics = read_metrics(log_dir)
    assert metrics[5]["train/loss"] < metrics[0]["train/loss"]
    judge = await service.create_sampling_client_async(model_path=result.checkpoint.sampler_path)
    row = rows(1)[0]
    conversations = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}]
        for name in ("chosen", "rejected")
    ]
    rewards = [await reward_async(judge, conversation, renderer) for conversation in conversations]
    scores = await preference.score_all(judge, preference._flat([reward_pair(row, renderer)]))
    assert rewards == pytest.approx(scores, abs=1e-3)
    assert all(reward < 0 for reward in rewards)


@pytest.mark.parametrize(("changes", "reason"), [({"beta": 0.0}, r"beta is 0\.0"), ({"kind": "ppo"}, "'ppo'")])
def test_configuration_is_checked(renderer, log_dir, changes, reason):
    with pytest.raises(InvalidInput, match=reason):
        config(log_dir, renderer, **changes)
