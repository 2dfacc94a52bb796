"""The bytes of trained weights."""

import httpx2

import lorimer


def weights_of(service: lorimer.ServiceClient, state_path: str) -> bytes:
    """The adapter of a checkpoint, as the file that other programs read."""
    client = service.create_training_client_from_state(state_path)
    exported = client.save_weights_external("export").result().path
    urls = service.create_rest_client().get_external_weights_urls(exported).result().urls
    return httpx2.get(urls["adapter_model.safetensors"]).raise_for_status().content
