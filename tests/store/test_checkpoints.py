"""Checkpoints, the weights behind them, and the samplers that keep weights alive."""

from datetime import timedelta

import pytest
from sqlalchemy.exc import IntegrityError

from lorimer.errors import InvalidInput, NotFound
from lorimer.store import checkpoints, samplers, weights
from lorimer.store.values import utc_now

HOUR = timedelta(hours=1)


@pytest.fixture
def save(store):
    def save(name, size_bytes=100):
        return store.write_now(
            weights.add_weights,
            name=name,
            base_model="tiny",
            rank=8,
            train_attn=True,
            train_mlp=True,
            train_unembed=False,
            optimizer_type="adamw",
            has_optimizer=True,
            size_bytes=size_bytes,
            files={"adapter_model.safetensors": {"size": size_bytes, "sha256": "ab"}},
        )

    return save


@pytest.fixture
def add(store, user):
    def add(saved, name="step-1", kind="training", model_id="run", **more):
        place = {"user_id": user.user_id, "model_id": model_id, "project_id": None, "kind": kind, "name": name}
        return store.write_now(checkpoints.add_checkpoint, **(place | more), weights_id=saved.weights_id)

    return add


@pytest.fixture
def sample_from(store, session):
    def sample_from(saved, seq=0, model_id=None, **more):
        return store.write_now(
            samplers.create_sampler,
            session_id=session.session_id,
            user_id=session.user_id,
            seq=seq,
            base_model="tiny",
            model_path=None,
            weights_id=None if saved is None else saved.weights_id,
            model_id=model_id,
            **more,
        )

    return sample_from


def test_a_checkpoint_comes_back_with_its_weights(store, save, add):
    saved = save("w", 123)
    made = add(saved, user_metadata={"a": "b"})
    assert store.read_now(checkpoints.find, "run", "training", "step-1") == made
    assert (made.weights, made.size_bytes, made.public, made.user_metadata) == (saved, 123, False, {"a": "b"})
    assert store.read_now(checkpoints.find, "run", "sampler", "step-1") is None
    assert store.read_now(weights.get_weights, saved.weights_id) == saved
    assert save("w", 999) == saved


def test_a_name_in_use_is_refused_unless_overwritten(store, save, add):
    first = add(save("one"))
    with pytest.raises(InvalidInput, match="the run 'run' already has a training checkpoint named 'step-1'"):
        add(save("two"))
    assert store.read_now(checkpoints.find, "run", "training", "step-1") == first
    second = add(save("two"), overwrite=True)
    assert store.read_now(checkpoints.list_for_run, "run") == [second]
    assert second.weights.name == "two"
    assert add(save("one"), kind="sampler").kind == "sampler"


def test_an_expired_checkpoint_is_gone_and_its_name_free(store, save, add, user):
    saved = save("w")
    made = add(saved, expires_at=utc_now() - HOUR)
    assert store.read_now(checkpoints.find, "run", "training", "step-1") is None
    assert store.read_now(checkpoints.list_for_run, "run") == []
    assert store.read_now(checkpoints.list_for_user, user.user_id, 10, 0) == ([], 0)
    assert store.read_now(checkpoints.last_of_run, "run", "training") is None
    assert store.read_now(checkpoints.storage_usage, user.user_id) == []
    assert store.read_now(checkpoints.expired, utc_now()) == [made]
    assert not store.write_now(checkpoints.set_ttl, made.checkpoint_key, None)
    assert add(saved).expires_at is None
    assert store.read_now(checkpoints.expired, utc_now()) == []


def test_checkpoints_are_listed_newest_first(store, save, add, user):
    saved = save("w")
    made = [add(saved, name=f"step-{number}", kind=kind) for number in range(3) for kind in ("training", "sampler")]
    made += [add(saved, user_id="bob", model_id="other")]
    assert store.read_now(checkpoints.list_for_run, "run") == made[5::-1]
    assert store.read_now(checkpoints.list_for_user, user.user_id, 2, 1) == ([made[4], made[3]], 6)
    assert store.read_now(checkpoints.last_of_run, "run", "training") == made[4]
    assert store.read_now(checkpoints.last_of_run, "run", "external") is None


def test_a_checkpoint_is_published_given_an_end_and_deleted(store, save, add):
    made = add(save("w"))
    end = utc_now() + HOUR
    assert store.write_now(checkpoints.set_public, made.checkpoint_key, True)
    assert store.write_now(checkpoints.set_ttl, made.checkpoint_key, end)
    found = store.read_now(checkpoints.find, "run", "training", "step-1")
    assert (found.public, found.expires_at) == (True, end)
    assert store.write_now(checkpoints.set_ttl, made.checkpoint_key, None)
    assert store.write_now(checkpoints.delete, made.checkpoint_key)
    assert not store.write_now(checkpoints.delete, made.checkpoint_key)
    assert not store.write_now(checkpoints.set_public, made.checkpoint_key, True)


def test_storage_is_summed_by_user_and_project(store, save, add, user):
    saved = save("w", 100)
    add(saved, name="a")
    add(saved, name="b", project_id="p")
    add(saved, name="c", project_id="p")
    add(saved, name="d", user_id="bob", project_id="p")
    everything = store.read_now(checkpoints.storage_usage)
    assert {(u.user_id, u.project_id, u.checkpoint_count, u.size_bytes) for u in everything} == {
        (user.user_id, None, 1, 100),
        (user.user_id, "p", 2, 200),
        ("bob", "p", 1, 100),
    }
    assert len(store.read_now(checkpoints.storage_usage, user.user_id)) == 2
    assert len(store.read_now(checkpoints.storage_usage, None, "p")) == 2


def test_weights_are_free_when_no_checkpoint_and_no_recent_sampler_names_them(store, save, add, sample_from):
    named, used, idle, unused = (save(name) for name in ("named", "used", "idle", "unused"))
    add(named)
    busy = sample_from(used, 0)
    sample_from(idle, 1)
    later = utc_now() + HOUR
    store.write_now(samplers.touch_samplers, {busy.sampling_session_id: later + HOUR})
    assert store.read_now(weights.unreferenced, sampler_idle_before=later) == [idle, unused]
    assert store.read_now(weights.unreferenced, sampler_idle_before=utc_now() - HOUR) == []


def test_weights_that_a_checkpoint_names_are_never_deleted(store, save, add, sample_from):
    named, free = save("named"), save("free")
    add(named)
    sampler = sample_from(free)
    assert store.write_now(weights.delete_weights, [named.weights_id, free.weights_id]) == [free]
    assert store.read_now(weights.get_weights, named.weights_id) == named
    found = store.read_now(samplers.get_sampler, sampler.sampling_session_id)
    assert found.weights_id == free.weights_id, "the sampler still says what it held"
    with pytest.raises(IntegrityError):
        add(free, name="too late")


def test_a_sampler_is_made_once(store, session, save, sample_from):
    first = sample_from(save("w"), 4)
    assert first.sampling_session_id == f"{session.session_id}:sample:4"
    assert sample_from(None, 4) == first
    assert sample_from(None, 5).weights_id is None
    assert [found.seq for found in store.read_now(samplers.list_samplers, session.session_id)] == [4, 5]
    assert store.read_now(samplers.get_sampler, "unknown") is None


def test_clients_of_a_sampler_are_counted_from_one(store, sample_from):
    sampler = sample_from(None)
    assert [store.write_now(samplers.join, sampler.sampling_session_id) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(NotFound, match="there is no sampling session 'unknown'"):
        store.write_now(samplers.join, "unknown")


def test_idle_samplers_of_unnamed_weights_may_go_but_not_the_newest(store, save, sample_from):
    made = [sample_from(save(f"w{number}"), number, model_id="run") for number in range(4)]
    sample_from(save("w"), 9)
    sample_from(None, 10)
    later = utc_now() + HOUR
    store.write_now(samplers.touch_samplers, {made[0].sampling_session_id: later + HOUR})

    def idle(keep_per_run, unused_before):
        found = store.read_now(samplers.idle_ephemeral, keep_per_run=keep_per_run, unused_before=unused_before)
        return [made.index(sampler) for sampler in found]

    assert idle(1, later) == [1, 2]
    assert idle(0, later) == [1, 2, 3]
    assert idle(0, utc_now() - HOUR) == []
    assert store.write_now(samplers.delete_samplers, [made[1].sampling_session_id, "unknown"]) == 1
