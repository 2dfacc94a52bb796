"""The cookbook, and a server with the small model under names that recipes ask for; figures are printed at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lorimer.models
from tests.cluster.installation import IS_CLUSTER, whole_installation
from tests.conformance.servers import create_key, running_server
from tests.official_cookbook.environment import NotInstalled, cookbook_python
from tests.official_cookbook.recipes import Cookbook, Run
from tests.official_cookbook.workspace import STUDENT, TEACHER, make_workspace

TINY = Path(lorimer.models.__file__).parent / "tiny"
FIGURES: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("figures of the official cookbook")
        for line in FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    def note(**values: object) -> None:
        shown = (
            f"{name} {[round(v, 5) for v in value] if isinstance(value, list) else value}"
            for name, value in values.items()
        )
        FIGURES.append(f"{request.node.name}: {'; '.join(shown)}")

    return note


@pytest.fixture(scope="session")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cookbook]:
    try:
        python = cookbook_python()
    except NotInstalled as reason:
        pytest.skip(str(reason))
    directory = tmp_path_factory.mktemp("cookbook")
    make_workspace(directory, TINY)
    data = directory / "server"
    models = [f"{name}=lorimer/tiny" for name in (STUDENT, TEACHER)]
    if IS_CLUSTER:
        with whole_installation(data, models, ["alice"]) as opened:
            yield Cookbook(python, directory, opened.url, opened.keys["alice"])
        return
    key = create_key(data, "alice")
    with running_server(data, models) as server:
        yield Cookbook(python, directory, server.url, key)


@pytest.fixture(scope="session")
def adder(cookbook: Cookbook) -> Run:
    """A run that has learned the form of sums, from which the recipes for RL start."""
    return cookbook.recipe(
        "chat_sl.train",
        "adder",
        model_name=STUDENT,
        dataset="no_robots",
        batch_size=32,
        learning_rate=2e-3,
        lora_rank=16,
        eval_every=5,
        save_every=5,
        max_steps=20,
    )


@pytest.fixture(scope="session")
def boxer(cookbook: Cookbook) -> Run:
    """A run that replies to problems with a number in a box, right by chance."""
    return cookbook.recipe(
        "chat_sl.train",
        "boxer",
        model_name=STUDENT,
        dataset="boxed.jsonl",
        train_on_what="last_assistant_message",
        batch_size=16,
        learning_rate=5e-3,
        lora_rank=16,
        max_steps=40,
    )
