"""A real server for the tests of the SDK, and a home of its own for what the SDK writes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lorimer
from lorimer.client import embedded
from tests.conformance.servers import RunningServer, create_key, running_server
from tests.surroundings import clean_surroundings

MODEL = "lorimer/debug"


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with clean_surroundings(tmp_path_factory.mktemp("home")):
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


@pytest.fixture(scope="module", params=["http", "embedded"])
def either_service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[lorimer.ServiceClient]:
    """Once of a server elsewhere, once of one in this process."""
    if request.param == "http":
        with lorimer.ServiceClient(base_url=request.getfixturevalue("server").url) as client:
            yield client
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORIMER_DATA", str(tmp_path_factory.mktemp("embedded") / "data"))
        patch.setenv("LORIMER_DTYPE", "float32")
        patch.setenv("LORIMER_NUM_THREADS", "1")
        with lorimer.ServiceClient(base_url="local", model=MODEL) as client:
            yield client
        embedded.service().stop()


@pytest.fixture
def trainer(service: lorimer.ServiceClient) -> lorimer.TrainingClient:
    """A run with a fresh adapter, the same each time."""
    return service.create_lora_training_client(MODEL, rank=4, seed=7)


@pytest.fixture
def data_directory(tmp_path: Path) -> Path:
    return tmp_path / "data"
