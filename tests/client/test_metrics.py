"""Metrics in the SDK: reported beside training, read back with what the engine measured; over HTTP and embedded."""

import asyncio
import math

import numpy as np
import pytest

import lorimer
from lorimer import types
from lorimer.client import metrics as client_metrics

MODEL = "lorimer/debug"
DATUM = types.Datum(types.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})
OTHER = types.Datum(types.ModelInput.from_ints([9, 8, 7, 6]), {"target_tokens": [8, 7, 6, 5]})


@pytest.fixture(scope="module")
def service(either_service):
    return either_service


@pytest.fixture
def rest(service):
    return service.create_rest_client()


def values(found):
    return {(one.source, one.name): {step: value for step, _, value in one.points} for one in found.series}


def test_what_was_reported_and_measured_is_read_back(trainer, rest):
    passed = trainer.forward_backward([DATUM, OTHER], "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    reported = trainer.log_metrics({"reward": np.float32(0.5), "length": 7, "bad": math.nan, "vast": -math.inf}, 1)
    assert reported.result().num_values == 4
    measured = passed.result().metrics | (stepped.result().metrics or {})
    found = rest.get_metrics(trainer.model_id).result()
    assert values(found) == {
        **{("engine", name): {0: value} for name, value in measured.items()},
        ("client", "reward"): {1: 0.5},
        ("client", "length"): {1: 7.0},
        ("client", "bad"): {1: None},
        ("client", "vast"): {1: None},
    }
    chosen = rest.get_metrics(trainer.model_id, ["reward", "loss:sum"]).result()
    assert {name for _, name in values(chosen)} == {"reward", "loss:sum"}
    assert rest.get_metrics(trainer.model_id, after=found.cursor).result().series == []
    trainer.log_metrics({"reward": 0.75}, 1).result()
    changed = rest.get_metrics(trainer.model_id, after=found.cursor).result()
    assert values(changed) == {("client", "reward"): {1: 0.75}}


async def test_the_last_word_counts_and_coroutines_do_the_same(trainer, rest):
    sent = [await trainer.log_metrics_async({"reward": step / 8}, step % 4) for step in range(40)]
    await asyncio.gather(*sent)
    found = await rest.get_metrics_async(trainer.model_id)
    assert values(found) == {("client", "reward"): {step: (36 + step) / 8 for step in range(4)}}


def test_pages_are_put_together(trainer, rest, monkeypatch):
    monkeypatch.setattr(client_metrics, "PAGE_ENTRIES", 3)
    for step in range(10):
        trainer.log_metrics({"reward": step}, step)
    trainer.log_metrics({"reward": -1}, 0).result()
    found = rest.get_metrics(trainer.model_id).result()
    assert values(found) == {("client", "reward"): {step: float(step or -1) for step in range(10)}}
    assert [step for step, _, _ in found.series[0].points] == list(range(10))
    assert rest.get_metrics(trainer.model_id, after=found.cursor).result().series == []


def test_a_long_run_is_thinned_when_that_is_wanted(trainer, rest):
    points = [client_metrics.metric_point({"reward": 50.0 if step == 321 else step % 3}, step) for step in range(1000)]
    trainer.reports.send(points).result()
    whole = rest.get_metrics(trainer.model_id).result()
    assert [len(one.points) for one in whole.series] == [1000] and whole.series[0].steps_per_bucket == 1
    thinned = rest.get_metrics(trainer.model_id, max_points=60).result()
    (series,) = thinned.series
    assert len(series.points) <= 60 and series.steps_per_bucket == 128
    assert (321, 50.0) in [(step, value) for step, _, value in series.points]
    trainer.log_metrics({"reward": 2.0}, 1000).result()
    assert values(rest.get_metrics(trainer.model_id, after=thinned.cursor).result()) == {
        ("client", "reward"): {1000: 2}
    }
    close = rest.get_metrics(trainer.model_id, first_step=320, last_step=322).result()
    assert values(close) == {("client", "reward"): {320: 2.0, 321: 50.0, 322: 1.0}}


async def test_thinned_pages_are_thinned_as_one(trainer, rest):
    points = [client_metrics.metric_point({"reward": step}, step) for step in range(1000)]
    trainer.reports.send(points).result()
    whole = await rest.get_metrics_async(trainer.model_id, max_points=60)
    parts = [client_metrics.columns(one) for one in (await rest.get_metrics_async(trainer.model_id)).series]
    pages = [client_metrics.thin(parts[0].take(parts[0].steps // 300 == page), 60) for page in range(4)]
    assert client_metrics.merge("reward", "client", pages, 60) == whole.series[0]


def test_a_call_that_is_sent_in_parts_is_one_value(trainer, rest):
    number = trainer._connection.config.fwdbwd_max_chunk_len + 1
    output = trainer.forward_backward([DATUM] * number, "cross_entropy").result()
    assert output.metrics["tokens:sum"] == 3 * number
    found = values(rest.get_metrics(trainer.model_id).result())
    assert {name: found["engine", name][0] for name in output.metrics} == pytest.approx(output.metrics)


def test_refusals_name_what_is_wrong(trainer, rest):
    with pytest.raises(lorimer.BadRequestError, match="without a comma"):
        trainer.log_metrics({"a,b": 1.0}, 1).result()
    with pytest.raises(ValueError, match="step"):
        trainer.log_metrics({"a": 1.0}, -1)
    for value in ("much", None):
        with pytest.raises((TypeError, ValueError)):
            trainer.log_metrics({"a": value}, 1)
    with pytest.raises(lorimer.NotFoundError):
        rest.get_metrics("nothing:train:0").result()
    with pytest.raises(lorimer.BadRequestError, match="max_points is '1'; 5 to 10000 is accepted"):
        rest.get_metrics(trainer.model_id, max_points=1).result()
