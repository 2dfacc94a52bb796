"""Lists and the journal's questions use their indices, so that they stay fast however many rows there are."""

import pytest
from sqlalchemy import event

from lorimer.store import (
    Store,
    checkpoints,
    episodes,
    evaluations,
    futures,
    metrics,
    moves,
    rollouts,
    runs,
    samplers,
    sessions,
    trainings,
    usage,
    users,
)
from lorimer.store.tables import metadata
from lorimer.store.values import utc_now
from lorimer.types.sessions import SessionSearchRequest

NOW = utc_now()
PERIODS = {"now": NOW, "fetched_before": NOW, "finished_before": NOW, "rows_before": NOW}

QUESTIONS = {
    "future": lambda c: futures.get(c, "x"),
    "unfinished": futures.unfinished,
    "journal": lambda c: futures.journal(c, "lane", 3),
    "history": lambda c: futures.history(c, "s", 10),
    "drop_payloads": lambda c: futures.drop_payloads(c, "lane", 3),
    "release": lambda c: futures.release(c, ["a", "b"]),
    "expire": lambda c: futures.expire(c, **PERIODS),
    "operations of a run": lambda c: futures.newest_of_lane(c, "lane", 9, 10),
    "errors": lambda c: futures.newest_errors(c, "u", 20),
    "errors of a session": lambda c: futures.session_errors(c, "s", 20),
    "metrics": lambda c: metrics.read(c, "r", metrics.Cursor(3)),
    "metrics of steps": lambda c: metrics.read(c, "r", metrics.Cursor(3), 10, metrics.Choice(steps=(5, 9))),
    "moves": lambda c: moves.recent(c, "u", NOW, 20),
    "place of a run": lambda c: moves.place(c, "r", "m#0"),
    "runs by model": lambda c: runs.count_by_model(c, "u"),
    "sessions": lambda c: sessions.list_sessions(c, "u", 20, 0),
    "search": lambda c: sessions.search_sessions(c, user_ids=["u"], request=SessionSearchRequest()),
    "members": lambda c: sessions.session_members(c, "s"),
    "runs": lambda c: runs.list_runs(c, user_id="u", limit=20, offset=0),
    "checkpoints of a user": lambda c: checkpoints.list_for_user(c, "u", 20, 0),
    "checkpoints of a run": lambda c: checkpoints.list_for_run(c, "r"),
    "last of a run": lambda c: checkpoints.last_of_run(c, "r", "training"),
    "expired": lambda c: checkpoints.expired(c, NOW),
    "evaluations": lambda c: evaluations.list_evaluations(c, evaluations.Filter("u"), 20, 0),
    "evaluations of a model": lambda c: evaluations.list_evaluations(c, evaluations.Filter("u", "m"), 20, 0),
    "evaluations of a replaced checkpoint": lambda c: evaluations.delete_of_checkpoint(c, "r", "sampler", "n"),
    "trainings": lambda c: trainings.list_trainings(c, "u", 20, 0),
    "deaths of engines": lambda c: futures.deaths_of_lane(c, "lane", 10),
    "rollouts of a user": lambda c: rollouts.bytes_of_user(c, "u"),
    "samplers": lambda c: samplers.list_samplers(c, "s"),
    "key": lambda c: users.find_key(c, "tml-x"),
    "episodes": lambda c: episodes.list_episodes(c, "r", after=3),
    "turns": lambda c: episodes.read_turns(c, "r", "e", after=3),
    "expired episodes": lambda c: episodes.expire(c, idle_before=NOW, finished_before=NOW),
    "usage": lambda c: usage.usage_events(c, user_id="u", start=NOW, end=NOW),
}


@pytest.fixture(scope="module")
def sqlite_store(tmp_path_factory):
    store = Store.open(None, tmp_path_factory.mktemp("plans"))
    yield store
    store.close()


def explain(c, question):
    """The plan of each statement the question executes."""
    asked = []

    def note(connection, cursor, statement, parameters, *_):
        asked.append((statement, parameters))

    event.listen(c, "before_cursor_execute", note)
    try:
        question(c)
    finally:
        event.remove(c, "before_cursor_execute", note)
    return [
        [row[3] for row in c.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
        for statement, parameters in asked
    ]


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_no_table_is_read_from_end_to_end(sqlite_store, question):
    plans = sqlite_store.write_now(explain, question)
    assert plans
    for plan in plans:
        # All that is queued is the one index that is read from end to end.
        scans = [step for step in plan if step.split()[:1] == ["SCAN"] and step.split()[1] in metadata.tables]
        scans = [step for step in scans if "ix_futures_queued" not in step]
        assert scans == [], plan


@pytest.mark.parametrize(
    "question", ["sessions", "runs", "checkpoints of a user", "journal", "history", "errors", "moves"]
)
def test_lists_are_read_in_order(sqlite_store, question):
    for plan in sqlite_store.write_now(explain, QUESTIONS[question]):
        assert not [step for step in plan if "TEMP B-TREE" in step], plan
