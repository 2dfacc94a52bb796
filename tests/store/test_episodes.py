"""Episodes in the store: counted, bounded, recorded exactly, ended once, expired and deleted with their runs."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from lorimer.errors import Gone, InvalidInput, NotFound, QuotaExceeded
from lorimer.store import episodes, samplers, tracking
from lorimer.store.blobs import INLINE_BYTES
from lorimer.store.episodes import EpisodeLimits, Turn
from lorimer.store.tables import blobs, turns
from lorimer.store.values import utc_now
from lorimer.types.episodes import CreateEpisodeRequest, FinishEpisodeRequest, SetRunSamplerRequest
from tests.store.runs import make_part

LIMITS = EpisodeLimits(max_episodes_per_run=100, max_episode_bytes_per_run=10**9, max_turns_per_episode=50)
WON = FinishEpisodeRequest(reward=1.0, reward_parts={"correct": 1.0}, user_metadata={"b": 2})
NOW = utc_now()
TURN = Turn(
    number=1,
    choice=0,
    kind="chat",
    prompt_tokens=[1, 2, 3],
    tokens=[4, 5],
    logprobs=[-0.1, -1e-300],
    stop_reason="stop",
    sampler="tiny",
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    seed=7,
    is_constrained=False,
    started_at=NOW,
    finished_at=NOW,
)


@pytest.fixture
def run_id(store, session):
    return store.write_now(make_part, session, 0).run_id


def begin(store, run_id, episode_id="e", limits=LIMITS, sampler="tiny"):
    return store.write_now(episodes.begin_turn, run_id, episode_id, sampler, limits)


def play(store, run_id, episode_id="e", num_turns=1, turn=TURN):
    for _ in range(num_turns):
        number = begin(store, run_id, episode_id).num_begun
        store.write_now(episodes.record_turn, run_id, episode_id, replace(turn, number=number))


def num_rows(store, table):
    return store.read_now(lambda c: c.execute(select(func.count()).select_from(table)).scalar_one())


def test_the_first_request_makes_the_episode_and_a_chosen_one_has_settings(store, run_id):
    store.write_now(episodes.set_sampler, run_id, SetRunSamplerRequest(sampler="s", temperature=0.5))
    assert store.read_now(episodes.find, run_id, "e")[1].sampler == "s"
    made = begin(store, run_id)
    assert (made.number, made.state, made.num_begun, made.num_turns, made.sampler) == (1, "open", 1, 0, None)
    request = CreateEpisodeRequest(episode_id="f", sampler="t", seed=3, user_metadata={"a": 1})
    chosen = store.write_now(episodes.create, run_id, request, LIMITS)
    assert (chosen.number, chosen.sampler, chosen.seed, chosen.user_metadata) == (2, "t", 3, {"a": 1})
    with pytest.raises(InvalidInput, match="'f' already"):
        store.write_now(episodes.create, run_id, request, LIMITS)
    assert store.read_now(episodes.get_sampler, run_id).num_episodes == 2


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), max_size=20),
    pairs=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(max_value=0, allow_nan=False)), max_size=20),
)
def test_turns_come_back_bit_by_bit(store, run_id, prompt, pairs):
    turn = replace(TURN, prompt_tokens=prompt, tokens=[t for t, _ in pairs], logprobs=[p for _, p in pairs])
    number = begin(store, run_id).num_begun if store.read_now(episodes.get, run_id, "e") is None else 0
    number = number or store.read_now(episodes.get, run_id, "e").num_turns + 1
    store.write_now(episodes.record_turn, run_id, "e", replace(turn, number=number))
    found, _ = store.read_now(episodes.read_turns, run_id, "e", after=number - 1)
    assert found == [replace(turn, number=number)]


def test_long_prompts_are_files_that_go_with_their_episode(store, run_id, tmp_path):
    long = replace(TURN, prompt_tokens=list(range(INLINE_BYTES // 4)))
    play(store, run_id, turn=long)
    files = list((tmp_path / "data" / "blobs").iterdir())
    assert len(files) == 1 and store.read_now(episodes.read_turns, run_id, "e")[0] == [long]
    store.write_now(episodes.remove, run_id, "e")
    assert not list((tmp_path / "data" / "blobs").iterdir())


def test_pages_keep_the_answers_of_one_request_together(store, run_id):
    play(store, run_id, num_turns=3)
    for choice in (1, 2):
        store.write_now(episodes.record_turn, run_id, "e", replace(TURN, number=1, choice=choice))
    first, has_more = store.read_now(episodes.read_turns, run_id, "e", limit=1)
    assert ([(turn.number, turn.choice) for turn in first], has_more) == ([(1, 0), (1, 1), (1, 2)], True)
    rest, has_more = store.read_now(episodes.read_turns, run_id, "e", after=1)
    assert ([turn.number for turn in rest], has_more) == ([2, 3], False)


def test_an_episode_ends_once(store, run_id):
    play(store, run_id, num_turns=2)
    begin(store, run_id)
    ended = store.write_now(episodes.finish, run_id, "e", WON)
    assert (ended.state, ended.reward, ended.reward_parts, ended.num_turns) == ("finished", 1.0, {"correct": 1.0}, 2)
    assert store.write_now(episodes.finish, run_id, "e", WON) == ended
    with pytest.raises(Gone, match=r"ended already, with reward 1\.0"):
        store.write_now(episodes.finish, run_id, "e", FinishEpisodeRequest(reward=0.5))
    with pytest.raises(Gone, match="'e' is finished"):
        store.write_now(episodes.record_turn, run_id, "e", replace(TURN, number=3))
    with pytest.raises(Gone, match="'e' is finished"):
        begin(store, run_id)
    assert store.read_now(episodes.get, run_id, "e") == ended
    with pytest.raises(NotFound, match="no episode 'x'"):
        store.write_now(episodes.finish, run_id, "x", WON)


def test_numbers_and_bytes_are_bounded_and_come_back_by_deletion(store, run_id):
    few = EpisodeLimits(max_episodes_per_run=1, max_episode_bytes_per_run=1, max_turns_per_episode=2)
    begin(store, run_id, limits=few)
    with pytest.raises(QuotaExceeded, match="max_episodes_per_run"):
        begin(store, run_id, "f", limits=few)
    begin(store, run_id, limits=few)
    with pytest.raises(QuotaExceeded, match="max_turns_per_episode"):
        begin(store, run_id, limits=few)
    assert store.read_now(episodes.get, run_id, "e").num_begun == 2
    store.write_now(episodes.record_turn, run_id, "e", TURN)
    roomy = replace(few, max_turns_per_episode=9)
    with pytest.raises(QuotaExceeded, match="max_episode_bytes_per_run"):
        begin(store, run_id, limits=roomy)
    store.write_now(episodes.remove, run_id, "e")
    counted = store.read_now(episodes.get_sampler, run_id)
    assert (counted.num_episodes, counted.num_bytes) == (0, 0)
    assert begin(store, run_id, limits=roomy).number == 2


def test_idle_episodes_expire_and_old_ones_are_deleted(store, run_id):
    play(store, run_id, "idle")
    play(store, run_id, "ended")
    store.write_now(episodes.finish, run_id, "ended", WON)
    later = utc_now() + timedelta(seconds=1)
    long_ago = later - timedelta(days=1)

    def sweep(idle_before, finished_before):
        return store.write_now(episodes.expire, idle_before=idle_before, finished_before=finished_before)

    assert sweep(long_ago, long_ago) == 0
    assert sweep(later, long_ago) == 1
    assert [one.state for one in store.read_now(episodes.list_episodes, run_id)] == ["expired", "finished"]
    with pytest.raises(Gone, match="'idle' is expired"):
        store.write_now(episodes.finish, run_id, "idle", WON)
    assert sweep(later, later + timedelta(minutes=1)) == 2
    assert num_rows(store, turns) == num_rows(store, blobs) == 0
    assert store.read_now(episodes.get_sampler, run_id).num_bytes == 0


def test_a_deleted_run_takes_its_episodes_along(store, session, run_id):
    other = store.write_now(make_part, session, 1).run_id
    for one in (run_id, other):
        play(store, one, num_turns=2)
    store.write_now(tracking.remove, store.read_now(tracking.get, run_id))
    assert store.read_now(episodes.list_episodes, run_id) == []
    assert (num_rows(store, turns), num_rows(store, blobs)) == (2, 2)


def test_a_sampler_is_used_by_its_episodes(store, session, run_id):
    made = store.write_now(
        samplers.create_sampler,
        session_id=session.session_id,
        user_id=session.user_id,
        seq=0,
        base_model="tiny",
        model_path=None,
        weights_id=None,
    )
    begin(store, run_id, sampler=made.sampling_session_id)
    assert store.read_now(samplers.get_sampler, made.sampling_session_id).last_used_at > made.last_used_at


def test_lists_are_in_order_and_filtered(store, run_id):
    for name in "abc":
        begin(store, run_id, name)
    store.write_now(episodes.finish, run_id, "b", FinishEpisodeRequest(error="it broke"))
    listed = store.read_now(episodes.list_episodes, run_id, after=1)
    assert [(one.episode_id, one.state, one.error) for one in listed] == [
        ("b", "failed", "it broke"),
        ("c", "open", None),
    ]
    assert [one.episode_id for one in store.read_now(episodes.list_episodes, run_id, state="open")] == ["a", "c"]
