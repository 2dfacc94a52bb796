"""The recipe for preferences of the official cookbook, which computes its loss at the client."""

import math

import pytest

from tests.official_cookbook.workspace import STUDENT

pytestmark = pytest.mark.slow


def test_dpo_begins_at_its_reference_and_learns_to_prefer(cookbook, adder, figures):
    run = cookbook.recipe(
        "preference.dpo.train",
        "dpo",
        model_name=STUDENT,
        load_checkpoint_path=adder.path(),
        batch_size=32,
        learning_rate=5e-4,
        max_steps=6,
    )
    losses, accuracies, margins = (run.series(name) for name in ("dpo_loss", "accuracy", "margin"))
    figures(dpo_loss=losses, accuracy=accuracies, margin=margins)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4), "sampler and trainer give the same logprobs"
    assert losses[-1] < losses[0] - 0.01
    assert margins[-1] > 0.02
    assert sum(accuracies[-3:]) / 3 > 0.6
