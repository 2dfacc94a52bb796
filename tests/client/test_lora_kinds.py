"""Kinds of LoRA through the SDK: rsLoRA, DoRA, and runs that begin with an adapter that PEFT wrote."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import lorimer
from lorimer import types
from lorimer.errors import LorimerError
from lorimer.models.debug import make_debug_model
from tests.client.examples import batch, logprobs
from tests.client.test_restart import Restartable

MODEL = "lorimer/debug"


def plain_model(directory: Path) -> Any:
    make_debug_model(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def peft_logprobs(model: Any) -> np.ndarray:
    found = []
    for datum in batch():
        tokens = torch.tensor([datum.model_input.to_ints()])
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
        with torch.no_grad():
            found.append(model(tokens).logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return torch.cat(found).numpy()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Path:
    """Adapters that PEFT wrote, with ranks of their own, as EVA makes them; and one that changes the base model."""
    root = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    for folder, use_dora in (("ranks", False), ("dora", True)):
        model = plain_model(root.parent / f"base-{folder}")
        names = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
        config = peft.LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=sorted(names),
            rank_pattern={"q_proj": 6, "down_proj": 2},
            use_dora=use_dora,
            task_type="CAUSAL_LM",
        )
        made = peft.get_peft_model(model, config).eval()
        for key, parameter in made.named_parameters():
            if "lora_magnitude" in key:
                parameter.data *= torch.empty(parameter.shape).uniform_(0.7, 1.3)
            elif "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        made.save_pretrained(root / folder, save_embedding_layers=False)
        np.save(root / folder / "logprobs.npy", peft_logprobs(made))
    shutil.copytree(root / "ranks", root / "pissa")
    settings = json.loads((root / "ranks" / "adapter_config.json").read_text())
    changed = settings | {"init_lora_weights": "pissa"}
    (root / "pissa" / "adapter_config.json").write_text(json.dumps(changed))
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory, adapters):
    running = Restartable(tmp_path_factory.mktemp("kinds") / "data", "--set", f"peft_adapters={adapters}")
    yield running
    running.stop()


@pytest.fixture
def service(server):
    with lorimer.ServiceClient(base_url=server.url) as client:
        yield client


def train(trainer: lorimer.TrainingClient) -> None:
    trainer.forward_backward(batch(), "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=5e-3)).result(60)


def evaluate(trainer: lorimer.TrainingClient) -> np.ndarray:
    return logprobs(trainer.forward(batch(), "cross_entropy").result(60))


@pytest.mark.parametrize("name", ["ranks", "dora"])
def test_run_begins_with_an_adapter_of_peft_and_outlives_it(server, service, adapters, name):
    """Its first logprobs are PEFT's; after its creation the run no longer needs the adapter, even after a kill."""
    trainer = service.create_lora_training_client(MODEL, rank=6, init_from=name, use_dora=name == "dora")
    np.testing.assert_allclose(evaluate(trainer), np.load(adapters / name / "logprobs.npy"), atol=1e-4)
    train(trainer)
    expected = evaluate(trainer)
    (adapters / name).rename(adapters / "gone")
    try:
        server.kill()
        server.start()
        np.testing.assert_array_equal(evaluate(trainer), expected)
    finally:
        (adapters / "gone").rename(adapters / name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_from": "pissa", "rank": 6}, "init_lora_weights='pissa' changes the base model"),
        ({"init_from": "dora", "rank": 6}, "the saved adapter has use_dora=True, the run has use_dora=False"),
        ({"init_from": "ranks", "rank": 6, "use_dora": True}, "has use_dora=False, the run has use_dora=True"),
        ({"init_from": "ranks", "rank": 4}, "the saved adapter has rank 6, the run has rank 4"),
        ({"init_from": "ranks", "rank": 6, "train_mlp": False}, "train different modules"),
        ({"init_from": "../ranks"}, r"no adapter '../ranks'; accepted are 'dora', 'pissa', 'ranks'"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_name(service, options, words):
    with pytest.raises(LorimerError, match=words):
        service.create_lora_training_client(MODEL, **options)


@pytest.mark.parametrize("kind", ["use_rslora", "use_dora"])
def test_the_kind_is_kept_with_the_weights(service, kind):
    """In runs made from them, in samplers, and in what the server says of both."""
    trainer = service.create_lora_training_client(MODEL, rank=16, seed=7, **{kind: True})
    train(trainer)
    expected = evaluate(trainer)
    path = trainer.save_state("rs").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    np.testing.assert_array_equal(evaluate(resumed), expected)
    for run in (trainer, resumed):
        train(run)
    np.testing.assert_array_equal(evaluate(resumed), evaluate(trainer))
    rest = service.create_rest_client()
    assert getattr(rest.get_training_run(trainer.model_id).result(), kind) is True
    with pytest.raises(LorimerError, match=f"the weights have {kind} True, the run False"):
        service.create_lora_training_client(MODEL, rank=16).load_state(path).result()
    sampler = service.create_sampling_client(model_path=path)
    scores = np.array(sampler.compute_logprobs(batch(1)[0].model_input).result(60)[1:])
    np.testing.assert_allclose(scores, expected[: len(scores)], atol=1e-4)


def test_our_fields_are_sent_only_if_they_are_asked_for():
    assert types.LoraConfig(rank=4).model_dump(mode="json").keys() == {
        *("rank", "seed", "train_unembed", "train_mlp", "train_attn")
    }
    assert types.LoraConfig(rank=4, use_rslora=True).model_dump(mode="json")["use_rslora"] is True
