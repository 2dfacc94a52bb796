"""What each example of the documented TrainingClient does, over HTTP and in this process.

``DOCUMENTED_SDK_PAGE`` may name a copy of that page: its examples are then run as they stand, but for the import,
the name of the model and the run in paths.
"""

import ast
import contextlib
import inspect
import logging
import os
import re
from pathlib import Path
from types import CodeType

import pytest
import torch

from lorimer import types

MODEL = "lorimer/debug"
PAGE = os.environ.get("DOCUMENTED_SDK_PAGE")


@pytest.fixture(scope="module")
def service(either_service):
    return either_service


@pytest.fixture
def tokenizer(trainer):
    return trainer.get_tokenizer()


@pytest.fixture
def data(tokenizer):
    """Targets as a ``ModelInput``, and no weights."""
    inputs, targets = tokenizer.encode("Hello"), tokenizer.encode("world")
    assert len(inputs) == len(targets)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(inputs),
            loss_fn_inputs={"target_tokens": types.ModelInput.from_ints(targets)},
        )
    ]


def test_overview(service, data, tokenizer):
    trainer = service.create_lora_training_client(base_model=MODEL)
    passed = trainer.forward_backward(data, "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
    assert passed.result().loss > 0
    assert isinstance(stepped.result(), types.OptimStepResponse)
    with pytest.warns(DeprecationWarning, match="name"):
        sampler = trainer.save_weights_and_get_sampling_client("my-model")
    assert sampler.compute_logprobs(data[0].model_input).result()[0] is None


async def test_forward(trainer, data):
    result = await trainer.forward(data, "cross_entropy")
    logprobs = result.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert result.loss == pytest.approx(-logprobs.sum(), rel=1e-5)
    assert (await (await trainer.forward_async(data, "cross_entropy"))).loss == result.loss


async def test_forward_backward(trainer, data):
    passed = trainer.forward_backward(data, "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    before = (await passed).loss
    await stepped
    assert (await trainer.forward(data, "cross_entropy")).loss < before - 0.1


def test_forward_backward_custom(trainer, data):
    def mean(data, logprobs_list):
        loss = torch.mean(torch.stack([torch.mean(logprobs) for logprobs in logprobs_list]))
        return loss, {"custom_metric": loss.item()}

    result = trainer.forward_backward_custom(data, mean).result()
    assert result.loss == pytest.approx(result.metrics["custom_metric"])
    expected = result.loss_fn_outputs[0]["logprobs"].to_numpy().mean()
    assert result.loss == pytest.approx(float(expected), rel=1e-5)


async def test_optim_step_decays_weights(service, trainer, data):
    other = service.create_lora_training_client(MODEL, rank=4, seed=7)
    found = []
    for client, decay in ((trainer, 0.0), (other, 10.0)):
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-2, weight_decay=decay))
        await passed
        await stepped
        found.append((await client.forward(data, "cross_entropy")).loss)
    assert found[0] != pytest.approx(found[1], rel=1e-6)


async def test_saving_and_loading(trainer, data, caplog):
    """Loading is quiet, and gives the weights back; with the optimiser also what the next step does."""
    step = types.AdamParams(learning_rate=1e-2)
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(step)
    path = (await trainer.save_state("checkpoint-001")).path
    assert path == f"tinker://{trainer.model_id}/weights/checkpoint-001"
    before = (await trainer.forward(data, "cross_entropy")).loss
    after = []
    with caplog.at_level(logging.WARNING, "lorimer"):
        for load in (trainer.load_state, trainer.load_state_with_optimizer):
            trainer.forward_backward(data, "cross_entropy")
            await trainer.optim_step(step)
            await load(path)
            assert (await trainer.forward(data, "cross_entropy")).loss == before
            trainer.forward_backward(data, "cross_entropy")
            trainer.optim_step(step)
            after.append((await trainer.forward(data, "cross_entropy")).loss)
    assert [record for record in caplog.records if record.name.startswith("lorimer")] == []
    assert after[0] != after[1]


async def test_samplers_of_saved_weights(service, trainer, data):
    saved = await trainer.save_weights_for_sampler("sampler-001")
    assert saved.path.endswith("/sampler_weights/sampler-001")
    state = await trainer.save_state("checkpoint-001")
    samplers = [
        service.create_sampling_client(model_path=saved.path),
        trainer.create_sampling_client(state.path),
        await trainer.create_sampling_client_async(state.path),
    ]
    found = [await sampler.compute_logprobs_async(data[0].model_input) for sampler in samplers]
    assert found[0][1:] == pytest.approx(found[1][1:], abs=1e-5)
    assert found[1] == found[2]


def test_info(trainer):
    data = trainer.get_info().model_data
    assert (data.model_id, data.model_name, data.lora_rank) == (trainer.model_id, MODEL, 4)


def test_tokenizer(tokenizer):
    tokens = tokenizer.encode("Hello world")
    assert tokenizer.decode(tokens) == "Hello world"


def test_sampling_from_the_present_weights(trainer, tokenizer):
    sampler = trainer.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(tokenizer.encode("Hello"))
    result = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=20)).result()
    assert 1 <= len(result.sequences[0].tokens) <= 20


# ── the page itself ───────────────────────────────────────────────────────────────────────────────────


def examples(page: str) -> list[CodeType]:
    """Its blocks of Python that can be run; signatures cannot."""
    found = []
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        with contextlib.suppress(SyntaxError):
            found.append(compile(block, block[:60], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
    return found


@pytest.mark.skipif(PAGE is None, reason="DOCUMENTED_SDK_PAGE names no copy of the page")
@pytest.mark.filterwarnings("ignore:save_weights_and_get_sampling_client:DeprecationWarning")
async def test_page_as_it_stands(service, data, tokenizer):
    assert PAGE is not None
    page = re.sub(r'base_model="[^"]*"', f'base_model="{MODEL}"', Path(PAGE).read_text("utf-8"))
    overview, *others = examples(page.replace('"tinker://run-id/', 'f"tinker://{training_client.model_id}/'))
    assert len(others) == 12
    names = {"types": types, "torch": torch, "service_client": service, "tokenizer": tokenizer, "training_data": data}
    for example in (overview, *others):
        running = eval(example, names)
        if inspect.isawaitable(running):
            await running
    assert names["info"].model_data.lora_rank == 32
    assert names["result"].sequences
