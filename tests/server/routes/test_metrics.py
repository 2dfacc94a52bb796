"""Metrics of runs over HTTP: what the engine answered, what clients report, reading on, refusals; and operations."""

from dataclasses import replace

import pytest

from lorimer.store import metrics as store_metrics

from .conftest import datum

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def points(client, run_id, **query):
    """The points of each series without their times, and the cursor."""
    found = await client.fetch(f"training_runs/{run_id}/metrics", params=query)
    series = {
        f"{one['source']}/{one['name']}": {step: value for step, _, value in one["points"]} for one in found["series"]
    }
    return series, found["cursor"]


async def report(client, run_id, *reported):
    return await client.post(f"training_runs/{run_id}/metrics", {"points": list(reported)})


async def test_the_engines_numbers_are_those_that_clients_were_given(ada):
    run_id = await ada.run()
    first = await ada.train(run_id, 1)
    stepped = await ada.step(run_id, 2)
    await ada.logprobs(run_id, 3)  # only looks
    parts = [await ada.train(run_id, 4), await ada.train(run_id, 5, data=[datum(), datum()])]
    again = await ada.step(run_id, 6)
    found, _ = await points(ada, run_id)
    for name, value in first.metrics.items():
        assert found[f"engine/{name}"] == {0: value, 1: pytest.approx(sum(part.metrics[name] for part in parts))}
    for name, value in stepped["metrics"].items():
        assert found[f"engine/{name}"] == {0: value, 1: again["metrics"][name]}
    assert found.keys() == {f"engine/{name}" for name in first.metrics | stepped["metrics"]}
    chosen, _ = await points(ada, run_id, names="grad_norm,loss:sum")
    assert chosen.keys() == {"engine/grad_norm", "engine/loss:sum"}


async def test_the_engines_numbers_have_the_steps_of_a_client_that_counts_otherwise(ada):
    """Two optimizer steps in step 0, none in step 1, one in step 2."""
    run_id = await ada.run()
    losses = []
    for number in range(3):
        losses.append((await ada.train(run_id, 2 * number + 1)).metrics["loss:sum"])
        await ada.step(run_id, 2 * number + 2)
    counts = [{"step": step, "values": {"reward": 1.0}, "optim_steps": n} for step, n in enumerate((2, 2, 3))]
    assert (await report(ada, run_id, *counts)).status_code == 200
    found, _ = await points(ada, run_id)
    assert found["engine/loss:sum"] == {0: pytest.approx(losses[0] + losses[1]), 2: losses[2]}
    assert list(found["engine/grad_norm"]) == [0, 2]
    refused = await report(ada, run_id, {"step": 3, "values": {}, "optim_steps": -1})
    assert refused.status_code == 422 and "points[0].optim_steps" in refused.text


async def test_checkpoints_and_their_evaluations_have_the_steps_of_a_client_that_counts_otherwise(ada):
    """Two optimizer steps in step 0, none in steps 1 and 2, one in step 3; a checkpoint after each step."""
    run_id, seq_id = await ada.run(), 1
    for step, num_optim_steps in enumerate((2, 0, 0, 1)):
        for _ in range(num_optim_steps):
            await ada.train(run_id, seq_id)
            await ada.step(run_id, seq_id + 1)
            seq_id += 2
        done = (2, 2, 2, 3)[step]
        assert (await report(ada, run_id, {"step": step, "values": {"reward": 1.0}, "optim_steps": done})).is_success
        path = await ada.save(run_id, seq_id, f"after-{step}", "save_weights_for_sampler")
        seq_id += 1
    of_run = (await ada.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"]
    expected = {"sampler_weights/after-0": 1, "sampler_weights/after-1": 2}
    expected |= {"sampler_weights/after-2": 3, "sampler_weights/after-3": 4}
    assert {one["checkpoint_id"]: one["step"] for one in of_run} == expected
    of_user = [one for one in (await ada.fetch("checkpoints"))["checkpoints"] if run_id in one["tinker_path"]]
    assert {one["checkpoint_id"]: one["step"] for one in of_user} == expected
    shown = await ada.fetch(f"training_runs/{run_id}")
    assert shown["last_sampler_checkpoint"]["step"] == 4
    body = {"model": path, "task": "sums", "metric": "accuracy", "items": ["1 + 1"], "grades": [1.0]}
    made = await ada.post("evaluations", body)
    assert made.is_success and made.json()["step"] == 4, made.text
    assert [one["step"] for one in (await ada.fetch(f"evaluations?run_id={run_id}"))["evaluations"]] == [4]


async def test_a_failed_step_is_none(ada):
    run_id = await ada.run()
    await ada.train(run_id, 1)
    body = {"model_id": run_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01, "beta1": 7.0}}
    refused = await ada.post("optim_step", body)
    if refused.status_code == 200:
        await ada.failure(refused.json())
    await ada.step(run_id, 3)
    await ada.train(run_id, 4)
    found, _ = await points(ada, run_id)
    assert list(found["engine/loss:sum"]) == [0, 1] and list(found["engine/grad_norm"]) == [0]


async def test_reading_on_gives_new_and_corrected_points(ada):
    run_id = await ada.run()
    await ada.train(run_id, 1)
    answer = await report(
        ada, run_id, {"step": 0, "time": 1767225600.5, "values": {"reward": 0.5, "bad": "NaN", "vast": "Infinity"}}
    )
    assert answer.json() == {"num_values": 3}
    found = await ada.fetch(f"training_runs/{run_id}/metrics")
    series = {one["name"]: one for one in found["series"]}
    assert series["reward"] == {"name": "reward", "source": "client", "points": [[0, 1767225600.5, 0.5]]}
    assert series["bad"]["points"][0][2] is None and series["vast"]["points"][0][2] is None
    assert series["loss:sum"]["source"] == "engine" and found["has_more"] is False
    assert await points(ada, run_id, after=found["cursor"]) == ({}, found["cursor"])
    await report(ada, run_id, {"step": 0, "values": {"reward": 2}}, {"step": 1, "values": {"reward": 3.5}})
    await ada.step(run_id, 2)
    changed, cursor = await points(ada, run_id, after=found["cursor"])
    assert changed.pop("client/reward") == {0: 2.0, 1: 3.5}
    assert changed.keys() >= {"engine/grad_norm"} and "engine/loss:sum" not in changed
    pages, after = {}, "0.0.0"
    while after != cursor:
        page, after = await points(ada, run_id, after=after, limit=1)
        for name, values in page.items():
            pages.setdefault(name, {}).update(values)
    assert pages == (await points(ada, run_id))[0]


async def test_a_long_run_is_thinned_when_that_is_wanted(ada):
    run_id = await ada.run()
    values = {"reward": [99.5 if step == 777 else step % 5 for step in range(2000)], "few": [1.0] * 10}
    values["gap"] = ["NaN" if step == 1234 else 0.5 for step in range(2000)]
    for name, of_steps in values.items():
        points_of_name = [{"step": step, "values": {name: value}} for step, value in enumerate(of_steps)]
        assert (await report(ada, run_id, *points_of_name)).status_code == 200
    whole = await ada.fetch(f"training_runs/{run_id}/metrics")
    assert all(one.keys() == {"name", "source", "points"} for one in whole["series"])
    found = await ada.fetch(f"training_runs/{run_id}/metrics", params={"max_points": 100})
    assert (found["cursor"], found["has_more"]) == (whole["cursor"], False)
    series = {one["name"]: one for one in found["series"]}
    assert {name: one["steps_per_bucket"] for name, one in series.items()} == {"reward": 128, "gap": 128, "few": 1}
    every = {one["name"]: one["points"] for one in whole["series"]}
    for name, one in series.items():
        assert len(one["points"]) <= 100 and all(point in every[name] for point in one["points"])
    assert [point[0] for point in series["reward"]["points"] if point[2] == 99.5] == [777]
    assert [point[0] for point in series["gap"]["points"] if point[2] is None] == [1234]
    assert series["few"]["points"] == every["few"]
    await report(ada, run_id, {"step": 2000, "values": {"reward": 3}}, {"step": 5, "values": {"reward": 4}})
    changed, _ = await points(ada, run_id, after=found["cursor"], max_points=100)
    assert changed == {"client/reward": {5: 4.0, 2000: 3.0}}
    close, _ = await points(ada, run_id, first_step=700, last_step=799, max_points=100, names="reward,nothing")
    assert close == {"client/reward": {step: float(values["reward"][step]) for step in range(700, 800)}}
    parts = await points_in_parts(ada, run_id, max_points=100, limit=900)
    assert max(len(one) for one in parts) <= 100 and len(parts) > 3
    assert any(one.get(777) == 99.5 for one in parts)


async def points_in_parts(client, run_id, **query):
    """The points of each series of each answer, until there is no more."""
    parts, after, has_more = [], "0.0.0", True
    while has_more:
        found = await client.fetch(f"training_runs/{run_id}/metrics", params=query | {"after": after})
        parts += [{step: value for step, _, value in one["points"]} for one in found["series"]]
        after, has_more = found["cursor"], found["has_more"]
    return parts


async def test_what_is_read_in_many_pieces_is_one_answer(ada, monkeypatch):
    """Other readers have their turn between the pieces."""
    run_id = await ada.run()
    reported = [{"step": step, "values": {"reward": step / 4}} for step in range(3000)]
    assert (await report(ada, run_id, *reported)).status_code == 200
    at_once = await ada.fetch(f"training_runs/{run_id}/metrics", params={"max_points": 200})
    monkeypatch.setattr(store_metrics, "MAX_BYTES_TO_THIN", 3000)
    in_pieces = await ada.fetch(f"training_runs/{run_id}/metrics", params={"max_points": 200})
    assert in_pieces["cursor"] == at_once["cursor"] and not in_pieces["has_more"]
    (first,), (second,) = at_once["series"], in_pieces["series"]
    assert first["steps_per_bucket"] == 128 and 1 < second["steps_per_bucket"] <= 128
    assert len(second["points"]) <= 200 and all(point in second["points"] for point in first["points"])


BAD_POINTS = {
    "a comma": ({"step": 1, "values": {"a,b": 1}}, 400, "'a,b'; 1 to 200 printable characters without a comma"),
    "a control code": ({"step": 1, "values": {"a\x1b[31m": 1}}, 400, "a metric is called"),
    "no name": ({"step": 1, "values": {"": 1}}, 400, "a metric is called ''"),
    "a long name": ({"step": 1, "values": {"x" * 201: 1}}, 400, "1 to 200 printable"),
    "a negative step": ({"step": -1, "values": {}}, 422, "points[0].step"),
    "half a step": ({"step": 1.5, "values": {}}, 422, "points[0].step"),
    "a truth for a step": ({"step": True, "values": {}}, 422, "points[0].step"),
    "a step beyond": ({"step": 2**53, "values": {}}, 422, "points[0].step"),
    "a time before 1970": ({"step": 1, "time": -1, "values": {}}, 422, "points[0].time"),
    "text": ({"step": 1, "values": {"a": "1.5"}}, 422, "points[0].values.a"),
    "nothing": ({"step": 1, "values": {"a": None}}, 422, "points[0].values.a"),
    "an unknown field": ({"step": 1, "values": {}, "tag": "x"}, 422, "points[0].tag"),
}


@pytest.mark.parametrize(("point", "status", "text"), BAD_POINTS.values(), ids=BAD_POINTS)
async def test_reports_that_make_no_sense_are_refused(ada, point, status, text):
    run_id = await ada.run()
    answer = await report(ada, run_id, point)
    assert (answer.status_code, text in answer.json()["detail"]) == (status, True), answer.text
    assert await points(ada, run_id) == ({}, "0.0.0")


async def test_limits_are_refused_by_name(ada, server, monkeypatch):
    run_id = await ada.run()
    values = {"max_metric_values_per_request": 10, "max_metric_names_per_run": 4, "max_metric_values_per_run": 6}
    monkeypatch.setattr(server.context, "settings", replace(server.context.settings, **values))
    one = {"a": 1.0, "b": 2.0, "c": 3.0}
    assert (await report(ada, run_id, *({"step": step, "values": one} for step in (1, 2)))).status_code == 200
    refused = {
        "max_metric_values_per_request": [{"step": step, "values": one} for step in range(4)],
        "max_metric_names_per_run": [{"step": 1, "values": {"d": 1, "e": 1}}],
        "max_metric_values_per_run": [{"step": 3, "values": {"a": 1}}],
    }
    for setting, reported in refused.items():
        answer = await report(ada, run_id, *reported)
        assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
        assert f"({setting})" in answer.json()["detail"]
    many = await report(ada, run_id, *({"step": step, "values": {}} for step in range(11)))
    assert many.status_code == 413
    assert (await points(ada, run_id))[0] == {f"client/{name}": {1: value, 2: value} for name, value in one.items()}


BAD_QUESTIONS = [
    *("after=x", "after=1", "after=1.-1.0", "after=1.2." + "9" * 40, "limit=10001", "names=a%00b"),
    *("max_points=4", "max_points=10001", "max_points=", "max_points=many", "limit=100001&max_points=10"),
    *("first_step=-1", "last_step=1.5", "first_step=9007199254740992", "last_step=3&first_step=4"),
]


@pytest.mark.parametrize("query", BAD_QUESTIONS)
async def test_questions_that_make_no_sense_are_refused(ada, query):
    run_id = await ada.run()
    answer = await ada.get(f"training_runs/{run_id}/metrics?{query}")
    assert answer.status_code == 400, answer.text
    assert query.partition("=")[0] in answer.json()["detail"]


async def test_operations_are_listed_newest_first(ada):
    run_id = await ada.run()
    await ada.train(run_id, 1)
    await ada.step(run_id, 2)
    wrong = {"model_id": run_id, "seq_id": 3, "path": "a/../b"}
    assert (await ada.post("save_weights", wrong)).status_code == 400
    await ada.save(run_id, 4, "kept")
    found = await ada.fetch(f"training_runs/{run_id}/operations", params={"limit": 3})
    assert [(one["seq_id"], one["state"]) for one in found["operations"]] == [(4, "done"), (3, "rejected"), (2, "done")]
    assert found["has_more"] is True
    assert "a/../b" in found["operations"][1]["error"] and found["operations"][0]["error"] is None
    rest = await ada.fetch(f"training_runs/{run_id}/operations", params={"before": 2})
    (first,) = rest["operations"]
    assert (first["kind"], first["tokens"], rest["has_more"]) == ("forward_backward", 5, False)
    assert first["received_at"] <= first["started_at"] <= first["finished_at"]


async def test_a_published_checkpoint_opens_no_metrics(ada, bob):
    run_id = await ada.run()
    await ada.save(run_id, 1, "open")
    assert (await ada.post(f"training_runs/{run_id}/checkpoints/weights/open/publish")).status_code in (200, 204)
    for answer in (
        await bob.get(f"training_runs/{run_id}/metrics"),
        await bob.get(f"training_runs/{run_id}/operations"),
        await report(bob, run_id, {"step": 1, "values": {"a": 1}}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert await points(ada, run_id) == ({}, "0.0.0")
