"""Losses, usage, audit, telemetry and idempotency: what is added comes back, bounded and in order."""

from datetime import UTC, date, datetime, timedelta

from lorimer.store import audit, blobs, custom_loss, idempotency, telemetry, usage
from lorimer.store.values import utc_now

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


def test_a_loss_is_kept_once(store, session):
    payload = bytes(blobs.INLINE_BYTES + 1)
    values = {"loss_id": "l1", "session_id": session.session_id, "user_id": session.user_id, "name": "mine"}
    first = store.write_now(custom_loss.add_loss, **values, payload=payload)
    assert store.write_now(custom_loss.add_loss, **values, payload=b"other") == first
    assert store.read_now(custom_loss.get_loss, "l1") == first
    assert first.payload == payload
    assert store.read_now(custom_loss.count_losses, session.session_id) == 1
    assert store.read_now(custom_loss.get_loss, "unknown") is None


def item(minutes, amount, kind="training", **more):
    values = {"user_id": "ada", "session_id": "s", "project_id": None, "base_model": "tiny"} | more
    return usage.UsageItem(**values, kind=kind, amount=amount, at=NOON + timedelta(minutes=minutes))


def test_usage_is_summed_by_the_hour(store):
    store.write_now(usage.record, [item(0, 1), item(59, 2), item(60, 4), item(1, 8, "sampling_sample")])
    store.write_now(usage.record, [item(30, 16), item(30, 32, user_id="bob", session_id=None)])
    store.write_now(usage.record, [])
    found = store.read_now(usage.usage_events, start=NOON, end=NOON + timedelta(hours=9))
    assert [(u.bucket_start, u.user_id, u.session_id, u.kind, u.amount) for u in found] == [
        (NOON, "ada", "s", "sampling_sample", 8),
        (NOON, "ada", "s", "training", 19),
        (NOON, "bob", None, "training", 32),
        (NOON + timedelta(hours=1), "ada", "s", "training", 4),
    ]
    assert found[0].bucket_end == NOON + timedelta(hours=1)
    assert found[0].project_id is None
    mine = store.read_now(usage.usage_events, user_id="bob", start=NOON, end=NOON + timedelta(hours=1))
    assert [u.amount for u in mine] == [32]
    assert store.read_now(usage.usage_events, start=NOON - timedelta(hours=1), end=NOON) == []


def test_audit_entries_are_found_by_user_kind_and_day(store):
    store.write_now(
        audit.record,
        user_id="ada",
        event="checkpoint_read",
        model_id="run",
        tinker_path="tinker://run/weights/x",
        details={"who": ["ada"]},
        purpose="download",
    )
    store.write_now(audit.record, user_id="bob", event="checkpoint_delete")
    store.write_now(audit.record, user_id=None, event="project_create")
    assert [e.event for e in store.read_now(audit.entries)] == [
        "project_create",
        "checkpoint_delete",
        "checkpoint_read",
    ]
    [mine] = store.read_now(audit.entries, user_id="ada", event_type="checkpoints", day=utc_now().date())
    assert (mine.tinker_path, mine.details, mine.purpose) == ("tinker://run/weights/x", {"who": ["ada"]}, "download")
    assert len(store.read_now(audit.entries, event_type="checkpoints")) == 2
    assert store.read_now(audit.entries, event_type="teams") == []
    assert store.read_now(audit.entries, day=date(2020, 1, 1)) == []


def test_telemetry_keeps_the_newest_thousand_of_each_session(store):
    for start in range(0, 1200, 100):
        store.write_now(telemetry.add_events, "s", "ada", [{"n": n} for n in range(start, start + 100)])
    store.write_now(telemetry.add_events, "other", "ada", [{"n": -1}])
    store.write_now(telemetry.add_events, "s", "ada", [])
    found = [event["n"] for event in store.read_now(telemetry.events, "s")]
    assert found == list(range(200, 1200))
    assert store.read_now(telemetry.events, "other") == [{"n": -1}]
    store.write_now(telemetry.add_events, "s", "ada", [{"n": n} for n in range(3000)])
    assert [event["n"] for event in store.read_now(telemetry.events, "s")] == list(range(2000, 3000))


def test_the_first_answer_is_remembered(store):
    assert store.write_now(idempotency.remember, "ada", "key", {"a": 1}) == {"a": 1}
    assert store.write_now(idempotency.remember, "ada", "key", {"a": 2}) == {"a": 1}
    assert store.write_now(idempotency.remember, "bob", "key", "x") == "x"
    assert store.read_now(idempotency.recall, "ada", "other") is None
    assert store.write_now(idempotency.forget, utc_now() - timedelta(days=1)) == 0
    assert store.write_now(idempotency.forget, utc_now() + timedelta(days=1)) == 2
    assert store.read_now(idempotency.recall, "ada", "key") is None
