"""The supervised recipes of the official cookbook, and what it does with checkpoints."""

import json

import pytest

import lorimer
from tests.official_cookbook.workspace import STUDENT

pytestmark = pytest.mark.slow
OPTIONS = {"model_name": STUDENT, "learning_rate": 2e-3, "lora_rank": 16, "batch_size": 32}


def test_sl_loop_learns_and_resumes(cookbook, figures):
    options = {"save_every": 4, **OPTIONS}
    run = cookbook.recipe("sl_loop", "sl_loop", max_steps=6, **options)
    losses = run.series("train_mean_nll")
    figures(train_mean_nll=losses)
    assert losses[-1] < losses[0] / 2
    saved = run.checkpoints
    assert [checkpoint["name"] for checkpoint in saved] == ["000004", "final"]
    # As after a crash in step 5: the record of the end is gone, and step 4 is done again from its checkpoint.
    (run.log / "checkpoints.jsonl").write_text(json.dumps(saved[0]) + "\n", "utf-8")
    (run.log / "metrics.jsonl").unlink()
    resumed = cookbook.recipe("sl_loop", "sl_loop", max_steps=6, **options)
    assert "Resuming from batch 4" in resumed.output
    assert resumed.series("train_mean_nll") == pytest.approx(losses[4:], rel=1e-4)


def test_sl_basic_evaluates_and_learns(cookbook, figures):
    run = cookbook.recipe("sl_basic", "sl_basic", model_name=STUDENT, learning_rate=2e-3, max_steps=3)
    figures(train_mean_nll=run.series("train_mean_nll"), test_nll=run.series("test/nll"))
    assert run.series("train_mean_nll")[-1] < run.series("train_mean_nll")[0]


def test_chat_sl_scores_the_same_with_trainer_and_sampler(adder, figures):
    """The test's loss comes from the sampler's prompt logprobs, the training loss from the trainer."""
    trained, tested = adder.series("train_mean_nll"), adder.series("test/nll")
    figures(train_mean_nll=[trained[0], trained[-1]], test_nll=tested)
    assert tested[-1] < tested[0] / 3
    assert tested[0] == pytest.approx(trained[0], rel=0.1), "other rows of the same kind"


def test_checkpoints_of_chat_sl_are_listed(cookbook, adder):
    rest = lorimer.RestClient(base_url=cookbook.url, api_key=cookbook.key)
    run = rest.get_training_run_by_tinker_path(adder.path()).result()
    listed = rest.list_checkpoints(run.training_run_id).result().checkpoints
    logged = {checkpoint[kind] for checkpoint in adder.checkpoints for kind in ("state_path", "sampler_path")}
    assert {checkpoint.tinker_path for checkpoint in listed} == logged
    expiring = {checkpoint.tinker_path for checkpoint in listed if checkpoint.expires_at is not None}
    assert expiring == {path for path in logged if not path.endswith("/final")}
    assert run.user_metadata["renderer_name"] == "role_colon"


def test_chat_sl_resumes_into_a_second_epoch(cookbook, figures):
    """A run that ended by its number of steps counts as one epoch; the next begins with its weights and moments."""
    options = {"dataset": "no_robots", "eval_every": 0, "save_every": 0, "rolling_save_every": 2, **OPTIONS}
    cookbook.recipe("chat_sl.train", "resumed", max_steps=5, **options)
    more = {"num_epochs": 2, "max_steps": 22, "behavior_if_log_dir_exists": "resume"}
    run = cookbook.recipe("chat_sl.train", "resumed", **more, **options)
    losses = run.series("train_mean_nll")
    figures(train_mean_nll=losses)
    assert len(losses) == 5 + 2
    assert losses[5] < losses[4]


def test_prompt_distillation_trains_on_its_file(cookbook, figures):
    run = cookbook.recipe(
        "prompt_distillation.train",
        "prompt_distillation",
        file_path="boxed.jsonl",
        max_steps=4,
        eval_every=0,
        **OPTIONS,
    )
    losses = run.series("train_mean_nll")
    figures(train_mean_nll=losses)
    assert losses[-1] < losses[0] - 1
