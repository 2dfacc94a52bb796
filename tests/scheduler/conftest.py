"""One service for the tests that need little room in the engine: two runs, two samplers, and no time to stay."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.scheduler.service import Service, service


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def crowded(tmp_path_factory) -> AsyncIterator[Service]:
    path = tmp_path_factory.mktemp("crowded") / "data"
    limits = {"max_loaded_runs": 2, "max_loaded_samplers": 2, "residence_seconds": 0.0, "max_engine_deaths": 2}
    async with service(path, **limits) as opened:
        yield opened
