"""Surroundings for tests: nothing of whoever runs them reaches the SDK or the command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SETTINGS = ("API_KEY", "BASE_URL", "CREDENTIAL_CMD", "PROJECT_ID", "TAGS", "TELEMETRY", "LOG")
SETTINGS += ("DATA", "START_ENGINES", "CONFIG")


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clean surroundings for every test of the folder whose `conftest.py` imports this."""
    with clean_surroundings(tmp_path_factory.mktemp("home")):
        yield


@contextmanager
def clean_surroundings(home: Path) -> Iterator[None]:
    """No credentials, addresses or settings, and another home to write to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HF_TOKEN"):
            patch.delenv(name, raising=False)
        for name in SETTINGS:
            patch.delenv(f"TINKER_{name}", raising=False)
            patch.delenv(f"LORIMER_{name}", raising=False)
        yield
