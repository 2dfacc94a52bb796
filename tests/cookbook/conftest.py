"""A client of the server that the recipes' tests use too, and clean surroundings for the SDK."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lorimer
from tests.surroundings import clean_environment  # noqa: F401


@pytest.fixture(scope="module")
def service(base_url: str) -> Iterator[lorimer.ServiceClient]:
    with lorimer.ServiceClient({"suite": "cookbook"}, base_url=base_url) as client:
        yield client


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return tmp_path / "log"
