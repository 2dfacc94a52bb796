"""The fixtures of the conformance tests with our SDK: the same servers, other clients."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lorimer
from tests.conformance.own.differences import DIFFERENCES
from tests.conformance.users import User

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def does_apply(item: pytest.Item) -> bool:
        return item.name.partition("[")[0] not in DIFFERENCES or not item.path.is_relative_to(HERE)

    config.hook.pytest_deselected(items=[item for item in items if not does_apply(item)])
    items[:] = filter(does_apply, items)


@pytest.fixture(scope="module", autouse=True)
def clean_settings(clean_home: None) -> Iterator[None]:
    """Our SDK reads variables of its own too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LORIMER_API_KEY", "LORIMER_BASE_URL", "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def alice(server, keys) -> User:
    return User(server.url, keys["alice"], lorimer)


@pytest.fixture(scope="session")
def bob(server, keys) -> User:
    return User(server.url, keys["bob"], lorimer)
