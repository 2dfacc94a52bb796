"""The training client against a real server: values, order, chunks, custom losses, saving and loading."""

import asyncio
import io
import tarfile
import threading
import urllib.request
from datetime import UTC, datetime

import numpy as np
import pytest
import torch

import lorimer
from lorimer import types
from tests.client.examples import batch, datum, logprobs, prompt, weighted_sum

ADAM = types.AdamParams(learning_rate=1e-2)


def test_loss_is_the_weighted_sum_of_logprobs(trainer):
    data = batch()
    output = trainer.forward(data, "cross_entropy").result()
    assert output.loss == output.metrics["loss:sum"] == pytest.approx(weighted_sum(data, output), rel=1e-5)
    assert [len(one["logprobs"].to_numpy()) for one in output.loss_fn_outputs] == [5, 8, 11]


def test_training_lowers_the_loss(trainer):
    data = batch()
    losses = []
    for _ in range(5):
        output = trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(ADAM)
        losses.append(output)
    values = [future.result().loss for future in losses]
    assert values == sorted(values, reverse=True) and values[-1] < values[0] - 1


async def test_twins_do_the_same_and_are_awaited_twice(trainer):
    data = batch()
    future = await trainer.forward_backward_async(data, "cross_entropy")
    stepped = await trainer.optim_step_async(adam_params=ADAM)
    output, _ = await future, await stepped
    after = await (await trainer.forward_async(data, "cross_entropy"))
    assert (await future).loss == output.loss > after.loss
    assert (await trainer.get_info_async()).model_id == trainer.model_id


def test_order_of_calls_is_the_order_of_execution_from_any_thread(trainer):
    """Each thread trains and looks in turn; whoever looks last sees all steps."""
    data, lock, seen = batch(1), threading.Lock(), []

    def work() -> None:
        for _ in range(5):
            with lock:
                trainer.forward_backward(data, "cross_entropy")
                trainer.optim_step(ADAM)
                seen.append(trainer.forward(data, "cross_entropy"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = [future.result().loss for future in seen]
    assert values == sorted(values, reverse=True) and len(set(values)) == 20


def test_chunks_are_merged_as_one(service, monkeypatch):
    data = batch(7)
    whole = service.create_lora_training_client("lorimer/debug", rank=4, seed=7)
    parts = service.create_lora_training_client("lorimer/debug", rank=4, seed=7)
    one = whole.forward_backward(data, "cross_entropy").result()
    small = parts._connection.config.model_copy(update={"fwdbwd_max_chunk_len": 2})
    monkeypatch.setattr(parts._connection, "config", small)
    many = parts.forward_backward(data, "cross_entropy").result()
    assert len(many.loss_fn_outputs) == 7
    np.testing.assert_allclose(logprobs(many), logprobs(one), atol=1e-5)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert parts._operations._next_number == 5


def test_save_and_load_give_the_same_values_back(service, trainer):
    data = batch()
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(ADAM)
    saved = trainer.save_state("middle", user_metadata={"step": "1"}).result()
    before = trainer.forward(data, "cross_entropy").result()
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(ADAM)
    further = trainer.forward(data, "cross_entropy").result()
    assert further.loss < before.loss
    trainer.load_state_with_optimizer(saved.path).result()
    np.testing.assert_array_equal(logprobs(trainer.forward(data, "cross_entropy").result()), logprobs(before))

    other = service.create_training_client_from_state_with_optimizer(saved.path)
    other.forward_backward(data, "cross_entropy")
    other.optim_step(ADAM)
    np.testing.assert_allclose(logprobs(other.forward(data, "cross_entropy").result()), logprobs(further), atol=1e-5)


def test_from_state_also_works_in_three_requests(service, trainer, monkeypatch):
    data = batch()
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(ADAM)
    path = trainer.save_state("three").result().path
    config = service._connection.config.model_copy(update={"create_model_via_load_weights": False})
    monkeypatch.setattr(service._connection, "config", config)
    other = service.create_training_client_from_state(path)
    expected = trainer.forward(data, "cross_entropy").result()
    np.testing.assert_array_equal(logprobs(other.forward(data, "cross_entropy").result()), logprobs(expected))


def test_ephemeral_sampler_has_the_weights_of_its_moment(trainer):
    data = batch(1)
    inputs = data[0].model_input.to_ints() + data[0].loss_fn_inputs["target_tokens"].data[-1:]
    before = trainer.forward(data, "cross_entropy").result()
    sampler = trainer.save_weights_and_get_sampling_client()
    trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(ADAM)
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(inputs)).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], logprobs(before), atol=1e-4)


def custom(data, logprobs_list):
    loss = sum(
        (-logprob * torch.tensor(item.loss_fn_inputs["weights"].data)).sum()
        for item, logprob in zip(data, logprobs_list, strict=True)
    )
    return loss, {"seen": float(len(data))}


def test_custom_loss_equal_to_cross_entropy_trains_equally(service):
    data, clients = batch(), [service.create_lora_training_client("lorimer/debug", rank=4, seed=7) for _ in range(2)]
    expected = clients[0].forward_backward(data, "cross_entropy").result()
    output = clients[1].forward_backward_custom(data, custom).result()
    assert output.loss == pytest.approx(expected.loss, rel=1e-5)
    assert output.metrics["seen"] == 3.0 and "surrogate_loss:sum" in output.metrics
    for client in clients:
        client.optim_step(ADAM)
    after = [logprobs(client.forward(data, "cross_entropy").result()) for client in clients]
    np.testing.assert_allclose(after[0], after[1], atol=1e-4)


async def test_custom_loss_can_be_awaited(trainer):
    future = await trainer.forward_backward_custom_async(batch(), custom)
    assert (await future).metrics["seen"] == 3.0


def per_datum(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/tokens:sum": torch.ones_like(logprobs).sum(), "custom/loss:mean": loss}


@pytest.mark.parametrize("on_server", [True, False], ids=["on the server", "here"])
def test_traced_loss_runs_in_both_places(service, trainer, monkeypatch, on_server):
    config = service._connection.config.model_copy(update={"custom_loss_server_side": on_server})
    monkeypatch.setattr(service._connection, "config", config)
    data = batch()
    expected = trainer.forward(data, "cross_entropy").result()
    handle = service.create_custom_loss(per_datum, {"logprobs": 1, "weights": 1}).result()
    assert (handle.loss_id is not None) == on_server
    output = trainer.forward_backward_custom(data, handle).result()
    assert output.loss == pytest.approx(expected.loss, rel=1e-5)
    assert output.metrics["custom/tokens:sum"] == 24.0
    assert output.metrics["custom/loss:mean"] == pytest.approx(expected.loss / 3, rel=1e-5)


def test_failed_work_says_why_and_the_run_goes_on(trainer):
    future = trainer.forward_backward([datum()], "no_such_loss")
    with pytest.raises(lorimer.TinkerError, match="no_such_loss"):
        future.result()
    assert trainer.forward([datum()], "cross_entropy").result().loss > 0


def test_cancelled_wait_leaves_no_gap(trainer):
    for _ in range(3):
        trainer.forward_backward(batch(), "cross_entropy").future().cancel()
    assert trainer.optim_step(ADAM).result(30).metrics is not None


def test_result_can_be_asked_for_with_a_timeout_and_again(trainer):
    future = trainer.forward_backward(batch(), "cross_entropy")
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    assert future.result().loss == future.result().loss


def test_archive_of_a_checkpoint_is_downloaded_as_official_releases_up_to_035_do(service, trainer):
    path = trainer.save_weights_for_sampler("archived").result().path
    rest = service.create_rest_client()
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(path)
    answers = [
        rest.get_checkpoint_archive_url_from_tinker_path(path).result(),
        rest.get_checkpoint_archive_url(parsed.training_run_id, parsed.checkpoint_id).result(),
        asyncio.run(rest.get_checkpoint_archive_url_from_tinker_path_async(path)),
        asyncio.run(rest.get_checkpoint_archive_url_async(parsed.training_run_id, parsed.checkpoint_id)),
    ]
    for answer in answers:
        assert isinstance(answer, types.CheckpointArchiveUrlResponse)
        assert answer.expires > datetime.now(UTC)
        with (
            urllib.request.urlopen(answer.url, timeout=30) as downloaded,
            tarfile.open(fileobj=io.BytesIO(downloaded.read())) as archive,
        ):
            assert {"adapter_model.safetensors", "adapter_config.json"} <= set(archive.getnames())
    with pytest.raises(lorimer.NotFoundError):
        rest.get_checkpoint_archive_url(parsed.training_run_id, "sampler_weights/none").result()
    with pytest.raises(ValueError, match="'tinker://nothing'"):
        rest.get_checkpoint_archive_url_from_tinker_path("tinker://nothing")


def test_external_weights_and_sampler_checkpoints(service, trainer):
    path = trainer.save_weights_for_sampler("kept").result().path
    sampler = service.create_sampling_client(model_path=path)
    assert sampler.get_base_model() == "lorimer/debug"
    external = trainer.save_weights_external("files").result().path
    urls = service.create_rest_client().get_external_weights_urls(external).result().urls
    assert "adapter_model.safetensors" in urls
    assert sampler.sample(prompt(), 2, types.SamplingParams(max_tokens=3)).result().sequences[1].tokens
