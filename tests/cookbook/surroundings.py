"""What the cookbook's and the recipes' tests share: surroundings without settings, and the bytes of trained weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

import lorimer


@contextmanager
def clean_surroundings(home: Path) -> Iterator[None]:
    """Neither credentials nor addresses of whoever runs the tests reach the SDK, nor does it write to their home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        for prefix in ("TINKER", "LORIMER"):
            for name in ("API_KEY", "BASE_URL", "CREDENTIAL_CMD", "PROJECT_ID", "TAGS"):
                patch.delenv(f"{prefix}_{name}", raising=False)
        yield


def weights_of(service: lorimer.ServiceClient, state_path: str) -> bytes:
    """The adapter of a checkpoint, as the file that other programs read."""
    client = service.create_training_client_from_state(state_path)
    exported = client.save_weights_external("export").result().path
    urls = service.create_rest_client().get_external_weights_urls(exported).result().urls
    return httpx2.get(urls["adapter_model.safetensors"]).raise_for_status().content
