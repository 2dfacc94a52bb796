"""Environment variables to set before torch is loaded: reproducible numbers, no access to the hub.

Also assigns each test to a make target (`SERVICE`, `CONSOLE`), keeps tests that share servers on one worker, and ends
the processes that a crashed worker leaves.
"""

import contextlib
import os
import uuid

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARING = tuple(
    f"tests/{folder}/"
    for folder in ("conformance", "faults", "client", "recipes", "cookbook", "cli", "console", "server/openai")
)
"""Folders whose tests share servers: each runs as a whole on one worker. They take longest, so they begin first."""


SERVICE = (
    "tests/conformance/",
    "tests/faults/",
    "tests/client/test_restart.py",
    "tests/scheduler/test_faults.py",
    "tests/scheduler/test_restarts.py",
    "tests/scheduler/test_scratch.py",
    "tests/server/test_objects.py",
    "tests/server/test_restarts.py",
    "tests/store/test_lost_connections.py",
    "tests/store/test_transfer.py",
)
"""What `make test-service` runs, besides every test whose parameter is PostgreSQL: official clients against servers,
processes that are killed, databases that go away."""
CONSOLE = ("tests/console/",)
"""What `make test-console` runs. Everything else belongs to `make test`."""


def targets(item: pytest.Item) -> list[str]:
    """Return the markers of the make targets that run a test, besides `slow` and `gpu`."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    is_postgres = any(isinstance(value, str) and value == "postgresql" for value in parameters.values())
    marks = {"service": is_postgres or item.nodeid.startswith(SERVICE), "console": item.nodeid.startswith(CONSOLE)}
    return [name for name, belongs in marks.items() if belongs]


def together(nodeid: str) -> str:
    """What a test stays with: its folder where the tests share servers, elsewhere its file."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in SHARING if file.startswith(folder)), file)


class Together(LoadScopeScheduling):
    """Gives a worker all tests that stay together; a worker that is done takes the next of them."""

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid)


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Together:
    return Together(config, log)


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ["PYTEST_RUN_ID"] = uuid.uuid4().hex


@pytest.hookimpl
def pytest_unconfigure(config: pytest.Config) -> None:
    """Kill processes that a crashed worker has left: they would run on, and hold our output open."""
    if hasattr(config, "workerinput"):
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get("PYTEST_RUN_ID") == os.environ["PYTEST_RUN_ID"]
            if is_ours and process.pid != os.getpid():
                process.kill()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in targets(item):
            item.add_marker(name)
    rank = {folder: place for place, folder in enumerate(SHARING)}
    items.sort(key=lambda item: rank.get(together(item.nodeid), len(SHARING)))
