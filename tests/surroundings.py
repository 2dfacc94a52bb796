"""Surroundings for tests: nothing of whoever runs them reaches the SDK or the command line."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SETTINGS = ("API_KEY", "BASE_URL", "CREDENTIAL_CMD", "PROJECT_ID", "TAGS", "TELEMETRY", "LOG")
SETTINGS += ("DATA", "START_ENGINES", "CONFIG")


def leave_home() -> Path:
    """Give this process and all that it starts another home, which is new."""
    home = Path(tempfile.mkdtemp(prefix="lorimer-home-"))
    os.environ["HOME"] = str(home)
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HF_TOKEN"):
        os.environ.pop(name, None)
    return home


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """Clean surroundings for every test of the folder whose `conftest.py` imports this."""
    with clean_surroundings():
        yield


@contextmanager
def clean_surroundings() -> Iterator[None]:
    """No credentials, addresses or settings."""
    with pytest.MonkeyPatch.context() as patch:
        for name in SETTINGS:
            patch.delenv(f"TINKER_{name}", raising=False)
            patch.delenv(f"LORIMER_{name}", raising=False)
        yield
