"""The flat supervised loop: two steps, and on from its checkpoint."""

import json


def test_two_steps_and_two_more(run_recipe, tmp_path):
    options = {"batch_size": 4, "rank": 4, "save_every": 2, "num_questions": 4}
    first = run_recipe("sl_loop", steps=2, **options)
    assert "step 2/2: loss per token" in first
    assert json.loads((tmp_path / "log" / "checkpoint.json").read_text("utf-8"))["step"] == 2
    second = run_recipe("sl_loop", steps=4, **options)
    assert "step 3/4: loss per token" in second
    assert "step 2/4" not in second
    assert second.splitlines()[-1].startswith("checkpoint: tinker://")
