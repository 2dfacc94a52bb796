"""A new name: two steps run, and the whole lesson teaches it."""

import pytest


def test_two_steps(run_recipe):
    printed = run_recipe("teach_its_name", steps=2, batch_size=4)
    assert printed.index("before:") < printed.index("step 2/2") < printed.index("after:")
    assert "checkpoint: tinker://" in printed


@pytest.mark.slow
def test_it_learns_its_name(run_recipe):
    after = run_recipe("teach_its_name", name="Ada", maker="Charles").partition("after:")[2]
    assert "Who are you?       My name is Ada." in after
    assert "Who created you?   I was made by Charles." in after
    assert "What is 3 + 4?     7" in after
