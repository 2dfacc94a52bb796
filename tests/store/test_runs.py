"""Runs: made once, listed for their owner, with the snapshot from which they replay."""

from datetime import timedelta

import pytest

from lorimer.store import retention, runs
from lorimer.store.checkpoints import add_checkpoint
from lorimer.store.sessions import create_session
from lorimer.store.users import ensure_user
from lorimer.store.values import utc_now
from lorimer.store.weights import add_weights

SHAPE = {"rank": 8, "train_attn": True, "train_mlp": False, "train_unembed": True, "optimizer_type": "adamw"}


@pytest.fixture
def make(store):
    def make(session, model_seq_id=0, **more):
        values = SHAPE | {"base_model": "tiny", "seed": None, "project_id": None, "user_metadata": {"a": "b"}} | more
        return store.write_now(
            runs.create_run,
            session_id=session.session_id,
            user_id=session.user_id,
            model_seq_id=model_seq_id,
            **values,
        )

    return make


def test_a_run_is_made_once(store, session, make):
    first = make(session, 3)
    assert first.model_id == f"{session.session_id}:train:3"
    assert make(session, 3, rank=99) == first
    assert store.read_now(runs.get_run, first.model_id) == first
    assert store.read_now(runs.get_run, "unknown") is None
    assert (first.train_attn, first.train_mlp, first.seed, first.user_metadata) == (True, False, None, {"a": "b"})
    assert (first.snapshot_seq, first.snapshot_name, first.is_unloaded) == (runs.NO_SNAPSHOT, None, False)


def test_a_snapshot_replaces_an_older_one_and_not_a_newer(store, run):
    assert store.write_now(runs.set_snapshot, run.model_id, 5, "five") is None
    assert store.write_now(runs.set_snapshot, run.model_id, 9, "nine") == "five"
    assert store.write_now(runs.set_snapshot, run.model_id, 7, "seven") == "seven"
    assert store.write_now(runs.set_snapshot, run.model_id, 9, "nine") is None
    assert store.write_now(runs.set_snapshot, "unknown", 1, "name") == "name"
    found = store.read_now(runs.get_run, run.model_id)
    assert (found.newest_seq, found.newest_name) == (found.resume_seq, found.resume_name) == (9, "nine")
    assert (found.snapshot_seq, found.snapshot_name) == (runs.NO_SNAPSHOT, None)


def test_a_verified_snapshot_is_kept_behind_the_newest(store, run):
    store.write_now(runs.set_snapshot, run.model_id, 5, "five")
    assert store.write_now(runs.confirm_snapshot, run.model_id, "five") is None
    assert store.write_now(runs.set_snapshot, run.model_id, 9, "nine") is None
    assert store.write_now(runs.confirm_snapshot, run.model_id, "five") is None
    found = store.read_now(runs.get_run, run.model_id)
    assert (found.snapshot_seq, found.snapshot_name, found.resume_seq, found.resume_name) == (5, "five", 9, "nine")
    assert {"five", "nine"} <= store.read_now(retention.known_names)
    assert store.write_now(runs.set_snapshot, run.model_id, 4, "four") == "four"
    assert store.write_now(runs.confirm_snapshot, run.model_id, "nine") == "five"
    found = store.read_now(runs.get_run, run.model_id)
    assert (found.snapshot_seq, found.snapshot_name, found.newest_name) == (9, "nine", None)


def test_a_newest_snapshot_that_cannot_be_read_gives_way_to_the_one_before(store, run):
    store.write_now(runs.set_snapshot, run.model_id, 5, "five")
    store.write_now(runs.confirm_snapshot, run.model_id, "five")
    store.write_now(runs.set_snapshot, run.model_id, 9, "nine")
    store.write_now(runs.drop_newest, run.model_id, "seven")
    assert store.read_now(runs.get_run, run.model_id).resume_name == "nine"
    store.write_now(runs.drop_newest, run.model_id, "nine")
    found = store.read_now(runs.get_run, run.model_id)
    assert (found.resume_seq, found.resume_name, found.newest_seq) == (5, "five", None)


def test_a_run_is_touched_corrupted_and_unloaded(store, run):
    later = utc_now() + timedelta(minutes=5)
    store.write_now(runs.touch_run, run.model_id, later)
    store.write_now(runs.mark_corrupted, run.model_id, "first")
    store.write_now(runs.mark_corrupted, run.model_id, "second")
    store.write_now(runs.mark_unloaded, run.model_id)
    found = store.read_now(runs.get_run, run.model_id)
    assert (found.last_request_at, found.corrupted, found.is_unloaded) == (later, "first", True)


def test_a_list_has_the_users_own_newest_first(store, session, make):
    bob = store.write_now(ensure_user, "bob")
    theirs = store.write_now(create_session, user_id=bob.user_id)
    mine = [make(session, number, project_id="p" if number else None) for number in range(4)]
    make(theirs)

    def page(**more):
        options = {"user_id": session.user_id, "limit": 2, "offset": 0} | more
        found, total = store.read_now(runs.list_runs, **options)
        return [mine.index(run) for run in found], total

    assert page() == ([3, 2], 4)
    assert page(offset=2) == ([1, 0], 4)
    assert page(offset=4) == ([], 4)
    assert page(project_id="p", limit=9) == ([3, 2, 1], 3)


def test_published_runs_of_others_are_listed_when_asked_for(store, session, make):
    bob = store.write_now(ensure_user, "bob")
    own, hidden = make(session), make(store.write_now(create_session, user_id=bob.user_id))
    shown = make(store.write_now(create_session, user_id=bob.user_id))
    flags = {name: SHAPE[name] for name in SHAPE}
    saved = store.write_now(
        add_weights, name="w", base_model="tiny", has_optimizer=False, size_bytes=1, files={}, **flags
    )
    for run, public in ((shown, True), (hidden, False)):
        place = {"user_id": bob.user_id, "model_id": run.model_id, "project_id": None}
        store.write_now(add_checkpoint, **place, kind="sampler", name="x", weights_id=saved.weights_id, public=public)
    found, total = store.read_now(runs.list_runs, user_id=session.user_id, include_published=True, limit=10, offset=0)
    assert ([run.model_id for run in found], total) == ([shown.model_id, own.model_id], 2)
