"""A real server for the tests of the SDK, and a home of its own for what the SDK writes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lorimer
from tests.conformance.servers import RunningServer, create_key, running_server

MODEL = "lorimer/debug"


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither credentials nor addresses of whoever runs the tests reach the SDK."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        patch.delenv("XDG_CACHE_HOME", raising=False)
        for prefix in ("TINKER", "LORIMER"):
            for name in ("API_KEY", "BASE_URL", "CREDENTIAL_CMD", "PROJECT_ID", "TAGS"):
                patch.delenv(f"{prefix}_{name}", raising=False)
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with keys; polls end early, so that clients ask several times."""
    data = tmp_path_factory.mktemp("server") / "data"
    key = create_key(data, "alice")
    with running_server(data, [MODEL], poll_seconds=0.5) as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORIMER_API_KEY", key)
        yield running


@pytest.fixture(scope="module")
def service(server: RunningServer) -> Iterator[lorimer.ServiceClient]:
    with lorimer.ServiceClient({"suite": "client"}, base_url=server.url) as client:
        yield client


@pytest.fixture
def trainer(service: lorimer.ServiceClient) -> lorimer.TrainingClient:
    """A run with a fresh adapter, the same each time."""
    return service.create_lora_training_client(MODEL, rank=4, seed=7)


@pytest.fixture
def data_directory(tmp_path: Path) -> Path:
    return tmp_path / "data"
