"""Rollouts: stored durably and once, superseded by later parts, thinned, and removed with their run and its blobs."""

import itertools
import random

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from lorimer.errors import TooLarge
from lorimer.store import blobs, rollout_search, rollouts, tracking
from lorimer.store.rollout_search import Scope
from lorimer.store.rollouts import Limits, encode, steps_to_drop
from lorimer.store.tables import blobs as blob_table
from lorimer.store.tables import rollout_texts
from lorimer.types.rollouts import Rollout, RolloutToolCall, RolloutTurn
from lorimer.types.runs import RunIdentity
from tests.store.runs import make_part

ROOMY = Limits(10_000, 2**30)


def make(step, number=0, text="yes", **values):
    asked = RolloutTurn(role="user", content=values.pop("question", "Is it?"))
    answer = RolloutTurn(role="assistant", content=text, tokens=[1, 2], logprobs=[-0.5, None], offsets=[0, 1])
    return Rollout(step=step, number=number, turns=[asked, answer], **values)


def log(store, part, *found, limits=ROOMY):
    return store.write_now(rollouts.log, part.run_id, part.model_id, [encode(one) for one in found], limits)


def rows(store, part, query="", sort="step"):
    return store.read_now(rollout_search.find, Scope(part.run_id, query), sort=sort, limit=10_000, after=None).rows


def steps(store, part):
    return [row.step for row in rows(store, part)]


def num_blobs(store):
    return store.read_now(
        lambda c: tuple(
            c.execute(select(func.count()).select_from(t)).scalar_one() for t in (blob_table, rollout_texts)
        )
    )


@pytest.fixture
def part(store, session):
    return store.write_now(make_part, session, 0, RunIdentity(run_key="k"))


def test_everything_that_was_logged_is_read_back(store, part):
    call = RolloutToolCall(name="add", arguments='{"a": 1}', result="2", error="late", seconds=0.5)
    whole = Rollout(
        step=3,
        kind="sample",
        split="test",
        group="g",
        number=7,
        turns=[
            RolloutTurn(role="user", content="1 + 1\0?", logs={"source": "book"}),
            RolloutTurn(
                role="assistant",
                content="let me\nadd 👍",
                tokens=[5, 6],
                logprobs=[-1.5, None],
                advantages=[0.25, -0.25],
                offsets=[0, 6],
                reward=0.5,
                stop_reason="stop",
                tool_calls=[call],
                seconds=2.0,
            ),
            RolloutTurn(role="tool", content="2"),
            RolloutTurn(role="assistant", content=" two " * 200, tokens=[7]),
        ],
        reward=0.5,
        reward_parts={"correct": 1.0, "format": -0.5},
        advantage=-0.125,
        stop_reason="stop",
        errors=["the grader was late"],
        tags=["sums", "easy"],
        seconds={"sampling": 2.0},
        logs={"reference": "2"},
    )
    assert log(store, part, whole) == (1, 0)
    [row] = rows(store, part)
    assert (row.step, row.kind, row.split, row.group_name, row.number) == (3, "sample", "test", "g", 7)
    assert (row.reward, row.advantage, row.stop_reason, row.has_errors) == (0.5, -0.125, "stop", True)
    assert (row.num_tokens, row.num_turns, row.model_id) == (3, 4, part.model_id)
    assert row.prompt == "1 + 1??" and row.answer == ("two " * 50)[:200]
    content = store.read_now(rollouts.read_content, row)
    given = whole.model_dump(include={"turns", "reward_parts", "errors", "seconds", "logs"}, exclude_defaults=True)
    assert content == orjson.loads(orjson.dumps(given))


def test_a_rollout_that_is_logged_again_replaces_the_earlier_one(store, part):
    batch = [make(1, number, reward=float(number)) for number in range(3)]
    log(store, part, *batch)
    before = rows(store, part)
    assert log(store, part, *batch) == (3, 0)
    assert [(row.rollout_id, row.reward) for row in rows(store, part)] == [
        (row.rollout_id, row.reward) for row in before
    ]
    log(store, part, make(1, 1, "no", reward=9.0), make(1, 1, "never", reward=8.0))
    found = rows(store, part)
    assert [(row.rollout_id, row.reward) for row in found] == [
        (before[0].rollout_id, 0.0),
        (before[1].rollout_id, 8.0),
        (before[2].rollout_id, 2.0),
    ]
    assert store.read_now(rollouts.read_content, found[1])["turns"][1]["content"] == "never"
    assert [row.number for row in rows(store, part, "never")] == [1] and rows(store, part, '"no"') == []
    assert num_blobs(store) == (3, 3)


def test_a_resumed_run_supersedes_the_steps_it_repeats(store, session, part):
    log(store, part, *(make(step) for step in range(6)))
    later = store.write_now(make_part, session, 1, RunIdentity(run_key="k", first_step=3))
    assert later.run_id == part.run_id and steps(store, part) == [0, 1, 2]
    assert log(store, part, make(2, 1), make(4)) == (1, 1)  # the old program is still running
    assert log(store, later, make(3), make(4)) == (2, 0)
    assert [(row.step, row.model_id == later.model_id) for row in rows(store, part)] == [
        (0, False),
        (1, False),
        (2, False),
        (2, False),
        (3, True),
        (4, True),
    ]
    assert num_blobs(store) == (6, 6)


def test_rollouts_go_with_their_run_and_no_other(store, session, part, tmp_path):
    other = store.write_now(make_part, session, 1)
    large = make(0, text="".join(map(chr, range(0x4E00, 0x9000))) * 9)
    for one in (part, other):
        log(store, one, make(1), large)
    store.write_now(tracking.remove, store.read_now(tracking.get, part.run_id))
    assert rows(store, part) == [] and len(rows(store, other)) == 2
    assert num_blobs(store) == (2, 2)


def test_large_contents_are_files_that_are_removed_when_replaced(store, part, tmp_path):
    def files():
        return sorted(path.name for path in (tmp_path / "data" / "blobs").iterdir())

    noise = "".join(random.Random(0).choices("abcdefghijklmnop0123456789", k=800_000))
    log(store, part, make(0, text=noise))
    [before] = files()
    assert store.read_now(rollouts.read_content, rows(store, part)[0])["turns"][1]["content"] == noise
    log(store, part, make(0, text=noise[::-1]))
    assert len(files()) == 1 and files() != [before]
    log(store, part, make(0, text="short"))
    assert files() == []


def test_a_run_keeps_its_newest_steps_and_thins_the_others(store, part):
    limits = Limits(40, 2**30)
    for step in range(120):
        log(store, part, make(step), make(step, 1), limits=limits)
        kept = sorted(set(steps(store, part)))
        assert len(steps(store, part)) <= 40
        assert kept[-min(step + 1, 10) :] == list(range(step + 1))[-10:] and kept[0] == 0
    old = [step for step in kept if step <= 100]
    apart = {b - a for a, b in itertools.pairwise(old)}
    assert max(apart) <= 2 * min(apart), old
    assert num_blobs(store) == (len(steps(store, part)),) * 2


def test_a_step_that_is_too_large_alone_is_refused_and_changes_nothing(store, part):
    limits = Limits(3, 2**30)
    log(store, part, make(0), limits=limits)
    with pytest.raises(TooLarge, match="max_rollouts_per_run"):
        log(store, part, *(make(1, number) for number in range(4)), limits=limits)
    with pytest.raises(TooLarge, match="max_rollout_bytes_per_run"):
        log(store, part, make(1), limits=Limits(9, 10))
    assert steps(store, part) == [0] and num_blobs(store) == (1, 1)


sizes = st.tuples(st.integers(1, 5), st.integers(1, 50))


@settings(deadline=None, max_examples=150)
@given(
    gaps=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    data=st.data(),
    most=st.integers(5, 30),
    most_bytes=st.integers(50, 400),
)
def test_thinning_fits_and_keeps_the_newest(gaps, data, most, most_bytes):
    """Whatever the sizes: the limits hold, the newest step stays, and no more is dropped than half of the limits."""
    limits, kept, at = Limits(most, most_bytes), [], 0
    for gap in gaps:
        at += gap
        kept.append((at, *data.draw(sizes)))
        before = list(kept)
        gone = set(steps_to_drop(kept, limits))
        kept = [one for one in kept if one[0] not in gone]
        assert sum(one[1] for one in kept) <= most and sum(one[2] for one in kept) <= most_bytes
        assert kept[-1][0] == at
        if not gone:
            continue
        newest = [one for one in before if one[0] > max(gone)]
        assert kept[len(kept) - len(newest) :] == newest


def test_offsets_and_lengths_are_checked():
    for wrong in (
        {"tokens": [1, 2], "logprobs": [0.0]},
        {"logprobs": [0.0]},
        {"tokens": [1, 2], "offsets": [1, 0]},
        {"tokens": [1], "offsets": [9]},
    ):
        with pytest.raises(ValueError, match="accepted"):
            RolloutTurn(role="assistant", content="abc", **wrong)
    assert blobs.INLINE_BYTES < 800_000
