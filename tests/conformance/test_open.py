"""A server without keys: everybody of this machine is one user, whatever key the SDK was given."""

import pytest
import tinker

from tests.conformance.samples import RANK, batch, current_logprobs, step

DATA = batch()


def test_any_key_of_the_right_form_will_do(open_server):
    services = [tinker.ServiceClient(base_url=open_server.url, api_key=f"tml-{name}") for name in ("one", "two")]
    trainer = services[0].create_lora_training_client("lorimer/debug", rank=RANK)
    step(trainer, DATA)
    path = trainer.save_state("shared").result().path
    again = services[1].create_training_client_from_state(path)
    assert current_logprobs(again, DATA) == pytest.approx(current_logprobs(trainer, DATA), abs=1e-6)
    for service in services:
        service.close("success").result()


def test_address_and_key_come_from_the_environment(open_server, monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", open_server.url + "/")
    monkeypatch.setenv("TINKER_API_KEY", "tml-anything")
    with tinker.ServiceClient() as service:
        assert [model.model_name for model in service.get_server_capabilities().supported_models] == ["lorimer/debug"]
        assert service.create_lora_training_client("lorimer/debug", rank=RANK).get_info().lora_rank == RANK
    assert tinker.auth.tinker_has_credentials()
    tinker.auth.raise_if_tinker_not_accessible()
