"""Environment variables to set before torch is loaded: reproducible numbers, no access to the hub.

Also has the two servers that folders share, assigns each test to a make target (`SERVICE`, `CONSOLE`), keeps tests
that share servers on one worker, has engines forked from one process that has imported torch, and ends the processes
that a crashed worker leaves.
"""

import contextlib
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from lorimer.engine import fork_server
from lorimer.engine.launch import engine_environment
from tests.conformance.servers import SOURCES, RunningServer, running_server
from tests.surroundings import leave_home

os.environ["PYTHONPATH"] = SOURCES
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

SHARING = (
    ("tests/conformance/",),
    ("tests/faults/",),
    ("tests/cluster/",),
    ("tests/recipes/", "tests/cookbook/", "tests/test_docs.py"),
    ("tests/cli/", "tests/client/"),
    ("tests/console/",),
    ("tests/server/openai/",),
    ("tests/scheduler/",),
)
"""Places whose tests share servers: each group runs on one worker, in this order; the longest begin first."""

HOME = pytest.StashKey[Path]()
"""The home of all tests: that of whoever runs them is neither read nor written."""
FORKS = pytest.StashKey[fork_server.ForkServer]()
"""Starts the engines of all tests, of servers in other processes too; one alone imports for eight seconds."""
ODD_NAME = "my/odd-name"
"""What `open_server` calls another copy of the bundled model."""


SERVICE = (
    "tests/cli/",
    "tests/client/test_embedded.py",
    "tests/client/test_full.py",
    "tests/client/test_restart.py",
    "tests/client/test_trainings.py",
    "tests/cluster/",
    "tests/conformance/",
    "tests/cookbook/rl/test_agents.py",
    "tests/cookbook/rl/test_remote_envs.py",
    "tests/deploy/",
    "tests/engine/test_full_ranks.py",
    "tests/engine/test_lifeline.py",
    "tests/engine/test_memory.py",
    "tests/engine/test_process.py",
    "tests/engine/test_self_test.py",
    "tests/engine/test_sharding.py",
    "tests/faults/",
    "tests/recipes/",
    "tests/scheduler/test_faults.py",
    "tests/scheduler/test_replicas.py",
    "tests/scheduler/test_restarts.py",
    "tests/scheduler/test_restoring.py",
    "tests/scheduler/test_scratch.py",
    "tests/scheduler/test_snapshots.py",
    "tests/server/test_decoder_faults.py",
    "tests/server/test_decoders.py",
    "tests/server/test_kept_metrics.py",
    "tests/server/test_objects.py",
    "tests/server/test_outgoing.py",
    "tests/server/test_restarts.py",
    "tests/server/test_serve.py",
    "tests/server/test_spans.py",
    "tests/store/test_lost_connections.py",
    "tests/store/test_owners.py",
    "tests/store/test_transfer.py",
    "tests/test_bench.py",
    "tests/test_outsiders.py",
    "tests/test_processes.py",
)
"""What `make test-service` runs, besides tests with the mark `service` and every test whose parameter is PostgreSQL:
programs and processes. The command line, recipes, official clients against servers, engines of several ranks,
processes that start, end, are killed and are weighed, databases that go away. The mark is for single tests: examples of
documents, programs that are servers themselves, and what takes many seconds to count."""
CONSOLE = ("tests/console/",)
"""What `make test-console` runs. Everything else belongs to `make test`."""


def targets(item: pytest.Item) -> list[str]:
    """Return the markers of the make targets that run a test, besides `slow` and `gpu`."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    is_postgres = any(isinstance(value, str) and value == "postgresql" for value in parameters.values())
    marks = {"service": is_postgres or item.nodeid.startswith(SERVICE), "console": item.nodeid.startswith(CONSOLE)}
    return [name for name, belongs in marks.items() if belongs]


def together(nodeid: str) -> str:
    """What a test stays with: the first place of its group where tests share servers, elsewhere its file."""
    file = nodeid.partition("::")[0]
    return next((places[0] for places in SHARING if file.startswith(places)), file)


class Together(LoadScopeScheduling):
    """Gives a worker all tests that stay together; a worker that is done takes the next of them."""

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid)


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Together:
    return Together(config, log)


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that starts the tests in the background ignores interrupts, for all processes that they start too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        return
    os.environ["PYTEST_RUN_ID"] = uuid.uuid4().hex
    config.stash[HOME] = leave_home()
    if fork_server.is_usable():
        config.stash[FORKS] = fork_server.ForkServer(engine_environment())
        os.environ[fork_server.VARIABLE] = config.stash[FORKS].address


@pytest.hookimpl
def pytest_unconfigure(config: pytest.Config) -> None:
    """Kill processes that a crashed worker has left: they would run on, and hold our output open."""
    if hasattr(config, "workerinput"):
        return
    if FORKS in config.stash:
        config.stash[FORKS].close()
    shutil.rmtree(config.stash[HOME], ignore_errors=True)
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
    places = [place for group in SHARING for place in group]

    def rank(item: pytest.Item) -> int:
        return next((number for number, place in enumerate(places) if item.nodeid.startswith(place)), len(places))

    items.sort(key=rank)


# ── servers that folders share ────────────────────────────────────────────────────────────────────────
# Each engine starts with the first test that needs it, and tests use sessions of their own. Tests that kill or fill a
# server start one of their own.


@pytest.fixture(scope="session")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server without keys: the bundled model, under two names, and the debug model."""
    models = ["lorimer/tiny", "lorimer/debug", f"{ODD_NAME}=lorimer/tiny"]
    data = tmp_path_factory.mktemp("open") / "data"
    with running_server(data, models, start_engines="lazy") as running:
        yield running


@pytest.fixture(scope="session")
def base_url(open_server: RunningServer) -> str:
    return open_server.url


@pytest.fixture(scope="session")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the debug model that asks for keys once there is one; polls end early, so clients ask repeatedly."""
    data = tmp_path_factory.mktemp("keyed") / "data"
    with running_server(data, ["lorimer/debug"], poll_seconds=0.5) as running:
        yield running
