"""A server closes connections that are idle: clients that keep them for the next request see no error."""

import logging
import time
from collections.abc import Iterator

import numpy as np
import pytest
import tinker

import lorimer
from tests.conformance.samples import current_logprobs
from tests.conformance.servers import RunningServer, running_server

HEADER_SECONDS = 0.3
PAUSES = np.linspace(0.24, 0.36, 13)
"""Around the moment at which the server closes, so that some requests meet it on their way."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = tmp_path_factory.mktemp("idle") / "data"
    with running_server(data, ["lorimer/debug"], header_seconds=HEADER_SECONDS) as running:
        yield running


@pytest.mark.parametrize("sdk", [tinker, lorimer], ids=lambda sdk: sdk.__name__)
def test_closed_connections_are_no_error_of_either_sdk(server, sdk, caplog):
    service = sdk.ServiceClient(base_url=server.url, api_key="tml-local")
    trainer = service.create_lora_training_client("lorimer/debug", rank=2, seed=0)
    sampler = service.create_sampling_client(base_model="lorimer/debug")
    prompt = sdk.ModelInput.from_ints([5, 6, 7])
    data = [sdk.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0] * 3})]
    expected = current_logprobs(trainer, data)
    with caplog.at_level(logging.WARNING):
        for pause in PAUSES:
            time.sleep(pause)
            np.testing.assert_array_equal(current_logprobs(trainer, data), expected)
            time.sleep(pause)
            assert len(sampler.compute_logprobs(prompt).result()) == 3
            assert service.get_server_capabilities().supported_models
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
