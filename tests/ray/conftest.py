"""Tests that need Ray; ``make test-ray`` runs them in an environment that has it."""

import importlib.util
from pathlib import Path

import pytest

from tests.conformance.conftest import LEFT_OPEN

HERE = Path(__file__).parent
HAS_RAY = importlib.util.find_spec("ray") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            if not HAS_RAY:
                item.add_marker(pytest.mark.skip(reason="needs an environment with Ray; make test-ray makes it"))
            for filter_ in (*LEFT_OPEN, "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"):
                item.add_marker(pytest.mark.filterwarnings(filter_))
