"""What each example of the documented TrainingClient does, with nothing changed but the import and the model name."""

import logging

import pytest
import torch

from lorimer import types


@pytest.fixture
def training_client(trainer):
    return trainer


@pytest.fixture
def tokenizer(trainer):
    return trainer.get_tokenizer()


@pytest.fixture
def data(tokenizer):
    inputs, targets = tokenizer.encode("Hello"), tokenizer.encode("world")
    assert len(inputs) == len(targets)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(inputs),
            loss_fn_inputs={"target_tokens": types.ModelInput.from_ints(targets)},
        )
    ]


def test_overview(service, data, tokenizer):
    training_client = service.create_lora_training_client(base_model="lorimer/debug")
    fwdbwd_future = training_client.forward_backward(data, "cross_entropy")
    optim_future = training_client.optim_step(types.AdamParams(learning_rate=1e-4))
    assert fwdbwd_future.result().loss > 0
    optim_future.result()
    with pytest.warns(DeprecationWarning, match="name"):
        sampling_client = training_client.save_weights_and_get_sampling_client("my-model")
    prompt = types.ModelInput.from_ints(tokenizer.encode("Hello"))
    result = sampling_client.sample(prompt, 1, types.SamplingParams(max_tokens=20)).result()
    tokens = result.sequences[0].tokens
    assert 1 <= len(tokens) <= 20
    assert isinstance(tokenizer.decode(tokens), str)


async def test_forward(training_client, data):
    result = await training_client.forward(data, "cross_entropy")
    assert result.loss > 0


async def test_forward_backward_and_optim_step(training_client, data):
    fwdbwd_future = training_client.forward_backward(data, "cross_entropy")
    optim_future = training_client.optim_step(types.AdamParams(learning_rate=1e-4, weight_decay=0.01))
    fwdbwd_result = await fwdbwd_future
    await optim_future
    assert (await training_client.forward(data, "cross_entropy")).loss < fwdbwd_result.loss


def test_custom_loss(training_client, data):
    def custom_loss(data, logprobs_list):
        loss = torch.mean(torch.stack([torch.mean(lp) for lp in logprobs_list]))
        return loss, {"custom_metric": loss.item()}

    result = training_client.forward_backward_custom(data, custom_loss).result()
    assert result.loss == pytest.approx(result.metrics["custom_metric"])


async def test_saving_and_loading(service, training_client, caplog):
    result = await training_client.save_state("checkpoint-001")
    with caplog.at_level(logging.WARNING, "lorimer"):
        await training_client.load_state(result.path)
        await training_client.load_state_with_optimizer(result.path)
    assert caplog.records == []
    saved = await training_client.save_weights_for_sampler("sampler-001")
    assert service.create_sampling_client(model_path=saved.path).get_base_model() == "lorimer/debug"
    sampling_client = await training_client.create_sampling_client_async(result.path)
    assert await sampling_client.get_base_model_async() == "lorimer/debug"


def test_info_and_tokenizer(training_client, tokenizer):
    info = training_client.get_info()
    assert info.model_data.model_name == "lorimer/debug"
    assert tokenizer.decode(tokenizer.encode("Hello world")) == "Hello world"
