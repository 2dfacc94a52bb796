"""Finding rollouts: against a model in Python, page by page, counted by reward, and quick with 10,000 of them."""

import operator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorimer.errors import InvalidInput
from lorimer.store import rollout_search, rollouts
from lorimer.store.rollout_search import Scope, bin_edges
from lorimer.store.rollouts import Limits, encode
from lorimer.types.rollouts import Rollout, RolloutTurn
from tests.store.runs import make_part

REWARDS = [None, 0.0, 0.1, 1.0, -1.0, 0.30000000000000004]
STOPS = [None, "stop", "length"]
TEXTS = ["", "The CAT sat", "100% sure", "a_b = 3", "straße", 'say "hi"']
FIELDS = {
    "step": lambda one: one.step,
    "reward": lambda one: one.reward,
    "length": lambda one: len(one.turns[-1].tokens) if one.turns[-1].tokens is not None else None,
    "advantage": lambda one: one.advantage,
}
SIGNS = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def make(number):
    """Return a rollout whose fields are drawn from small sets by its number."""
    tokens = None if number % 7 == 0 else [3] * (number % 5)
    turns = [
        RolloutTurn(role="user", content=f"question {number % 6}"),
        RolloutTurn(role="assistant", content=f"{TEXTS[number % len(TEXTS)]} n{number}", tokens=tokens),
    ]
    return Rollout(
        step=number % 11,
        number=number,
        kind="sample" if number % 4 == 0 else "rollout",
        split="test" if number % 4 == 0 else "train",
        group=f"g{number % 3}",
        turns=turns,
        reward=REWARDS[number * 5 % len(REWARDS)],
        advantage=None if number % 2 else number / 3,
        stop_reason=STOPS[number % 3],
        errors=["bad"] if number % 13 == 0 else [],
        tags=["math", "100%"] if number % 5 == 0 else ["words"] if number % 5 == 1 else [],
    )


ALL = [make(number) for number in range(60)]


@pytest.fixture
def part(store, session):
    found = store.write_now(make_part, session, 0)
    other = store.write_now(make_part, session, 1)
    encoded = [encode(one) for one in ALL]
    for one in (found, other):
        store.write_now(rollouts.log, one.run_id, one.model_id, encoded, Limits(1000, 2**30))
    return found


@pytest.fixture
def pages(store, part):
    def pages(query="", sort="step", limit=1000):
        """Return the numbers of what is found, read in pages."""
        found, cursor, scope = [], None, Scope(part.run_id, query)
        while True:
            page = store.read_now(rollout_search.find, scope, sort=sort, limit=limit, after=cursor)
            assert len(page.rows) <= limit
            found += [row.number for row in page.rows]
            if page.next_cursor is None:
                assert store.read_now(rollout_search.count, scope) == len(found)
                return found
            assert len(page.rows) == limit
            cursor = page.next_cursor

    return pages


def text_of(one):
    return "\n".join([*(turn.content for turn in one.turns), *one.errors]).casefold()


conditions = st.one_of(
    st.tuples(st.sampled_from(list(FIELDS)), st.sampled_from(list(SIGNS)), st.sampled_from([0.0, 0.1, 1.0, 3.0, -1.0])),
    st.tuples(st.just("kind"), st.sampled_from(["=", "!="]), st.sampled_from(["sample", "rollout"])),
    st.tuples(st.just("split"), st.sampled_from(["=", "!="]), st.sampled_from(["train", "test", "none"])),
    st.tuples(st.just("group"), st.sampled_from(["=", "!="]), st.sampled_from(["g0", "g9"])),
    st.tuples(st.just("stop"), st.sampled_from(["=", "!="]), st.sampled_from(["stop", "length", ""])),
    st.tuples(st.just("error"), st.sampled_from(["=", "!="]), st.sampled_from(["yes", "no"])),
    st.tuples(st.just("tag"), st.sampled_from(["=", "!="]), st.sampled_from(["math", "100%", "mat_", ""])),
    st.tuples(st.just("word"), st.just(""), st.sampled_from(["cat", "CAT", "0%", "_b", "a_b = 3", "STRASSE", "n1"])),
)


def matches(one, condition):
    """Say what a condition means, independently of the database."""
    name, sign, value = condition
    if name == "word":
        return value.casefold() in text_of(one)
    if name == "tag":
        has = value in one.tags if value else not one.tags
        return has == (sign == "=")
    if name == "error":
        return (bool(one.errors) == (value == "yes")) == (sign == "=")
    found = {"kind": one.kind, "split": one.split, "group": one.group, "stop": one.stop_reason}.get(name)
    if name in FIELDS:
        found = FIELDS[name](one)
    if value == "":
        return (found is None) == (sign == "=")
    return found is not None and SIGNS[sign](found, value)


def spelled(condition):
    name, sign, value = condition
    return f'"{value}"' if name == "word" else f"{name}{sign}{value}"


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=st.lists(conditions, max_size=3),
    sort=st.sampled_from(list(FIELDS)),
    is_descending=st.booleans(),
    limit=st.sampled_from([1, 7, 1000]),
)
def test_every_query_finds_what_a_model_finds(pages, wanted, sort, is_descending, limit):
    chosen = [one for one in ALL if all(matches(one, condition) for condition in wanted)]
    key, sign = FIELDS[sort], -1 if is_descending else 1
    with_value = sorted((one for one in chosen if key(one) is not None), key=lambda one: sign * key(one))
    by_id = (lambda found: found[::-1]) if is_descending else (lambda found: found)
    expected = sorted(with_value, key=lambda one: (sign * key(one), sign * one.number))
    expected += by_id([one for one in chosen if key(one) is None])
    query = " ".join(map(spelled, wanted))
    assert pages(query, ("-" if is_descending else "") + sort, limit) == [one.number for one in expected]


@pytest.mark.parametrize(
    "query", ["loss<3", "reward=high", "kind>a", "error=perhaps", "tag<x", "stop>=length", "step=x"]
)
def test_wrong_queries_are_refused(pages, query):
    with pytest.raises(InvalidInput, match="accepted"):
        pages(query)


@pytest.mark.parametrize(
    ("sort", "after"), [("text", None), ("-", None), ("reward", "x"), ("reward", "1.2"), ("step", "1-1_1")]
)
def test_wrong_sorts_and_cursors_are_refused(store, part, sort, after):
    with pytest.raises(InvalidInput, match="accepted"):
        store.read_now(rollout_search.find, Scope(part.run_id), sort=sort, limit=9, after=after)


def test_steps_are_counted_by_reward(store, part):
    found = store.read_now(rollout_search.count_steps, Scope(part.run_id, "kind=rollout"), 4)
    chosen = [one for one in ALL if one.kind == "rollout"]
    assert [one.step for one in found.steps] == sorted({one.step for one in chosen})
    assert found.edges == [-1.0, -0.5, 0.0, 0.5, 1.0]
    for one in found.steps:
        here = [rollout for rollout in chosen if rollout.step == one.step]
        rewards = [rollout.reward for rollout in here if rollout.reward is not None]
        assert one.num_rollouts == len(here)
        assert one.counts == np.histogram(rewards, found.edges)[0].tolist()
        assert one.mean_reward == pytest.approx(np.mean(rewards))
        assert (one.min_reward, one.max_reward) == (min(rewards), max(rewards))
        lengths = [FIELDS["length"](rollout) for rollout in here if FIELDS["length"](rollout) is not None]
        assert one.mean_tokens == pytest.approx(np.mean(lengths))
    assert found.counts == np.sum([one.counts for one in found.steps], axis=0).tolist()
    assert found.values == {"kind": ["rollout"], "split": ["train"], "stop": ["length", "stop"]}
    empty = store.read_now(rollout_search.count_steps, Scope(part.run_id, "step>99"), 4)
    assert (empty.steps, empty.edges, empty.counts) == ([], [], [])
    constant = store.read_now(rollout_search.count_steps, Scope(part.run_id, "reward=1"), 4)
    assert (constant.edges, constant.counts) == ([1.0, 1.0], [10])


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1), st.integers(1, 200))
def test_bins_have_all_rewards_and_ascend(rewards, num_bins):
    edges = bin_edges(rewards, num_bins)
    assert edges[0] == min(rewards) and edges[-1] == max(rewards)
    assert (len(edges) <= num_bins + 1 and (np.diff(edges) > 0).all()) or min(rewards) == max(rewards)


def test_a_rollout_is_found_in_its_own_run(store, session, part):
    [row] = store.read_now(rollout_search.find, Scope(part.run_id, "number=5"), sort="step", limit=9, after=None).rows
    assert store.read_now(rollout_search.get, part.run_id, row.rollout_id) == row
    other = store.write_now(make_part, session, 2)
    assert store.read_now(rollout_search.get, other.run_id, row.rollout_id) is None
    same = store.read_now(
        rollout_search.find, Scope(part.run_id, f"prompt={row.prompt_key}"), sort="step", limit=99, after=None
    )
    assert sorted(found.number for found in same.rows) == list(range(5, 60, 6))


NUM_ROLLOUTS = 10_000


def test_ten_thousand_rollouts_stay_quick(store, part):
    if store.read_now(lambda c: c.dialect.name) != "sqlite":
        pytest.skip("only SQLite counts the instructions of a query")
    encoded = [
        encode(make(number).model_copy(update={"step": number // 100, "reward": number * 37 % 1000 / 999}))
        for number in range(NUM_ROLLOUTS)
    ]
    store.write_now(rollouts.log, part.run_id, part.model_id, encoded, Limits(NUM_ROLLOUTS, 2**30))

    def instructions(function, *args, **options):
        """Return how many thousand instructions of SQLite's virtual machine a read takes."""
        ticks = []

        def counted(c):
            raw = c.connection.dbapi_connection
            raw.set_progress_handler(lambda: ticks.append(1), 1000)
            try:
                function(c, *args, **options)
            finally:
                raw.set_progress_handler(None, 0)

        store.read_now(counted)
        return len(ticks)

    def find(query="", sort="-step", after=None):
        return instructions(rollout_search.find, Scope(part.run_id, query), sort=sort, limit=50, after=after)

    middle = store.read_now(rollout_search.find, Scope(part.run_id), sort="-reward", limit=5000, after=None)
    # A page in order of an index reads its own rows, wherever it is; the rest may look at each rollout once.
    for query, sort, after in (
        ("", "-step", None),
        ("", "reward", None),
        ("", "-reward", middle.next_cursor),
        ("", "-length", None),
        ("step=70", "-reward", None),
        ("kind=rollout", "-reward", None),
    ):
        assert find(query, sort, after) < 60, (query, sort, after)
    whole = {
        query: find(query, sort) for query, sort in (("stop=never", "-reward"), ("nothing", "-step"), ("", "advantage"))
    }
    whole["count"] = instructions(rollout_search.count, Scope(part.run_id))
    whole["steps"] = instructions(rollout_search.count_steps, Scope(part.run_id), 20)
    assert max(whole.values()) < 1000, whole
