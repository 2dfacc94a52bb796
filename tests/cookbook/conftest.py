"""One server of the bundled model and the debug model for the cookbook's tests, and clean surroundings for the SDK."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lorimer
from tests.conformance.servers import RunningServer, running_server
from tests.surroundings import clean_surroundings

MODELS = ["lorimer/tiny", "lorimer/debug"]


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with clean_surroundings(tmp_path_factory.mktemp("home")):
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "data", MODELS) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: RunningServer) -> str:
    return server.url


@pytest.fixture(scope="module")
def service(base_url: str) -> Iterator[lorimer.ServiceClient]:
    with lorimer.ServiceClient({"suite": "cookbook"}, base_url=base_url) as client:
        yield client


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return tmp_path / "log"
