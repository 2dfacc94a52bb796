"""Where a loop finds its server, at an address or in its own process, and the tokenizer of its base model.

Where that reads images, its image processor, too.
"""

from typing import Any

from lorimer import ServiceClient
from lorimer.client.connection import LOCAL, resolve_base_url
from lorimer.client.tokenizers import load_tokenizer


def open_service(base_model: str, base_url: str | None = None, **options: Any) -> ServiceClient:
    """A client of the server at ``base_url`` (else ``LORIMER_BASE_URL``), else of one in this process.

    The one in this process serves ``base_model``: a directory, a ``.gguf`` file, an alias or a hub id.
    """
    if resolve_base_url(base_url) == LOCAL:
        return ServiceClient(base_url=LOCAL, model=base_model, **options)
    return ServiceClient(base_url=base_url, **options)


def get_tokenizer(service: ServiceClient, base_model: str) -> Any:
    """The tokenizer of a base model, from the server where it hands it out, else from the hub."""
    return load_tokenizer(service.holder.connection, base_model, None)


def get_image_processor(service: ServiceClient, base_model: str) -> Any:
    """What counts the tokens of images for a base model that reads some, found where its tokenizer is."""
    from transformers import AutoImageProcessor

    # The variant that the engine has, so that both count alike.
    return AutoImageProcessor.from_pretrained(get_tokenizer(service, base_model).name_or_path, backend="pil")
