"""Full runs through the SDKs: training beside adapters, saving, loading, sampling, and a server that is killed."""

import multiprocessing
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import psutil
import pytest
import tinker
from safetensors import safe_open
from safetensors.numpy import load_file

import lorimer
from lorimer import types
from lorimer.cli.download import download_checkpoint
from lorimer.engine.reservations import reserved_bytes
from tests.client.examples import batch, logprobs, prompt
from tests.client.test_restart import Restartable
from tests.conformance.servers import children, create_key, is_engine, running_server

MODEL = "lorimer/debug"
ADAM = types.AdamParams(learning_rate=3e-3)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    data = tmp_path_factory.mktemp("full") / "data"
    with running_server(data, [MODEL]) as running:
        yield running


@pytest.fixture(scope="module")
def key(server):
    return create_key(server.data, "full")


@pytest.fixture
def service(server, key):
    with lorimer.ServiceClient(base_url=server.url, api_key=key) as service:
        yield service


def take_steps(trainer, number, data=None):
    losses = []
    for _ in range(number):
        losses.append(trainer.forward_backward(data or batch(), "cross_entropy").result(120).loss)
        trainer.optim_step(ADAM).result(120)
    return losses


def score(trainer):
    return logprobs(trainer.forward(batch(), "cross_entropy").result(120))


def engines(pid):
    return [one for one in children(pid, recursive=True) if is_engine(one)]


def words(process):
    """The command of a process; nothing if it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_full_run_is_saved_loaded_and_sampled(service, tmp_path):
    trainer = service.create_training_client(MODEL, method="full")
    info = trainer.get_info()
    assert (info.method, info.is_lora, info.lora_rank) == ("full", False, None)
    losses = take_steps(trainer, 4)
    assert losses[-1] < losses[0]
    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=12, seed=3, stop=[])
    before = sampler.sample(prompt(), 2, params).result(120).sequences
    saved = trainer.save_state("middle").result(120).path
    named = trainer.save_weights_for_sampler("middle").result(120).path
    expected = take_steps(trainer, 2), score(trainer)
    # Copies for sampling do not change, in memory or read from what was saved.
    for found in (sampler, service.create_sampling_client(model_path=named)):
        after = found.sample(prompt(), 2, params).result(120).sequences
        assert [s.tokens for s in after] == [s.tokens for s in before]
        np.testing.assert_allclose([s.logprobs for s in after], [s.logprobs for s in before], atol=1e-6)
    run = service.create_rest_client().get_training_run(trainer.model_id).result()
    assert (run.method, run.is_lora, run.train_embed, run.train_norms) == ("full", False, True, True)
    # What is downloaded is the model, without the state of training.
    files = download_checkpoint(service.create_rest_client(), saved, tmp_path / "model", force=False)
    names = {file.name for file in files}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.startswith("training_state") for name in names)
    model = tmp_path / "model" / "model.safetensors"
    assert "model.embed_tokens.weight" in load_file(model)
    # In the same run, and in a new one.
    trainer.load_state_with_optimizer(saved).result(120)
    # A load ends with a snapshot: weights and two moments.
    run, size = service.create_rest_client().get_training_run(trainer.model_id).result(), model.stat().st_size
    assert 2.9 * size < run.snapshot_bytes < 2 * 4.2 * size
    np.testing.assert_array_equal(take_steps(trainer, 2), expected[0])
    np.testing.assert_array_equal(score(trainer), expected[1])
    again = service.create_training_client_from_state_with_optimizer(saved)
    assert again.get_info().method == "full"
    np.testing.assert_array_equal(take_steps(again, 2), expected[0])
    np.testing.assert_array_equal(score(again), expected[1])
    fresh = service.create_training_client_from_state(saved)
    assert take_steps(fresh, 1) == expected[0][:1]


def test_full_runs_and_adapters_do_not_disturb_each_other(service):
    def work(make):
        trainer = make()
        losses = take_steps(trainer, 6)
        sampler = trainer.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=8, seed=1, stop=[])
        return losses, sampler.sample(prompt(), 1, params).result(120).sequences[0].logprobs, score(trainer)

    makers = [
        lambda: service.create_training_client(MODEL, method="full"),
        lambda: service.create_lora_training_client(MODEL, rank=4, seed=1),
        lambda: service.create_training_client(MODEL, method="full", train_embed=False, train_unembed=False),
        lambda: service.create_lora_training_client(MODEL, rank=8, seed=2),
    ]
    alone = [work(make) for make in makers]
    together = [None] * len(makers)

    def fill(index):
        together[index] = work(makers[index])

    threads = [threading.Thread(target=fill, args=[index]) for index in range(len(makers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for ours, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-4)
        np.testing.assert_allclose(ours[2], theirs[2], atol=1e-4)


def train_officially(url, key):
    """Return what the official SDK says of a full run, its losses, and what a resumed run and a sampler give."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    trainer = service.create_lora_training_client(f"{MODEL}:full", rank=8)
    info = trainer.get_info()
    tokens = list(range(5, 25))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": np.ones(19, np.float32)},
    )
    losses = []
    for _ in range(3):
        losses.append(trainer.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
        trainer.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()
    path = trainer.save_state("mine").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    sampler = trainer.save_weights_and_get_sampling_client()
    found = sampler.sample(
        tinker.ModelInput.from_ints(tokens[:5]), 1, tinker.SamplingParams(max_tokens=4, temperature=0.0)
    ).result()
    are_adapters = info.is_lora, resumed.get_info().is_lora
    return are_adapters, info.model_data.model_name, losses, list(found.sequences[0].tokens)


def test_official_sdk_asks_for_a_full_run_by_the_name_of_the_model(server, key):
    # In a process of its own: it leaves connections to the garbage collector, which would tell of them in another test.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
        are_adapters, name, losses, tokens = elsewhere.submit(train_officially, server.url, key).result()
    assert are_adapters == (False, False) and name == MODEL
    assert losses[2] < losses[0] and tokens


def test_what_does_not_fit_is_refused_by_name(service):
    with pytest.raises(ValueError, match="rank: a run of the method 'full' has none"):
        service.create_training_client(MODEL, method="full", rank=8)
    with pytest.raises(ValueError, match="train_embed: a run of the method 'lora' has none"):
        service.create_training_client(MODEL, train_embed=True)
    with pytest.raises(ValueError, match="all false"):
        service.create_training_client(
            MODEL,
            method="full",
            **dict.fromkeys(["train_attn", "train_mlp", "train_unembed", "train_embed", "train_norms"], False),
        )
    full = service.create_training_client(MODEL, method="full")
    adapter = service.create_training_client(MODEL, rank=4)
    path = full.save_state("full").result(120).path
    with pytest.raises(lorimer.BadRequestError, match="the weights have method 'full', the run 'lora'"):
        adapter.load_state(path).result(120)


@pytest.mark.slow
def test_a_full_run_survives_kills_of_its_engine_and_of_the_server(tmp_path):
    server = Restartable(tmp_path / "data")
    try:
        with lorimer.ServiceClient(base_url=server.url) as service:
            expected = take_steps(undisturbed := service.create_training_client(MODEL, method="full"), 12)
            scores = score(undisturbed)
            trainer = service.create_training_client(MODEL, method="full")
            losses = take_steps(trainer, 3)
            waiting = []
            for _ in range(9):
                waiting.append(trainer.forward_backward(batch(), "cross_entropy"))
                trainer.optim_step(ADAM)
            for engine in engines(server.process.pid):
                engine.kill()
            time.sleep(0.7)
            server.kill()
            server.start()
            losses += [future.result(240).loss for future in waiting]
            np.testing.assert_array_equal(losses, expected)
            np.testing.assert_array_equal(score(trainer), scores)
    finally:
        server.stop()


@pytest.mark.slow
def test_the_engine_of_an_idle_full_run_ends_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running_server(tmp_path / "data", [MODEL], full_idle_seconds=1.0, max_full_runs=1) as server:
        (parent,) = [p for p in psutil.process_iter() if {str(server.data), "serve"} <= set(words(p))]
        with lorimer.ServiceClient(base_url=server.url) as service:
            trainer = service.create_training_client(MODEL, method="full")
            before = take_steps(trainer, 2), score(trainer)
            assert len(engines(parent.pid)) == 2
            assert reserved_bytes() > 0, "the next gradient"
            deadline = time.monotonic() + 60
            while len(engines(parent.pid)) > 1:
                assert time.monotonic() < deadline, "the engine of the idle run ends"
                time.sleep(0.1)
            assert reserved_bytes() == 0
            np.testing.assert_array_equal(score(trainer), before[1])
            path = trainer.save_state("kept").result(120).path
            with safe_open(next((server.data / "weights").glob("*/model.safetensors")), framework="pt") as file:
                assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118
            assert path.endswith("/kept")


def test_full_runs_can_be_switched_off(tmp_path):
    with (
        running_server(tmp_path / "data", [MODEL], max_full_runs=0) as server,
        lorimer.ServiceClient(base_url=server.url) as service,
        pytest.raises(lorimer.BadRequestError, match="max_full_runs is 0"),
    ):
        service.create_training_client(MODEL, method="full")
