"""The servers, users and clients of the conformance tests. What the SDK writes at home goes to a temporary home."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.cluster.installation import IS_CLUSTER, IS_RAY, whole_installation
from tests.conformance.samples import MODEL, RANK, SEEING, TWIN
from tests.conformance.servers import RunningServer, create_key, running_server
from tests.conformance.users import User
from tests.surroundings import clean_surroundings

# The SDK leaves its first connection of each client to the garbage collector.
LEFT_OPEN = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


HERE = Path(__file__).parent
SERVERS = ExitStack()
IS_VLLM = bool(os.environ.get("LORIMER_TEST_VLLM"))
"""``make test-vllm`` runs those of sampling on a server that samples with vLLM too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            for filter_ in LEFT_OPEN:
                item.add_marker(pytest.mark.filterwarnings(filter_))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """The servers end with the last test of this folder, not with the last of all."""
    if nextitem is None or not nextitem.path.is_relative_to(HERE):
        SERVERS.close()


@pytest.fixture(scope="module", autouse=True)
def no_garbage_for_others() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def clean_home() -> Iterator[None]:
    """Without telemetry: on Python 3.11 the SDK's ``close`` was once seen to wait without end.

    Its telemetry waits with ``asyncio.wait_for``, which there loses a cancellation that comes just when what it waits
    for is done; that this was the cause is inferred.
    """
    with clean_surroundings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield


@pytest.fixture(scope="session")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keyed") / "data"


def serve(data: Path, models: Sequence[str], users: Sequence[str] = (), **settings: object) -> RunningServer:
    """Serve until the last test of this folder. ``users`` get keys before that.

    All tests run on one process, or with ``make conformance-cluster`` on several behind a load balancer, or with
    ``make test-ray`` on several that Ray places.
    """
    if IS_RAY and not NODES:
        from tests.ray.clusters import ray_nodes

        NODES.append(SERVERS.enter_context(ray_nodes(8)))
        NODES[0].add(8)
    if not IS_CLUSTER:
        KEYS.update({user: create_key(data, user) for user in users})
        return SERVERS.enter_context(running_server(data, models, **settings))
    opened = SERVERS.enter_context(whole_installation(data.parent, models, users, **settings))
    KEYS.update(opened.keys)
    return RunningServer(opened.url, opened.data)


def serve_with_vllm(data: Path, users: Sequence[str], **settings: object) -> RunningServer:
    """Serve a small model of a shape that vLLM has attention for."""
    from lorimer.models.debug import make_debug_model  # loads torch
    from tests.vllm.conftest import FIGURES
    from tests.vllm.installation import running_installation

    KEYS.update({user: create_key(data, user) for user in users})
    model = data.parent / "model"
    make_debug_model(model, head_dim=32)
    started = running_installation(data, MODEL, str(model), KEYS[users[0]], ignore_seeds=False, **settings)
    opened = SERVERS.enter_context(started)
    SERVERS.callback(lambda: FIGURES.append(f"conformance: samples by replica {dict(opened.places())}"))
    return opened.server


KEYS: dict[str, str] = {}
NODES: list[Any] = []
"""The Ray cluster that places workers, if it does."""


@pytest.fixture(scope="session")
def keys(server: RunningServer) -> dict[str, str]:
    return KEYS


@pytest.fixture(scope="session")
def server(data_directory: Path) -> RunningServer:
    """Two names for one small model. Polls end early, so that clients ask several times."""
    if IS_VLLM:
        return serve_with_vllm(data_directory, ("alice", "bob"), poll_seconds=0.5)
    models = [f"{name}=lorimer/debug" for name in (MODEL, TWIN)]
    return serve(data_directory, models, ("alice", "bob"), poll_seconds=0.5, start_engines="lazy")


@pytest.fixture(scope="session")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A server without keys, as one starts it at home."""
    return serve(tmp_path_factory.mktemp("open") / "data", ["lorimer/debug"])


@pytest.fixture(scope="session")
def seeing_server(tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A server, without keys, of a model that reads images."""
    from tests.engine.debug_vision import make_debug_vision_model  # loads torch

    place = tmp_path_factory.mktemp("seeing")
    make_debug_vision_model(place / "model", architecture="qwen3_vl")
    return serve(place / "data", [f"{SEEING}={place / 'model'}"], max_image_bytes=100_000)


@pytest.fixture(scope="session")
def alice(server: RunningServer, keys: dict[str, str]) -> User:
    return User(server.url, keys["alice"])


@pytest.fixture(scope="session")
def bob(server: RunningServer, keys: dict[str, str]) -> User:
    return User(server.url, keys["bob"])


@pytest.fixture(scope="module")
def service(alice: User) -> Iterator[tinker.ServiceClient]:
    with alice.service(user_metadata={"suite": "conformance"}) as client:
        yield client


@pytest.fixture(scope="module")
def rest(alice: User) -> tinker.RestClient:
    return alice.rest()


@pytest.fixture(scope="module")
def admin(alice: User) -> tinker.AdminClient:
    return alice.admin()


@pytest.fixture
def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run with a fresh adapter, the same each time."""
    return service.create_lora_training_client(MODEL, rank=RANK, seed=7)
