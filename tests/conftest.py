"""Settings that must stand before torch is loaded, the same numbers on every machine and nothing asked of the hub;
which tests stay together when several workers run them; and the end of processes that a crashed worker leaves."""

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
    rank = {folder: place for place, folder in enumerate(SHARING)}
    items.sort(key=lambda item: rank.get(together(item.nodeid), len(SHARING)))
