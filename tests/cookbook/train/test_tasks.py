"""The graders of a task that a file of settings names."""

import importlib.util

import pytest

from lorimer.cookbook.train.inputs import RlData
from lorimer.cookbook.train.tasks import open_grading
from lorimer.errors import InvalidInput, Unsupported


@pytest.mark.parametrize(
    ("graders", "error", "words"), [("ray", Unsupported, "pip install"), ("x", InvalidInput, "ray")]
)
async def test_the_place_of_graders_is_that_of_the_settings(graders, error, words):
    if graders == "ray" and importlib.util.find_spec("ray") is not None:
        pytest.skip("Ray is installed")
    data = RlData(task="arithmetic", grader="tests.cookbook.rl.grading:length", graders=graders)
    with pytest.raises(error, match=words):
        async with open_grading(data):
            pass
