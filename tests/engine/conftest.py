"""`LORIMER_TEST_DEVICE=pretend` runs the tests of this folder on the pretended device (`make test-device`).

Engines of this process find it as `auto`. Those in processes of their own stay on the CPU.
"""

import pytest

from lorimer.engine.model import device
from lorimer.engine.native import matmul, rowwise
from tests.engine.reference import DEVICE

ONLY_ON_A_CPU = {
    "test_attention_kernels.py::test_training_with_a_kernel": "the naive function computes on the CPU",
    "test_full_bfloat16.py::test_gradients_equal_a_model_that_rounds": "products of other devices round elsewhere",
    **dict.fromkeys(
        (
            "test_full_bfloat16.py::test_copies_are_reserved_with_the_rest",
            "test_full_engine.py::test_memory_of_training_stays_reserved_until_it_is_taken",
            "test_full_engine.py::test_an_engine_counts_on_nothing_that_another_has_reserved",
            "test_full_engine.py::test_memory_is_checked_first",
        ),
        "they count what is reserved of the host's memory",
    ),
    "test_full_ranks.py": "ranks are processes of their own, which stay on the CPU",
    "test_model.py::test_models_that_cannot_be_packed_are_refused_with_the_reason[falcon": "it indexes by a list of "
    "numbers, which torch cannot pass on to a device that is written in Python",
    "test_sharding.py": "ranks are processes of their own, which stay on the CPU",
    "test_vision.py": "the towers call torch.meshgrid, which fails on a device that is written in Python",
    "test_quantized_loading.py::test_the_vision_tower_is_not_quantised": "see test_vision.py",
    "test_self_test.py::test_a_device_is_compared_with_the_cpu": "a device in bfloat16 differs from the CPU",
}
"""The tests that other devices do not run, by the beginning of their ids, with the reason."""

if DEVICE.type != "cpu":
    choose = device._choose
    device._choose = lambda name, index: DEVICE.handle if name == "auto" else choose(name, index)


@pytest.fixture(params=["compiled", "torch"])
def rows(request, monkeypatch):
    """Let torch compute what compiled functions would, as without a compiler or on other devices."""
    if request.param == "torch":
        if DEVICE.type != "cpu":
            pytest.skip("there it does anyway")
        for functions in (matmul, rowwise):
            monkeypatch.setattr(functions, "find", lambda *_: "a test has none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if DEVICE.type != "cpu" else ():
        for start, reason in ONLY_ON_A_CPU.items():
            if item.nodeid.startswith(f"tests/engine/{start}"):
                item.add_marker(pytest.mark.skip(reason=reason))
