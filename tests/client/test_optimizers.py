"""Runs with each optimiser through the SDK: steps, saved and resumed runs, samplers, and a killed server."""

import numpy as np
import pytest

import lorimer
from lorimer import types
from lorimer.errors import LorimerError
from lorimer.types.optim import OPTIMIZERS, make_params
from tests.client.examples import batch, logprobs, prompt
from tests.client.test_restart import Restartable

MODEL = "lorimer/debug"


def step(trainer: lorimer.TrainingClient, name: str, number: int) -> dict[str, float]:
    """Submit a pass and a step, whose fields change with its number; return the metrics of the step."""
    trainer.forward_backward(batch(), "cross_entropy")
    params = make_params(name, learning_rate=0.01 / (number + 1), lr_multipliers={"lora_B": 4.0})
    metrics = trainer.optim_step(params).result(120).metrics
    assert metrics is not None and metrics["skipped"] == 0.0
    assert metrics["optimizer_step"] == number + 1
    return metrics


def evaluate(trainer: lorimer.TrainingClient) -> np.ndarray:
    return logprobs(trainer.forward(batch(), "cross_entropy").result(120))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_run_is_trained_saved_and_resumed(service, name):
    trainer = service.create_lora_training_client(MODEL, rank=16, seed=7, optimizer=name)
    assert trainer.get_info().optimizer_config.type == name
    before = evaluate(trainer)
    for number in range(3):
        metrics = step(trainer, name, number)
    assert (metrics["optimizer_state_bytes"] > 0) is (name != "sgd")
    assert np.abs(evaluate(trainer) - before).max() > 1e-3
    path = trainer.save_state("three").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert resumed.get_info().optimizer_config.type == name
    for run in (trainer, resumed):
        step(run, name, 3)
    np.testing.assert_array_equal(evaluate(resumed), evaluate(trainer))
    fresh = service.create_training_client_from_state(path)
    assert fresh.get_info().optimizer_config.type == "adamw"
    other = "lion" if name != "lion" else "sgd"
    with pytest.raises(LorimerError, match=f"is of '{name}', the run's optimizer is '{other}'"):
        wrong = service.create_lora_training_client(MODEL, rank=16, optimizer=types.OptimizerConfigBase(type=other))
        wrong.load_state_with_optimizer(path).result()


def test_adamw_with_its_own_parameters_is_the_adamw_of_the_official_sdk(service):
    runs = [service.create_lora_training_client(MODEL, rank=4, seed=7) for _ in range(2)]
    for run, params in zip(
        runs, (types.AdamParams(learning_rate=0.01), types.AdamWParams(learning_rate=0.01)), strict=True
    ):
        run.forward_backward(batch(), "cross_entropy")
        run.optim_step(params).result(60)
    np.testing.assert_array_equal(evaluate(runs[0]), evaluate(runs[1]))


def test_samplers_of_schedule_free_have_the_average(service):
    """Published in memory, saved for sampling, and loaded from a saved run: all the same, and not what is trained."""
    trainer = service.create_lora_training_client(MODEL, rank=8, seed=7, optimizer="schedule_free_adamw")
    for _ in range(6):
        trainer.forward_backward(batch(), "cross_entropy")
        trainer.optim_step(types.ScheduleFreeAdamWParams(learning_rate=0.02)).result(60)
    text = batch()[0].model_input
    samplers = [
        trainer.save_weights_and_get_sampling_client(),
        service.create_sampling_client(model_path=trainer.save_weights_for_sampler("s").result().path),
        service.create_sampling_client(model_path=trainer.save_state("t").result().path),
    ]
    scores = [np.array(sampler.compute_logprobs(text).result(60)[1:]) for sampler in samplers]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)
    np.testing.assert_allclose(scores[2], scores[0], atol=1e-4)
    averaged = service.create_training_client_from_state(trainer.save_state("u").result().path)
    trained, average = (logprobs(run.forward(batch(1), "cross_entropy").result(60))[:-1] for run in (trainer, averaged))
    np.testing.assert_allclose(average, scores[0], atol=1e-4)
    assert np.abs(trained - average).max() > 1e-2


def test_wrong_steps_are_refused_by_name(service):
    trainer = service.create_lora_training_client(MODEL, rank=4, seed=7, optimizer="sgd")
    for params, words in (
        (types.AdamParams(), "the run was made for 'sgd'"),
        (types.SgdParams(nesterov=True), "nesterov needs a momentum"),
        (types.SgdParams(lr_multipliers={"norms": 2.0}), "lr_multipliers has 'norms'"),
    ):
        with pytest.raises(LorimerError, match=words):
            trainer.optim_step(params).result(60)
    with pytest.raises(LorimerError, match="'dimuon' is not available: its update is not published"):
        service.create_lora_training_client(MODEL, optimizer=types.DimuonOptimizerConfig())
    with pytest.raises(LorimerError, match="'rprop' is not available: it is not known; accepted are 'adamw', 'adam'"):
        service.create_lora_training_client(MODEL, optimizer="rprop")


def train_through(service, name: str, interrupt) -> tuple[np.ndarray, np.ndarray]:
    """Return what a run of six steps ends with: logprobs of the trained weights, and those of a sampler."""
    trainer = service.create_lora_training_client(MODEL, rank=16, seed=7, optimizer=name)
    for number in range(6):
        step(trainer, name, number)
        if number == 3:
            interrupt()
    sampler = trainer.save_weights_and_get_sampling_client()
    return evaluate(trainer), np.array(sampler.compute_logprobs(prompt()).result(60)[1:])


@pytest.mark.slow
def test_a_run_of_any_optimizer_continues_after_a_kill_to_the_bit(tmp_path):
    """One run at a time: together with others a pass is rounded otherwise."""
    server = Restartable(tmp_path / "data")

    def restart() -> None:
        server.kill()
        server.start()

    try:
        with lorimer.ServiceClient(base_url=server.url) as service:
            for name in OPTIMIZERS:
                expected = train_through(service, name, lambda: None)
                found = train_through(service, name, restart)
                for ours, theirs in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(ours, theirs, err_msg=name)
    finally:
        server.stop()
