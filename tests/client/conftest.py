"""A user of the server that the commands' tests use too, and a home of its own for what the SDK writes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lorimer
from lorimer.client import embedded
from lorimer.server.control import CreateKey, ask_server
from tests.conformance.servers import RunningServer
from tests.surroundings import clean_environment  # noqa: F401

MODEL = "lorimer/debug"


@pytest.fixture(scope="package")
def server(keyed_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server, with the key of a user of these tests in the environment."""
    reply = ask_server(keyed_server.data, CreateKey("programmer", "sdk"))
    assert reply is not None and reply.keys[0].secret
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORIMER_API_KEY", reply.keys[0].secret)
        yield keyed_server


@pytest.fixture(scope="module")
def service(server: RunningServer) -> Iterator[lorimer.ServiceClient]:
    with lorimer.ServiceClient({"suite": "client"}, base_url=server.url) as client:
        yield client


@pytest.fixture(scope="package")
def embedded_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the service in this process, which runs until the tests of this folder are done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORIMER_DATA", str(tmp_path_factory.mktemp("embedded") / "data"))
        patch.setenv("LORIMER_DTYPE", "float32")
        patch.setenv("LORIMER_NUM_THREADS", "1")
        with lorimer.ServiceClient(base_url="local", model=MODEL) as client:
            client.get_server_capabilities()
    yield "local"
    embedded.service().stop()


@pytest.fixture(scope="module", params=["http", "embedded"])
def either_service(request: pytest.FixtureRequest) -> Iterator[lorimer.ServiceClient]:
    """Once of a server elsewhere, once of one in this process."""
    is_http = request.param == "http"
    address = request.getfixturevalue("server").url if is_http else request.getfixturevalue("embedded_address")
    with lorimer.ServiceClient(base_url=address, model=None if is_http else MODEL) as client:
        yield client


@pytest.fixture
def trainer(service: lorimer.ServiceClient) -> lorimer.TrainingClient:
    """A run with a fresh adapter, the same each time."""
    return service.create_lora_training_client(MODEL, rank=4, seed=7)


@pytest.fixture
def data_directory(tmp_path: Path) -> Path:
    return tmp_path / "data"
