"""A quantised base behind a server: trained and sampled by the SDK, shown, and refused to full runs."""

import numpy as np
import pytest

import lorimer
from lorimer import types
from lorimer.types.overview import OverviewResponse
from tests.client.examples import batch, logprobs, prompt
from tests.conformance.servers import running_server

pytestmark = pytest.mark.service
MODELS = {"eight": "int8", "four": "nf4"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    models = ["plain=lorimer/debug", *(f"{name}=lorimer/debug,quantize={kind}" for name, kind in MODELS.items())]
    with (
        running_server(tmp_path_factory.mktemp("quantized") / "data", models) as server,
        lorimer.ServiceClient(base_url=server.url) as service,
    ):
        yield service


def train(service, name):
    """Return logprobs before and after some steps, and those of a sample by the trainer and the sampler."""
    training = service.create_lora_training_client(name, rank=4, seed=1)
    first = logprobs(training.forward(batch(), "cross_entropy").result())
    for _ in range(5):
        training.forward_backward(batch(), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    last = logprobs(training.forward(batch(), "cross_entropy").result())
    sampler = training.save_weights_and_get_sampling_client()
    (sequence,) = sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=24, seed=3)).result().sequences
    tokens = [*prompt().to_ints(), *sequence.tokens]
    datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    scored = logprobs(training.forward([datum], "cross_entropy").result())[-len(sequence.tokens) :]
    return first, last, scored, np.array(sequence.logprobs)


def test_a_quantised_base_is_trained_and_sampled_with_the_same_weights(service):
    found = {name: train(service, name) for name in ("plain", *MODELS)}
    for first, last, scored, sampled in found.values():
        assert last.mean() > first.mean() + 0.1
        assert abs(scored - sampled).max() < 1e-4
    distances = {name: abs(found[name][0] - found["plain"][0]).mean() for name in MODELS}
    assert 1e-5 < distances["eight"] < 0.2 * distances["four"]


def test_the_overview_shows_the_format(service):
    connection = service._connection
    answer = connection.run(connection.transport.ask(OverviewResponse, "GET", "/api/v1/overview")).result()
    assert {model.name: model.quantize for model in answer.models if model.quantize} == {"plain": "none", **MODELS}


@pytest.mark.parametrize(("name", "kind"), MODELS.items())
def test_full_runs_are_refused_by_name(service, name, kind):
    with pytest.raises(
        lorimer.BadRequestError, match=f"'{name}' is quantised \\({kind}\\), so it trains adapters only"
    ):
        service.create_training_client(name, method="full")
