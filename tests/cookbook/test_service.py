"""Servers and tokenizers as loops find them."""

import pytest

from lorimer.cookbook.program import recipe_service
from lorimer.cookbook.service import get_tokenizer, open_service
from lorimer.errors import NotFound
from tests.conftest import ODD_NAME


def test_server_at_an_address(base_url):
    with open_service("lorimer/tiny", base_url) as service:
        tokenizer = get_tokenizer(service, "lorimer/tiny")
        assert tokenizer.eos_token == "<|im_end|>"
        models = {model.model_name for model in service.get_server_capabilities().supported_models}
        assert models == {"lorimer/tiny", "lorimer/debug", ODD_NAME}


def test_a_model_that_is_not_served_is_named_without_asking_the_hub(base_url, monkeypatch):
    monkeypatch.setattr("lorimer.client.tokenizers._load", lambda source: pytest.fail(f"asked for {source}"))
    with (
        open_service("no/such", base_url) as service,
        pytest.raises(NotFound, match=r"'no/such' is not served here; accepted are .*'lorimer/tiny'"),
    ):
        get_tokenizer(service, "no/such")


def test_a_recipe_uses_the_server_that_has_the_data_directory(open_server, monkeypatch, capsys):
    for name in ("LORIMER_BASE_URL", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LORIMER_DATA", str(open_server.data))
    with recipe_service("lorimer/debug") as service:
        assert service.holder.connection.base_url == open_server.url
    assert f"using the server at {open_server.url}" in "".join(capsys.readouterr())
