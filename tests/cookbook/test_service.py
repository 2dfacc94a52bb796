"""Servers and tokenizers as loops find them."""

from lorimer.cookbook.service import get_tokenizer, open_service
from tests.conftest import ODD_NAME


def test_server_at_an_address(base_url):
    with open_service("lorimer/tiny", base_url) as service:
        tokenizer = get_tokenizer(service, "lorimer/tiny")
        assert tokenizer.eos_token == "<|im_end|>"
        models = {model.model_name for model in service.get_server_capabilities().supported_models}
        assert models == {"lorimer/tiny", "lorimer/debug", ODD_NAME}
