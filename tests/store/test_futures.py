"""The journal: one row per number, one end per row, what is kept for replay, and what is freed."""

from datetime import timedelta

import pytest

from lorimer.store import blobs, futures
from lorimer.store.runs import confirm_snapshot, set_snapshot
from lorimer.store.values import utc_now

LARGE = bytes(blobs.INLINE_BYTES + 1)
SECOND = timedelta(seconds=1)


@pytest.fixture
def accept(store, session):
    def accept(lane, seq_id, kind="forward_backward", payload=b"payload", **more):
        return store.write_now(
            futures.accept,
            user_id=session.user_id,
            session_id=session.session_id,
            kind=kind,
            lane=lane,
            seq_id=seq_id,
            payload=payload,
            tokens=7,
            **more,
        )

    return accept


@pytest.fixture
def finish(store):
    def finish(row, result=b"{}", result_format="json", **more):
        return store.write_now(futures.finish, row.request_id, result=result, result_format=result_format, **more)

    return finish


def expire(store, *, fetched=False, finished=False, rows=False, limit=2000):
    """Expire as if all that is asked for were long past."""
    now = utc_now() + SECOND
    never = now - timedelta(days=999)
    return store.write_now(
        futures.expire,
        now=now,
        fetched_before=now if fetched else never,
        finished_before=now if finished else never,
        rows_before=now if rows else never,
        limit=limit,
    )


def test_an_accepted_operation_is_there_with_its_payload(store, session, accept):
    row, is_new = accept("lane", 3)
    assert is_new
    assert store.read_now(futures.get, row.request_id) == row
    assert (row.state, row.kind, row.lane, row.seq_id, row.tokens) == ("queued", "forward_backward", "lane", 3, 7)
    assert (row.user_id, row.session_id) == (session.user_id, session.session_id)
    assert row.received_at.tzinfo is not None
    assert len(row.request_id) == 32
    assert store.read_now(futures.payload, row.request_id) == b"payload"
    assert store.read_now(futures.result, row.request_id) is None
    assert store.read_now(futures.get, "unknown") is None


def test_a_number_has_one_row_and_a_retry_gets_it(store, accept):
    first, _ = accept("lane", 3)
    again, is_new = accept("lane", 3, payload=b"other")
    assert (again, is_new) == (first, False)
    assert again.payload_sha256 != accept("lane", 4, payload=b"other")[0].payload_sha256
    assert accept("elsewhere", 3)[1]
    assert store.read_now(futures.payload, first.request_id) == b"payload"


def test_operations_without_a_number_are_all_different(accept):
    rows = [accept("lane", None)[0] for _ in range(3)]
    assert len({row.request_id for row in rows}) == 3


def test_a_given_request_id_is_used_and_found_again(accept):
    first, _ = accept("lane", None, request_id="mine")
    assert first.request_id == "mine"
    assert accept("lane", None, request_id="mine") == (first, False)


def test_a_retry_leaves_no_second_file(store, accept, tmp_path):
    for _ in range(3):
        accept("lane", 1, payload=LARGE)
    assert len(list((tmp_path / "data" / "blobs").iterdir())) == 1


def test_a_rejected_number_counts_as_consumed(store, accept):
    row, is_new = accept("lane", 1, payload=b"", state="rejected", error="too \0long \ud800", category="user")
    assert is_new
    assert (row.state, row.error, row.category) == ("rejected", "too ?long ?", "user")
    assert row.finished_at == row.received_at
    assert store.read_now(futures.unfinished) == []
    assert store.read_now(futures.journal, "lane", 0) == [row]


def test_the_first_end_counts(store, accept, finish):
    row, _ = accept("lane", 1)
    started = utc_now()
    assert finish(row, result=b"first", result_format="protobuf", started_at=started)
    assert not finish(row, result=b"second")
    assert not store.write_now(futures.fail, row.request_id, error="late", category="server")
    ended = store.read_now(futures.get, row.request_id)
    assert (ended.state, ended.result_format, ended.result_size, ended.error) == ("done", "protobuf", 5, None)
    assert ended.started_at == started
    assert ended.finished_at >= ended.received_at
    assert store.read_now(futures.result, row.request_id) == b"first"


@pytest.mark.parametrize("state", ["failed", "abandoned", "cancelled"])
def test_a_failed_operation_keeps_its_reason(store, accept, finish, state):
    row, _ = accept("lane", 1)
    assert store.write_now(futures.fail, row.request_id, error="why", category="user", state=state)
    assert not finish(row)
    ended = store.read_now(futures.get, row.request_id)
    assert (ended.state, ended.error, ended.category) == (state, "why", "user")
    assert store.read_now(futures.result, row.request_id) is None


def test_an_unknown_operation_cannot_end(store):
    assert not store.write_now(futures.finish, "unknown", result=LARGE, result_format="json")
    assert not store.write_now(futures.fail, "unknown", error="", category="user")


def test_unfinished_are_all_queued_by_lane_and_number(store, accept, finish):
    for lane, seq_id in (("b", 2), ("b", None), ("a", 9), ("b", 1), ("a", 10), ("a", 8)):
        row, _ = accept(lane, seq_id)
        if seq_id == 8:
            finish(row)
    found = [(row.lane, row.seq_id) for row in store.read_now(futures.unfinished)]
    assert found == [("a", 9), ("a", 10), ("b", 1), ("b", 2), ("b", None)]


def test_the_journal_is_in_order_above_a_number_whatever_the_ends(store, accept, finish):
    for seq_id in (5, 3, 1, 4, 2):
        row, _ = accept("lane", seq_id)
        if seq_id % 2:
            finish(row)
    accept("other", 9)
    rows = store.read_now(futures.journal, "lane", 2)
    assert [(row.seq_id, row.state) for row in rows] == [(3, "done"), (4, "queued"), (5, "done")]


def test_history_is_the_newest_of_a_session_oldest_first(store, session, accept):
    for seq_id in range(6):
        accept("lane", seq_id)
    assert [row.seq_id for row in store.read_now(futures.history, session.session_id, 3)] == [3, 4, 5]
    assert store.read_now(futures.history, "another", 3) == []


def test_fetched_results_are_freed_and_others_stay(store, accept, finish):
    fetched, waiting = (accept("samples", seq_id, kind="sample")[0] for seq_id in (1, 2))
    finish(fetched, result=LARGE)
    finish(waiting, result=LARGE)
    store.write_now(futures.mark_fetched, {fetched.request_id: utc_now()})
    assert expire(store, fetched=True) == futures.Expired(results=1, payloads=1, rows=0)
    assert expire(store, fetched=True) == futures.Expired(0, 0, 0)
    assert store.read_now(futures.result, fetched.request_id) is None
    assert store.read_now(futures.result, waiting.request_id) == LARGE
    assert store.read_now(futures.get, fetched.request_id).result_size == len(LARGE)


def test_release_drops_bytes_and_keeps_rows(store, accept, finish, tmp_path):
    done, _ = accept("samples", 1, kind="sample", payload=LARGE)
    queued, _ = accept("samples", 2, kind="sample", payload=LARGE)
    finish(done, result=LARGE)
    store.write_now(futures.release, [done.request_id, queued.request_id, "unknown"])
    assert store.read_now(futures.payload, done.request_id) is store.read_now(futures.result, done.request_id) is None
    assert store.read_now(futures.payload, queued.request_id) == LARGE
    assert store.read_now(futures.get, done.request_id).state == "done"
    assert len(list((tmp_path / "data" / "blobs").iterdir())) == 1


# ── what a replay needs ───────────────────────────────────────────────────────────────────────────────

KINDS = ["forward_backward", "optim_step", "load_weights", "save_weights"]


def free_everything(store, run, rows):
    store.write_now(futures.mark_fetched, {row.request_id: utc_now() for row in rows})
    store.write_now(futures.release, [row.request_id for row in rows])
    store.write_now(futures.drop_payloads, run.model_id, 10**9)
    while expire(store, fetched=True, finished=True, rows=True) != futures.Expired(0, 0, 0):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_above_the_snapshot_nothing_that_replay_needs_is_freed(store, run, accept, finish, kind):
    rows = [accept(run.model_id, seq_id, kind=kind)[0] for seq_id in range(5)]
    for row in rows[:4]:
        finish(row)
    free_everything(store, run, rows)
    payloads = [store.read_now(futures.payload, row.request_id) for row in rows]
    assert payloads == [b"payload"] * 5
    assert [store.read_now(futures.result, row.request_id) for row in rows] == [None] * 5

    store.write_now(set_snapshot, run.model_id, 2, "snapshot")
    free_everything(store, run, rows)
    assert len(store.read_now(futures.journal, run.model_id, -1)) == 5  # it may turn out to be damaged
    store.write_now(confirm_snapshot, run.model_id, "snapshot")
    free_everything(store, run, rows)
    left = [(row.seq_id, row.state) for row in store.read_now(futures.journal, run.model_id, -1)]
    assert left == [(3, "done"), (4, "queued")]
    assert store.read_now(futures.payload, rows[3].request_id) == b"payload"


def test_above_the_snapshot_rows_without_effect_keep_their_number_but_not_their_bytes(store, run, accept, finish):
    forward, failed = accept(run.model_id, 0, kind="forward")[0], accept(run.model_id, 1)[0]
    rejected, _ = accept(run.model_id, 2, payload=b"", state="rejected", error="bad", category="user")
    finish(forward)
    store.write_now(futures.fail, failed.request_id, error="bad", category="user")
    free_everything(store, run, [forward, failed, rejected])
    assert [row.seq_id for row in store.read_now(futures.journal, run.model_id, -1)] == [0, 1, 2]
    assert store.read_now(futures.payload, forward.request_id) is None
    assert store.read_now(futures.payload, failed.request_id) is None


def test_what_created_a_run_is_kept_until_it_has_a_verified_snapshot(store, session, run, accept, finish):
    lane = f"{session.session_id}:models"
    mine, other = (accept(lane, seq_id, kind="create_model")[0] for seq_id in (0, 1))
    finish(mine)
    store.write_now(futures.fail, other.request_id, error="bad", category="user")
    free_everything(store, run, [mine, other])
    assert store.read_now(futures.payload, mine.request_id) == b"payload"
    assert store.read_now(futures.get, other.request_id) is None
    store.write_now(set_snapshot, run.model_id, 0, "snapshot")
    store.write_now(confirm_snapshot, run.model_id, "snapshot")
    free_everything(store, run, [mine])
    assert store.read_now(futures.get, mine.request_id) is None


def test_payloads_are_dropped_up_to_a_number_and_the_snapshot(store, run, accept, finish):
    rows = [accept(run.model_id, seq_id)[0] for seq_id in range(6)]
    for row in rows[:5]:
        finish(row)
    store.write_now(set_snapshot, run.model_id, 3, "snapshot")
    assert store.write_now(futures.drop_payloads, run.model_id, 5) == 0
    store.write_now(confirm_snapshot, run.model_id, "snapshot")
    assert store.write_now(futures.drop_payloads, run.model_id, 1) == 2
    assert store.write_now(futures.drop_payloads, run.model_id, 5) == 2
    assert store.write_now(futures.drop_payloads, run.model_id, 5) == 0
    kept = [store.read_now(futures.payload, row.request_id) is not None for row in rows]
    assert kept == [False, False, False, False, True, True]
    assert store.read_now(futures.result, rows[0].request_id) == b"{}"


def test_queued_operations_never_expire(store, accept):
    row, _ = accept("samples", 1, kind="sample")
    assert expire(store, fetched=True, finished=True, rows=True) == futures.Expired(0, 0, 0)
    assert store.read_now(futures.payload, row.request_id) == b"payload"


def test_expiry_works_in_steps(store, accept, finish):
    for seq_id in range(25):
        finish(accept("samples", seq_id, kind="sample")[0])
    freed = [expire(store, finished=True, limit=10).results for _ in range(4)]
    assert freed == [10, 10, 5, 0]
    assert [expire(store, rows=True, limit=10).rows for _ in range(4)] == [10, 10, 5, 0]


def test_times_in_the_future_expire_nothing(store, accept, finish):
    """A clock that was ahead when the threshold was made does not free what ends later."""
    finish(accept("samples", 1, kind="sample")[0])
    now = utc_now() - timedelta(hours=1)
    later = now + timedelta(days=9)
    found = store.write_now(futures.expire, now=now, fetched_before=later, finished_before=later, rows_before=later)
    assert found == futures.Expired(0, 0, 0)
