"""Where runs are assigned, and what of that is recorded."""

from datetime import timedelta

import pytest
from sqlalchemy import update

from lorimer.scheduler.recovery import place_lost
from lorimer.store import audit, futures, moves, runs, tables
from lorimer.store.users import ensure_user
from lorimer.store.values import utc_now

LEFT, RIGHT = "lorimer/tiny#0", "lorimer/tiny#1"


@pytest.fixture
def submit(store, run):
    """Accept an operation of the run at a replica."""

    def accept(seq_id, place):
        store.write_now(
            futures.accept,
            user_id=run.user_id,
            session_id=run.session_id,
            kind="optim_step",
            lane=run.model_id,
            seq_id=seq_id,
            payload=b"",
            tokens=0,
            place=place,
        )

    return accept


def moved(store, user_id):
    found = store.read_now(moves.recent, user_id, utc_now() - timedelta(hours=1), 10)
    return [(move.model_id, move.from_replica, move.to_replica) for move in found]


def replica_of(store, run):
    return store.read_now(runs.get_run, run.model_id).replica


def test_the_first_place_is_not_a_move(store, run):
    for place in (moves.place_free, moves.place):
        store.write_now(place, run.model_id, LEFT)
        store.write_now(place, "unknown", LEFT)
    assert (replica_of(store, run), moved(store, run.user_id)) == (LEFT, [])


def test_a_released_run_moves_when_another_replica_takes_it(store, run, submit):
    store.write_now(moves.place_free, run.model_id, LEFT)
    submit(1, LEFT)
    store.write_now(moves.place_free, run.model_id, RIGHT)
    assert (replica_of(store, run), moved(store, run.user_id)) == (LEFT, [])
    for place in (LEFT, RIGHT):
        store.write_now(runs.release, run.model_id, LEFT)
        store.write_now(moves.place_free, run.model_id, place)
    assert replica_of(store, run) == RIGHT
    store.write_now(moves.place, run.model_id, LEFT)
    expected = [(run.model_id, RIGHT, LEFT), (run.model_id, LEFT, RIGHT)]
    assert moved(store, run.user_id) == expected
    assert moved(store, store.write_now(ensure_user, "bob").user_id) == []
    found = store.read_now(audit.entries, user_id=run.user_id)
    assert [entry.event for entry in found] == ["run_moved", "run_moved"]
    assert store.read_now(moves.recent, run.user_id, utc_now() + timedelta(hours=1), 10) == []


def test_runs_of_a_lost_replica_move_with_their_requests(store, run, submit):
    store.write_now(moves.place, run.model_id, LEFT)
    submit(1, LEFT)
    assert list(store.write_now(place_lost, {"lorimer/tiny": [RIGHT]}, 1)) == [RIGHT]
    assert (replica_of(store, run), moved(store, run.user_id)) == (RIGHT, [(run.model_id, LEFT, RIGHT)])


def test_sampler_replicas_get_nothing_of_a_lost_replica(store, run, submit):
    store.write_now(moves.place, run.model_id, LEFT)
    submit(1, LEFT)
    sampler = "lorimer/tiny#sampler-0"
    assert store.write_now(place_lost, {"lorimer/tiny": [sampler]}, 1) == {}
    assert list(store.write_now(place_lost, {"lorimer/tiny": [sampler, RIGHT]}, 1)) == [RIGHT]


def test_full_runs_and_adapters_get_replicas_of_their_own_kind(store, run, submit):
    store.write_now(moves.place, run.model_id, LEFT)
    submit(1, LEFT)
    full = "lorimer/tiny#full-0"
    assert store.write_now(place_lost, {"lorimer/tiny": [full]}, 1) == {}
    assert list(store.write_now(place_lost, {"lorimer/tiny": [full, RIGHT]}, 1)) == [RIGHT]
    store.write_now(lambda c: c.execute(update(tables.runs).values(method="full")))
    assert store.write_now(place_lost, {"lorimer/tiny": [LEFT]}, 1) == {}
    assert list(store.write_now(place_lost, {"lorimer/tiny": [LEFT, full]}, 1)) == [full]
