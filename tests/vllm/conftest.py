"""A server of `lorimer/tiny` with an engine and a vLLM sampler; run by ``make test-vllm``, which prints figures too."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker

from tests.conformance.conftest import LEFT_OPEN
from tests.conformance.users import User
from tests.surroundings import clean_surroundings
from tests.vllm.installation import Installation, running_installation

HERE = Path(__file__).parent
MODEL = "lorimer/tiny"
ENGINE, SAMPLER = f"{MODEL}#0", f"{MODEL}#sampler-0"
FIGURES: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_wanted = bool(os.environ.get("LORIMER_TEST_VLLM"))
    for item in items:
        if item.path.is_relative_to(HERE):
            if not is_wanted:
                item.add_marker(pytest.mark.skip(reason="needs an environment with vLLM; make test-vllm makes it"))
            for filter_ in LEFT_OPEN:
                item.add_marker(pytest.mark.filterwarnings(filter_))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("figures of vLLM")
        for line in FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    def note(**values: object) -> None:
        FIGURES.append(f"{request.node.name}: {'; '.join(f'{name} {value}' for name, value in values.items())}")

    return note


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with running_installation(tmp_path_factory.mktemp("vllm") / "data", MODEL, poll_seconds=0.5) as opened:
        yield opened


@pytest.fixture(scope="module", autouse=True)
def clean_home() -> Iterator[None]:
    with clean_surroundings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield


@pytest.fixture(scope="module")
def service(installation: Installation) -> Iterator[tinker.ServiceClient]:
    with User(installation.server.url, "tml-open").service() as client:
        yield client
