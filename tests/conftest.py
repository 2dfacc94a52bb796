"""Settings that must stand before torch is loaded, the same numbers on every machine and nothing asked of the hub;
and which tests stay together when several workers run them."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TESTS = Path(__file__).parent
SHARING = ("conformance", "faults", "client", "recipes", "cookbook", "cli")
"""Folders whose tests share servers: each runs as a whole on one worker. They take longest, so they begin first."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, a test runs beside those it shares its servers with, or those of its file."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(pytest.mark.xdist_group(folder if folder in SHARING else str(item.path.relative_to(TESTS))))
    rank = {folder: place for place, folder in enumerate(SHARING)}
    items.sort(key=lambda item: rank.get(item.path.relative_to(TESTS).parts[0], len(SHARING)))
