"""Loops name their run, report its configuration and end, and go on in it when they are resumed."""

import json

import pytest

from lorimer.cookbook import supervised
from lorimer.cookbook.logs import DEFAULT_SINKS
from lorimer.cookbook.run_identity import RUN_FILE
from tests.cookbook.test_supervised import config


def key_of(log_dir):
    return json.loads((log_dir / RUN_FILE).read_text("utf-8"))["run_key"]


def newest(service):
    rest = service.create_rest_client()
    return rest.get_run(rest.list_runs(limit=1).result().runs[0].run_id).result()


async def test_a_loop_reports_its_configuration_progress_and_end(service, log_dir):
    await supervised.train(config(log_dir, sinks=DEFAULT_SINKS, tags=["loop"]), service)
    run = newest(service)
    assert (run.name, run.tags, run.status, run.error) == ("log", ["loop"], "finished", None)
    assert (run.steps_done, run.num_steps, run.eta_seconds) == (6, 6, None)
    assert run.config == json.loads((log_dir / "config.json").read_text("utf-8"))
    assert run.config["learning_rate"] == 1e-2
    assert {"train/nll", "test/nll", "loss:sum"} <= {one.name for one in run.metrics}


async def test_a_failed_loop_goes_on_in_the_same_run(service, log_dir):
    async def fail(_):
        raise RuntimeError("the evaluator broke")

    def settings(**changes):
        return config(log_dir, sinks=DEFAULT_SINKS, save_every=2, eval_every=4, name="resumed", **changes)

    with pytest.raises(RuntimeError, match="the evaluator broke"):
        await supervised.train(settings(evaluators=[fail]), service)
    failed = newest(service)
    assert (failed.name, failed.status, failed.error) == ("resumed", "failed", "RuntimeError: the evaluator broke")
    key = key_of(log_dir)
    await supervised.train(settings(), service)
    run = newest(service)
    assert (run.run_id, run.num_parts, run.status) == (failed.run_id, 2, "finished")
    assert key_of(log_dir) == key
    curves = {one.name: one for one in service.create_rest_client().get_run_metrics(run.run_id).result().series}
    assert [step for step, _, _ in curves["train/nll"].points] == list(range(6))
    assert [step for step, _, _ in curves["loss:sum"].points] == list(range(6))


async def test_another_configuration_is_another_run(service, log_dir):
    settings = config(log_dir, sinks=DEFAULT_SINKS)
    described = settings.described()
    from lorimer.cookbook.logs import open_log
    from lorimer.cookbook.run_identity import run_options

    def key(values, step=0):
        return run_options(log_dir, values, num_steps=6, resume_step=step)["run_key"]

    first = key(described)
    open_log(log_dir, config=described, sinks=()).close()
    assert key(described) == first
    assert key(described | {"rank": 99}, step=2) == first  # open_log refuses that
    assert key(described | {"rank": 99}) != first
