"""Evaluations: stored with their grades, listed by model, task and run, and gone with their checkpoint."""

from datetime import timedelta

import numpy as np
import pytest

from lorimer.errors import NotFound
from lorimer.store import checkpoints, evaluations, tracking
from lorimer.store.evaluations import Filter, Outcomes, decode, encode, shared, variant_of
from lorimer.store.users import ensure_user
from lorimer.store.values import utc_now
from lorimer.store.weights import add_weights
from lorimer.types.runs import RunIdentity
from tests.store.runs import SHAPE, make_part

GRADES = np.array([[1.0], [0.0], [1.0]])
OUTCOMES = Outcomes(["a", "b", "c"], GRADES)
ESTIMATES = {"mean": {"value": 2 / 3, "std_error": 0.27, "low": 0.2, "high": 0.9, "method": "wilson"}}


def save(c, part, name, **options):
    made = f"{part.model_id}-{name}-{utc_now()}"
    saved = add_weights(c, name=made, base_model="tiny", has_optimizer=True, size_bytes=1, files=[], **SHAPE)
    given = {"user_id": part.user_id, "model_id": part.model_id, "project_id": None, "kind": "sampler", "step": 4}
    return checkpoints.add_checkpoint(c, **given, name=name, weights_id=saved.weights_id, **options)


def add(c, user_id, checkpoint=None, model="tiny", **values):
    given = {"task": "sums", "metric": "accuracy", "harness": "lorimer", "settings": {"temperature": 0.0}}
    key = None if checkpoint is None else checkpoint.checkpoint_key
    row = given | {"user_id": user_id, "checkpoint_key": key, "model": model, "base_model": "tiny"} | values
    return evaluations.add(c, row, OUTCOMES, ESTIMATES)


def listed(store, user_id, limit=10, offset=0, **chosen):
    found, total = store.read_now(evaluations.list_evaluations, Filter(user_id, **chosen), limit, offset)
    return [one.evaluation_id for one in found], total


@pytest.fixture
def part(store, session):
    return store.write_now(make_part, session, 0, RunIdentity(name="kettle"))


def test_lists_by_model_task_and_run(store, user, part):
    checkpoint = store.write_now(save, part, "final")
    first = store.write_now(add, user.user_id, checkpoint, model="tinker://x")
    second = store.write_now(add, user.user_id, task="words")
    other = store.write_now(ensure_user, "bob")
    theirs = store.write_now(add, other.user_id, checkpoint, model="tinker://x")
    ids = [second.evaluation_id, first.evaluation_id]
    assert listed(store, user.user_id) == (ids, 2)
    assert listed(store, user.user_id, limit=1, offset=1) == (ids[1:], 2)
    assert listed(store, user.user_id, model="tinker://x") == (ids[1:], 1)
    assert listed(store, user.user_id, task="words") == (ids[:1], 1)
    assert listed(store, user.user_id, run_id=part.run_id) == (ids[1:], 1)
    assert (first.run_id, first.run_name, first.step) == (part.run_id, "kettle", 4)
    assert (second.run_id, second.run_name, second.step) == (None, None, None)
    assert (theirs.run_name, theirs.step) == (None, 4), "the run is not theirs"
    read = store.read_now(evaluations.read_outcomes, first.evaluation_id)
    assert (read.items, read.grades.tolist()) == (OUTCOMES.items, GRADES.tolist())


def test_is_deleted_with_its_checkpoint(store, user, part):
    kept = store.write_now(add, user.user_id).evaluation_id
    checkpoint = store.write_now(save, part, "final")
    store.write_now(add, user.user_id, checkpoint)
    store.write_now(checkpoints.delete, checkpoint.checkpoint_key)
    assert listed(store, user.user_id) == ([kept], 1)
    with pytest.raises(NotFound, match="deleted meanwhile"):
        store.write_now(add, user.user_id, checkpoint)


def test_is_deleted_when_other_weights_get_the_name(store, user, part):
    old = store.write_now(save, part, "final")
    stale = store.write_now(add, user.user_id, old).evaluation_id
    other = store.write_now(add, user.user_id, store.write_now(save, part, "other")).evaluation_id
    new = store.write_now(save, part, "final", overwrite=True)
    assert listed(store, user.user_id) == ([other], 1)
    assert store.read_now(evaluations.read_outcomes, stale) is None
    store.write_now(add, user.user_id, new)
    store.write_now(tracking.remove, store.read_now(tracking.get, part.model_id))
    assert listed(store, user.user_id) == ([], 0)


def test_of_an_expired_checkpoint_is_not_seen(store, user, part):
    checkpoint = store.write_now(save, part, "short")
    one = store.write_now(add, user.user_id, checkpoint)
    store.write_now(checkpoints.set_ttl, checkpoint.checkpoint_key, utc_now() - timedelta(seconds=1))
    assert listed(store, user.user_id) == ([], 0)
    assert store.read_now(evaluations.get, one.evaluation_id) is None


def test_delete(store, user):
    one = store.write_now(add, user.user_id).evaluation_id
    assert store.write_now(evaluations.delete_evaluation, one)
    assert not store.write_now(evaluations.delete_evaluation, one)


def test_grades_are_kept_compactly():
    items = [f"{number:012x}" for number in range(1319)]
    grades = np.random.default_rng(0).integers(0, 2, (1319, 1)).astype(np.float64)
    data = encode(Outcomes(items, grades))
    assert len(data) < 10_000
    assert decode(data).items == items and (decode(data).grades == grades).all()


def test_shared_items_are_aligned_by_their_ids():
    first = Outcomes(["a", "b", "c"], np.array([[1.0], [2.0], [3.0]]))
    second = Outcomes(["x", "c", "a"], np.array([[7.0], [8.0], [9.0]]))
    mine, theirs = shared(first, second)
    assert (mine.ravel().tolist(), theirs.ravel().tolist()) == ([1.0, 3.0], [9.0, 8.0])
    assert shared(first, Outcomes(["z"], np.ones((1, 1))))[0].shape == (0, 1)


def test_a_variant_is_what_results_must_share_to_be_ranked():
    base = variant_of({"a": 1, "b": 2}, OUTCOMES)
    assert variant_of({"b": 2, "a": 1}, Outcomes(["c", "a", "b"], 1 - GRADES)) == base
    assert variant_of({"a": 1, "b": 3}, OUTCOMES) != base
    assert variant_of({"a": 1, "b": 2}, Outcomes(["a", "b"], GRADES[:2])) != base
    assert variant_of({"a": 1, "b": 2}, Outcomes(OUTCOMES.items, np.ones((3, 2)))) != base
