"""Tracked runs: made with a training run, resumed by their key, changed, finished and deleted."""

import pytest

from lorimer.store import checkpoints, futures, metrics, run_search, runs, sessions, tracking
from lorimer.store.run_names import readable_name
from lorimer.store.weights import add_weights
from lorimer.types.paths import checkpoint_path
from lorimer.types.runs import RunIdentity, UpdateRunRequest
from tests.store.runs import NOW, SHAPE, SOON, make_part


def found(store, run_id, silent_before=NOW):
    return store.read_now(run_search.find_run, run_id, silent_before)


def test_a_name_is_generated_with_the_number_of_the_run(store, session):
    first, second = (store.write_now(make_part, session, number) for number in (0, 1))
    names = [store.read_now(tracking.get, part.model_id).name for part in (first, second)]
    assert names == [readable_name(first.model_id, 1), readable_name(second.model_id, 2)]
    assert names[0].endswith("-1") and names[0].count("-") == 2


def test_parts_with_the_same_key_are_one_run(store, session, user):
    identity = RunIdentity(run_key="k", name="kettle", tags=["a"], config={"rank": 8}, num_steps=10)
    first = store.write_now(make_part, session, 0, identity)
    store.write_now(tracking.finish, first.run_id, "failed", "out of tea")
    later = store.write_now(sessions.create_session, user_id=user.user_id)
    again = RunIdentity(run_key="k", name="another", config={"rank": 16}, first_step=4)
    second = store.write_now(make_part, later, 0, again)
    assert second.run_id == first.run_id == first.model_id
    run = store.read_now(tracking.get, second.model_id)
    assert run == store.read_now(tracking.get, first.model_id)
    assert (run.name, run.tags, run.config, run.num_steps) == ("kettle", ["a"], {"rank": 16}, 10)
    assert (run.ended, run.error, run.num_parts, run.steps_reported) == (None, None, 2, 4)
    assert (run.model_id, run.session_id) == (second.model_id, later.session_id)
    assert [part.model_id for part in store.read_now(tracking.parts_of, run.run_id)] == [
        first.model_id,
        second.model_id,
    ]


def test_a_key_is_of_one_user(store, session):
    from lorimer.store.users import ensure_user

    other = store.write_now(ensure_user, "bob")
    theirs = store.write_now(sessions.create_session, user_id=other.user_id)
    identity = RunIdentity(run_key="k")
    parts = [store.write_now(make_part, one, 0, identity) for one in (session, theirs)]
    assert parts[0].run_id != parts[1].run_id


def save(c, part, name, seq_id=2**40):
    saved = add_weights(
        c, name=f"{part.model_id}-{name}", base_model="tiny", has_optimizer=True, size_bytes=1, files=[], **SHAPE
    )
    step = tracking.count_steps(c, part.model_id, before=seq_id)
    checkpoints.add_checkpoint(
        c,
        user_id=part.user_id,
        model_id=part.model_id,
        project_id=None,
        kind="training",
        name=name,
        weights_id=saved.weights_id,
        step=step,
    )
    return checkpoint_path(part.model_id, "training", name)


def steps(c, part, first, last):
    for number in range(first, last + 1):
        metrics.add_operation(
            c, part.model_id, 2 * number - 1, {"loss:sum": 10.0 - number}, num_datums=1, is_step=False
        )
        metrics.add_operation(c, part.model_id, 2 * number, {"norm": 1.0}, num_datums=1, is_step=True)


def test_lineage_tells_a_resumed_part_from_a_run_started_from_a_checkpoint(store, session):
    first = store.write_now(make_part, session, 0, RunIdentity(run_key="k"))
    store.write_now(steps, first, 1, 3)
    path = store.write_now(save, first, "three", 7)
    resumed = store.write_now(make_part, session, 1, RunIdentity(run_key="k"), path)
    started = store.write_now(make_part, session, 2, RunIdentity(), path)
    assert (resumed.run_id, resumed.loaded_from, resumed.optim_steps_before) == (first.run_id, path, 3)
    assert (started.run_id, started.loaded_from, started.optim_steps_before) == (started.model_id, path, 0)
    run = store.read_now(tracking.get, started.model_id)
    assert (run.parent_path, run.parent_run_id) == (path, first.run_id)
    assert store.read_now(tracking.get, first.model_id).parent_run_id is None
    assert store.read_now(tracking.children_of, first.run_id) == [(started.run_id, run.name)]
    store.write_now(steps, resumed, 1, 2)
    assert store.read_now(tracking.count_steps, resumed.model_id, before=100) == 5
    # A checkpoint holds the steps that were submitted before it, whatever was committed meanwhile.
    assert store.read_now(tracking.count_steps, resumed.model_id, before=4) == 4


def test_weights_loaded_before_the_first_step_are_the_origin(store, session):
    origin = store.write_now(make_part, session, 0)
    path = store.write_now(save, origin, "zero")
    plain = store.write_now(make_part, session, 1)
    store.write_now(tracking.note_load, plain.model_id, path)
    assert store.read_now(runs.get_run, plain.model_id).loaded_from == path
    assert store.read_now(tracking.get, plain.model_id).parent_run_id == origin.run_id
    trained = store.write_now(make_part, session, 2)
    store.write_now(steps, trained, 1, 1)
    store.write_now(tracking.note_load, trained.model_id, path)
    assert store.read_now(tracking.get, trained.model_id).parent_path is None


def test_status_is_what_the_client_said_else_what_its_session_says(store, session, user):
    part = store.write_now(make_part, session, 0)
    assert found(store, part.run_id).status == "running"
    assert found(store, part.run_id, SOON).status == "interrupted"  # no heartbeat
    store.write_now(runs.mark_corrupted, part.model_id, "a shard is missing")
    assert (found(store, part.run_id).status, found(store, part.run_id).error) == ("failed", "a shard is missing")
    store.write_now(tracking.finish, part.run_id, "interrupted", None)
    assert found(store, part.run_id).status == "interrupted"
    for reason, status in (("success", "finished"), ("errored", "failed"), ("interrupted", "interrupted")):
        one = store.write_now(sessions.create_session, user_id=user.user_id)
        other = store.write_now(make_part, one, 0)
        store.write_now(sessions.finish_session, one.session_id, reason, "because")
        shown = found(store, other.run_id)
        assert (shown.status, shown.error) == (status, "because" if status == "failed" else None)


def test_changes_leave_the_rest(store, session):
    part = store.write_now(make_part, session, 0, RunIdentity(name="a", notes="n", tags=["x", "y"], config={"k": 1}))
    store.write_now(tracking.change, part.run_id, UpdateRunRequest(name="b\N{SNOWMAN}", tags=["z"]))
    run = store.read_now(tracking.get, part.run_id)
    assert (run.name, run.notes, run.tags, run.config) == ("b\N{SNOWMAN}", "n", ["z"], {"k": 1})
    store.write_now(tracking.change, part.run_id, UpdateRunRequest(is_archived=True, notes=""))
    run = store.read_now(tracking.get, part.run_id)
    assert (run.notes, run.is_archived) == ("", True)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 201])
def test_names_are_one_printable_line(name):
    with pytest.raises(ValueError, match="name"):
        UpdateRunRequest(name=name)


def test_a_deleted_run_is_gone_with_its_metrics_and_checkpoints(store, session, user):
    part = store.write_now(make_part, session, 0, RunIdentity(run_key="k", tags=["a"], config={"b": 1}))
    store.write_now(steps, part, 1, 2)
    path = store.write_now(save, part, "one")
    child = store.write_now(make_part, session, 1, RunIdentity(), path)
    queued = {"user_id": user.user_id, "session_id": None, "kind": "optim_step", "payload": b"", "tokens": 0}
    row, _ = store.write_now(futures.accept, lane=part.model_id, seq_id=9, **queued)
    run = store.read_now(tracking.get, part.run_id)
    with pytest.raises(Exception, match="unfinished operations"):
        store.write_now(tracking.remove, run)
    store.write_now(futures.finish, row.request_id, result=b"{}", result_format="json", started_at=None)
    store.write_now(tracking.remove, run)
    assert store.read_now(tracking.get, part.run_id) is None
    assert store.read_now(checkpoints.list_for_run, part.model_id) == []
    assert store.read_now(metrics.read, part.model_id).series == {}
    assert [one.model_id for one in store.read_now(runs.list_runs, user_id=user.user_id, limit=9, offset=0)[0]] == [
        child.model_id
    ]
    assert store.read_now(tracking.get, child.run_id).parent_run_id is None
    expired = store.write_now(runs.expire_runs, unused_before=part.created_at, reason="gone")
    assert [one.model_id for one in expired] == [part.model_id]
    again = store.write_now(make_part, session, 2, RunIdentity(run_key="k"))
    assert again.run_id == again.model_id
