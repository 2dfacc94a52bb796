"""Runs by the SDK against a real server: named at creation, resumed under their key, changed, finished, deleted."""

import time

import pytest

import lorimer
from lorimer import types

MODEL = "lorimer/debug"
TOKENS = list(range(10, 20))
DATUM = types.Datum(types.ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:]})
ADAM = types.AdamParams(learning_rate=1e-2)


def train(client, steps, first=0):
    for step in range(first, first + steps):
        loss = client.forward_backward([DATUM], "cross_entropy")
        client.optim_step(ADAM).result()
        client.log_metrics({"my/loss": loss.result().loss}, step).result()


@pytest.fixture
def rest(service):
    return service.create_rest_client()


def test_a_run_has_what_its_client_gave(service, rest):
    client = service.create_lora_training_client(
        MODEL,
        rank=4,
        name="kettle",
        notes="sings",
        tags=["tea", "tea"],
        config={"lr": 1e-2, "data": {"n": 3}},
        num_steps=4,
    )
    train(client, 2)
    run = rest.get_run(client.model_id).result()
    assert (run.run_id, run.training_run_id, run.name, run.notes, run.tags) == (
        client.model_id,
        client.model_id,
        "kettle",
        "sings",
        ["tea"],
    )
    assert (run.status, run.config, run.num_steps) == ("running", {"lr": 1e-2, "data": {"n": 3}}, 4)
    assert run.duration_seconds > 0 and run.parent_path is None
    measured = {one.name: one for one in run.metrics}
    assert measured["my/loss"].last_step == 1 and measured["my/loss"].min == measured["my/loss"].last
    assert measured["loss:sum"].max_step == 0
    changed = rest.update_run(client.model_id, name="pot", tags=["a"], is_archived=True).result()
    assert (changed.name, changed.tags, changed.notes, changed.is_archived) == ("pot", ["a"], "sings", True)
    with pytest.raises(lorimer.BadRequestError, match="is running"):
        rest.delete_run(client.model_id).result()
    client.finish_run("failed", "no water").result()
    run = rest.get_run(client.model_id).result()
    assert (run.status, run.error, run.eta_seconds) == ("failed", "no water", None)
    rest.delete_run(client.model_id).result()
    for ask in (rest.get_run, rest.get_training_run, rest.get_metrics):
        with pytest.raises(lorimer.NotFoundError):
            ask(client.model_id).result()


def test_options_that_are_not_there_are_refused(service):
    with pytest.raises(TypeError, match="'nmae' is not an option of a run; accepted are name, notes"):
        service.create_lora_training_client(MODEL, rank=4, nmae="x")


def test_a_run_without_options_has_a_generated_name(service, rest):
    client = service.create_lora_training_client(MODEL, rank=4)
    adjective, noun, number = rest.get_run(client.model_id).result().name.split("-")
    assert adjective.isalpha() and noun.isalpha() and number.isdecimal()
    assert rest.get_training_run(client.model_id).result().run_id == client.model_id


def test_a_resumed_program_goes_on_in_the_same_run(service, rest):
    first = service.create_lora_training_client(MODEL, rank=4, run_key="pot", name="pot")
    train(first, 3)
    state = first.save_state("three").result().path
    train(first, 2, first=3)
    assert rest.list_checkpoints(first.model_id).result().checkpoints[0].step == 3
    second = service.create_training_client_from_state_with_optimizer(state, run_key="pot", first_step=3, num_steps=6)
    train(second, 1, first=3)
    run = rest.get_run(second.model_id).result()
    assert (run.run_id, run.num_parts, run.training_run_id) == (first.model_id, 2, second.model_id)
    assert [(part.loaded_from, part.optim_steps_before) for part in run.parts] == [(None, 0), (state, 3)]
    assert run.parent_path is None
    curves = {one.name: one for one in rest.get_run_metrics(first.model_id).result().series}
    assert [step for step, _, _ in curves["my/loss"].points] == [0, 1, 2, 3]
    assert [step for step, _, _ in curves["loss:sum"].points] == [0, 1, 2, 3]
    assert [one.last_step for one in run.metrics if one.name == "my/loss"] == [3]
    # The same weights give the same loss: the part goes on where the checkpoint was.
    old = {one.name: one for one in rest.get_metrics(first.model_id).result().series}["my/loss"].points[3][2]
    assert curves["my/loss"].points[3][2] == pytest.approx(old, rel=1e-5)
    started = service.create_training_client_from_state(state, name="child")
    child = rest.get_run(started.model_id).result()
    assert (child.parent_path, child.parent.run_id, child.parent.name) == (state, first.model_id, "pot")
    assert [(one.run_id, one.name) for one in rest.get_run(first.model_id).result().children] == [
        (started.model_id, "child")
    ]


def test_lists_filter_sort_and_group(service, rest):
    for rank in (2, 4):
        service.create_lora_training_client(MODEL, rank=rank, tags=["listed"], config={"rank": rank})
    found = rest.list_runs("tag=listed", sort="-config.rank", fields=["config.rank"]).result()
    assert [run.values for run in found.runs] == [{"config.rank": 4.0}, {"config.rank": 2.0}]
    assert found.total_count == 2
    groups = rest.group_runs("config.rank", "tag=listed").result().groups
    assert [(one.value, one.num_runs) for one in groups] == [("2", 1), ("4", 1)]
    assert "rank" in rest.list_run_fields("tag=listed").result().config
    with pytest.raises(lorimer.BadRequestError, match="there is no field 'lsos'"):
        rest.list_runs("lsos<3").result()


def test_summaries_reach_the_list(service, rest):
    client = service.create_lora_training_client(MODEL, rank=2, tags=["summed"])
    train(client, 2)
    deadline = time.monotonic() + 60
    while True:  # the server brings summaries up to date every two seconds
        (run,) = rest.list_runs("tag=summed", fields=["last.my/loss"]).result().runs
        if run.steps_done == 2 and run.values["last.my/loss"] is not None:
            break
        assert time.monotonic() < deadline, run
        time.sleep(0.2)


def test_a_failed_block_says_why(base_url):
    with pytest.raises(ZeroDivisionError), lorimer.ServiceClient(base_url=base_url) as service:
        client = service.create_lora_training_client(MODEL, rank=2)
        1 / 0  # noqa: B018 (it fails)
    run = lorimer.RestClient(base_url=base_url).get_run(client.model_id).result()
    assert (run.status, run.error) == ("failed", "ZeroDivisionError: division by zero")
