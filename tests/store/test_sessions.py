"""Sessions: labels, signs of life, how they end, lists and searches."""

from datetime import timedelta

import pytest

from lorimer.errors import NotFound
from lorimer.store import sessions
from lorimer.store.checkpoints import add_checkpoint
from lorimer.store.runs import get_run
from lorimer.store.samplers import create_sampler
from lorimer.store.users import ensure_user
from lorimer.store.values import utc_now
from lorimer.store.weights import add_weights
from lorimer.types.sessions import SessionSearchRequest


def search(store, user_ids=None, **request):
    found = store.read_now(
        sessions.search_sessions, user_ids=user_ids, request=SessionSearchRequest.model_validate(request)
    )
    return [row.session for row in found]


def test_a_session_comes_back_with_its_labels(store, user):
    made = store.write_now(
        sessions.create_session,
        user_id=user.user_id,
        tags=["a", "b"],
        user_metadata={"k\0": "v\"'"},
        sdk_version="0.36.0",
        project_id="p",
        display_name="Größe",
    )
    assert store.read_now(sessions.get_session, made.session_id) == made
    assert (made.tags, made.user_metadata, made.display_name) == (["a", "b"], {"k\0": "v\"'"}, "Größe")
    assert (made.status, made.sdk_version, made.project_id) == ("active", "0.36.0", "p")
    assert store.read_now(sessions.get_session, "unknown") is None


def test_heartbeats_are_written_in_bulk_and_never_go_back(store, user):
    ids = [store.write_now(sessions.create_session, user_id=user.user_id).session_id for _ in range(3)]
    later = utc_now() + timedelta(minutes=1)
    store.write_now(sessions.touch_session, dict.fromkeys(ids[:2], later) | {"unknown": later})
    store.write_now(sessions.touch_session, {ids[0]: later - timedelta(hours=1)})
    seen = [store.read_now(sessions.get_session, session_id).last_seen_at for session_id in ids]
    assert seen[:2] == [later, later]
    assert seen[2] < later


def test_the_first_end_stays(store, session):
    ended = store.write_now(sessions.finish_session, session.session_id, "success", "all well")
    assert (ended.status, ended.finish_reason, ended.finish_detail) == ("client_finished", "success", "all well")
    assert store.write_now(sessions.finish_session, session.session_id, "errored", "late") == ended
    with pytest.raises(NotFound, match="there is no session 'unknown'"):
        store.write_now(sessions.finish_session, "unknown", "success")


def test_a_list_has_the_users_own_newest_first(store, user):
    other = store.write_now(ensure_user, "bob")
    mine = [store.write_now(sessions.create_session, user_id=user.user_id).session_id for _ in range(5)]
    store.write_now(sessions.create_session, user_id=other.user_id)
    assert store.read_now(sessions.list_sessions, user.user_id, 3, 0) == mine[:1:-1]
    assert store.read_now(sessions.list_sessions, user.user_id, 3, 3) == mine[1::-1]


def test_members_are_runs_and_samplers(store, session, run):
    sampler = store.write_now(
        create_sampler,
        session_id=session.session_id,
        user_id=session.user_id,
        seq=0,
        base_model="tiny",
        model_path=None,
        weights_id=None,
    )
    found = store.read_now(sessions.session_members, session.session_id)
    assert found == ([run.model_id], [sampler.sampling_session_id])


def test_a_project_is_set_for_the_runs_too(store, session, run):
    moved = store.write_now(sessions.set_project, session.session_id, "project")
    assert moved.project_id == "project"
    assert store.read_now(get_run, run.model_id).project_id == "project"


@pytest.fixture
def several(store, user):
    bob = store.write_now(ensure_user, "bob")

    def make(owner, **labels):
        return store.write_now(sessions.create_session, user_id=owner.user_id, **labels)

    made = [
        make(user, display_name="Ärger mit 100% GPUs", user_metadata={"team": "red", "n": "1"}, project_id="p"),
        make(user, display_name="sweep_1", user_metadata={"team": "Red"}),
        make(bob, display_name="SWEEP 2", user_metadata={"team": "red"}),
        make(user, user_metadata={"x": '"team":"red"', ":": ","}),
    ]
    store.write_now(sessions.finish_session, made[1].session_id, "errored", None)
    store.write_now(sessions.finish_session, made[2].session_id, "success", None)
    return made


SEARCHES = {
    "everything": ({}, [3, 2, 1, 0]),
    "project": ({"project_ids": ["p", "q"]}, [0]),
    "metadata": ({"user_metadata": {"team": "red"}}, [2, 0]),
    "two pairs": ({"user_metadata": {"team": "red", "n": "1"}}, [0]),
    "text inside a value": ({"user_metadata": {"x": '"team":"red"'}}, [3]),
    "wildcards in metadata": ({"user_metadata": {"team": "r%"}}, []),
    "name in any case": ({"display_name": "ärger"}, [0]),
    "each word somewhere": ({"display_name": "gpus MIT"}, [0]),
    "wildcards in a name": ({"display_name": "100%"}, [0]),
    "underscore is itself": ({"display_name": "p_"}, [1]),
    "words": ({"display_name": "sweep"}, [2, 1]),
    "active": ({"statuses": [{"type": "active"}]}, [3, 0]),
    "finished": ({"statuses": [{"type": "client_finished"}]}, [2, 1]),
    "finished by reason": ({"statuses": [{"type": "client_finished", "reasons": ["success"]}]}, [2]),
    "several statuses": (
        {"statuses": [{"type": "active"}, {"type": "client_finished", "reasons": ["errored"]}]},
        [3, 1, 0],
    ),
}


@pytest.mark.parametrize(("request_", "expected"), SEARCHES.values(), ids=SEARCHES)
def test_a_search_finds(store, several, request_, expected):
    assert [several.index(found) for found in search_again(store, several, request_)] == expected


def search_again(store, several, request):
    """The sessions as they were made, found by id."""
    by_id = {session.session_id: session for session in several}
    return [by_id[found.session_id] for found in search(store, **request)]


def test_a_search_is_by_owner_and_by_id_or_name(store, user, several):
    assert {found.user_id for found in search(store, [user.user_id])} == {user.user_id}
    assert search(store, []) == []
    found = search_again(store, several, {"session_id": several[3].session_id, "display_name": "sweep_1"})
    assert found == [several[3], several[1]]


def test_a_search_goes_on_from_its_cursor(store, several):
    pages, cursor = [], None
    while True:
        page = search(store, limit=3, cursor=cursor)
        pages.append(len(page))
        if len(page) < 3:
            break
        cursor = {"last_created_at": page[-1].created_at, "last_session_id": page[-1].session_id}
    assert pages == [3, 1]
    assert [found.session_id for found in search(store, limit=1, user_metadata={"n": "1"})] == [several[0].session_id]


def test_a_search_counts_checkpoints(store, session, run):
    saved = store.write_now(
        add_weights,
        name="w",
        base_model="tiny",
        rank=8,
        train_attn=True,
        train_mlp=True,
        train_unembed=True,
        optimizer_type="adamw",
        has_optimizer=True,
        size_bytes=1000,
        files={},
    )
    for name in ("a", "b"):
        store.write_now(
            add_checkpoint,
            user_id=session.user_id,
            model_id=run.model_id,
            project_id=None,
            kind="training",
            name=name,
            weights_id=saved.weights_id,
        )
    [row] = store.read_now(sessions.search_sessions, user_ids=None, request=SessionSearchRequest())
    assert (row.checkpoints_count, row.checkpoint_storage_bytes, row.training_runs_count) == (2, 2000, 1)
