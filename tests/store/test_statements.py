"""Statements of the hot path write what SQLAlchemy writes, and raise what it raises."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from lorimer.store.statements import Statement
from lorimer.store.tables import blobs, futures

ROW = {
    "user_id": "ada",
    "session_id": None,
    "kind": "forward",
    "state": "queued",
    "error": "ä\U0001f600",
    "category": None,
    "received_at": datetime(2026, 1, 2, 3, 4, 5, 6, timezone(timedelta(hours=2))),
    "started_at": datetime(2026, 1, 2, tzinfo=UTC),
    "finished_at": None,
    "fetched_at": None,
    "tokens": 2**40,
    "result_format": None,
    "result_size": 0,
    "payload_sha256": "",
    "holds_bytes": True,
    "place": "m#0",
    "finished_no": None,
    "deaths": 0,
}


def test_rows_are_those_of_sqlalchemy(store):
    ours, theirs = (ROW | {"request_id": name, "lane": name, "seq_id": 1} for name in ("1", "2"))
    assert store.write_now(Statement(lambda _: insert(futures)).run, ours) == 1
    store.write_now(lambda c: c.execute(insert(futures), theirs))
    found = store.read_now(lambda c: c.execute(select(futures).order_by(futures.c.request_id)).all())
    assert [row._mapping["received_at"] for row in found] == [ROW["received_at"]] * 2
    different = {"request_id", "lane"}
    rows = [{name: value for name, value in row._mapping.items() if name not in different} for row in found]
    assert rows[0] == rows[1]


def test_constants_of_a_statement_are_kept(store):
    rows = [{"owner": owner, "part": "payload", "data": b"\0\xff", "file": None} for owner in ("a", "b")]
    for row in rows:
        store.write_now(Statement(lambda _: insert(blobs)).run, row)
    named = blobs.c.owner == bindparam("of")
    rename = Statement(lambda _: update(blobs).where(named, blobs.c.part == "payload").values(part="result"))
    assert [store.write_now(rename.run, {"of": "b"}) for _ in range(2)] == [1, 0]
    found = store.read_now(lambda c: c.execute(select(blobs.c.owner, blobs.c.part, blobs.c.data)).all())
    assert sorted(found) == [("a", "payload", b"\0\xff"), ("b", "result", b"\0\xff")]


def test_errors_are_those_of_sqlalchemy(store):
    value = {"owner": "a", "part": "payload", "data": None, "file": None}
    put = Statement(lambda _: insert(blobs))
    store.write_now(put.run, value)
    with pytest.raises(IntegrityError) as caught:
        store.write_now(put.run, value)
    assert isinstance(caught.value, DBAPIError)
    assert caught.value.orig is not None
