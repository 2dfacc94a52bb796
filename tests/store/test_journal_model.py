"""The journal against a plain model, through random accepts, ends, fetches, snapshots, releases and expiries."""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import delete

from lorimer.store import blobs, futures, tables
from lorimer.store.runs import confirm_snapshot, create_run, drop_newest, set_snapshot
from lorimer.store.sessions import create_session
from lorimer.store.users import ensure_user

START = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = ["forward_backward", "optim_step", "forward", "load_weights", "save_weights"]


@dataclass
class Entry:
    """What the model knows of one row."""

    request_id: str
    kind: str
    lane: str
    seq_id: int
    sha256: str
    state: str = "queued"
    finished: datetime | None = None
    fetched: datetime | None = None
    payload: bytes | None = None
    result: bytes | None = None


class Journal(RuleBasedStateMachine):
    store: Any
    clock: Any

    def __init__(self):
        super().__init__()
        self.entries: dict[str, Entry] = {}
        self.snapshot = -1
        self.newest: int | None = None
        write = self.store.write_now
        user = write(ensure_user, "ada")
        self.session = write(create_session, user_id=user.user_id)
        trained = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), True)
        run = write(
            create_run,
            session_id=self.session.session_id,
            user_id=user.user_id,
            project_id=None,
            model_seq_id=0,
            base_model="tiny",
            rank=4,
            seed=0,
            optimizer_type="adamw",
            user_metadata={},
            **trained,
        )
        self.run, self.samples = run.model_id, f"{self.session.session_id}:sample:0"

    # ── the model ──

    def above(self, entry):
        return entry.lane == self.run and entry.seq_id > self.snapshot

    def needed(self, entry):
        if entry.state == "queued":
            return True
        return entry.state == "done" and entry.kind != "forward" and self.above(entry)

    def chosen(self, data):
        entries = sorted(self.entries.values(), key=lambda entry: (entry.lane == self.run, entry.seq_id))
        return data.draw(st.sampled_from([entry.request_id for entry in entries]))

    def tick(self):
        self.clock.now += timedelta(seconds=1)
        return self.clock.now

    # ── what can happen ──

    @rule(
        is_training=st.booleans(),
        seq_id=st.integers(0, 12),
        kind=st.sampled_from(KINDS),
        size=st.sampled_from([1, 40]),
        state=st.sampled_from(["queued", "queued", "queued", "rejected"]),
    )
    def accept(self, is_training, seq_id, kind, size, state):
        self.tick()
        lane, kind = (self.run, kind) if is_training else (self.samples, "sample")
        payload = bytes([seq_id]) * size
        row, is_new = self.store.write_now(
            futures.accept,
            user_id=self.session.user_id,
            session_id=self.session.session_id,
            kind=kind,
            lane=lane,
            seq_id=seq_id,
            payload=payload,
            tokens=1,
            state=state,
        )
        known = [entry for entry in self.entries.values() if (entry.lane, entry.seq_id) == (lane, seq_id)]
        assert is_new == (not known)
        if known:
            assert row.request_id == known[0].request_id
            return
        sha256 = hashlib.sha256(payload).hexdigest()
        entry = Entry(row.request_id, kind, lane, seq_id, sha256, state, payload=payload)
        entry.finished = None if state == "queued" else self.clock.now
        self.entries[row.request_id] = entry

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), size=st.sampled_from([0, 3, 40]))
    def finish(self, data, size):
        entry = self.entries[self.chosen(data)]
        now, result = self.tick(), b"r" * size
        is_first = self.store.write_now(futures.finish, entry.request_id, result=result, result_format="json")
        assert is_first == (entry.state == "queued")
        if is_first:
            entry.state, entry.finished, entry.result = "done", now, result

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), state=st.sampled_from(["failed", "abandoned", "cancelled"]))
    def fail(self, data, state):
        entry = self.entries[self.chosen(data)]
        now = self.tick()
        is_first = self.store.write_now(futures.fail, entry.request_id, error="no", category="user", state=state)
        assert is_first == (entry.state == "queued")
        if is_first:
            entry.state, entry.finished = state, now

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def fetch(self, data):
        entry = self.entries[self.chosen(data)]
        if entry.state != "queued":
            entry.fetched = self.tick()
            self.store.write_now(futures.mark_fetched, {entry.request_id: entry.fetched})

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def release(self, data):
        entry = self.entries[self.chosen(data)]
        self.store.write_now(futures.release, [entry.request_id])
        if entry.state != "queued":
            entry.result = None
            entry.payload = entry.payload if self.needed(entry) else None

    @rule(seq=st.integers(0, 12))
    def snapshot_at(self, seq):
        unneeded = self.store.write_now(set_snapshot, self.run, seq, f"snapshot-{seq}")
        if seq < max(self.snapshot, self.newest or 0):
            assert unneeded == f"snapshot-{seq}"
        else:
            self.newest = seq

    @precondition(lambda self: self.newest is not None)
    @rule(is_whole=st.booleans())
    def verify(self, is_whole):
        if is_whole:
            self.store.write_now(confirm_snapshot, self.run, f"snapshot-{self.newest}")
            self.snapshot = self.newest
        else:
            self.store.write_now(drop_newest, self.run, f"snapshot-{self.newest}")
        self.newest = None

    @rule(up_to=st.integers(0, 12))
    def drop_payloads(self, up_to):
        self.store.write_now(futures.drop_payloads, self.run, up_to)
        for entry in self.entries.values():
            if entry.lane == self.run and entry.seq_id <= up_to and not self.needed(entry):
                entry.payload = None

    @rule(ages=st.tuples(*[st.integers(0, 12)] * 3))
    def expire(self, ages):
        now = self.tick()
        fetched, finished, rows = (now - timedelta(seconds=age) for age in ages)
        self.store.write_now(
            futures.expire, now=now, fetched_before=fetched, finished_before=finished, rows_before=rows
        )
        for entry in list(self.entries.values()):
            if entry.state == "queued":
                continue
            if (entry.fetched and entry.fetched < fetched) or entry.finished < finished:
                entry.result = None
                entry.payload = entry.payload if self.needed(entry) else None
            if entry.finished < rows and not self.above(entry):
                del self.entries[entry.request_id]

    # ── what must hold ──

    @invariant()
    def agrees(self):
        read = self.store.read_now
        for lane in (self.run, self.samples):
            rows = read(futures.journal, lane, -1)
            model = sorted((e for e in self.entries.values() if e.lane == lane), key=lambda e: e.seq_id)
            assert [(r.request_id, r.state, r.payload_sha256) for r in rows] == [
                (e.request_id, e.state, e.sha256) for e in model
            ]
            assert [r.fetched_at for r in rows] == [e.fetched for e in model]
        for entry in self.entries.values():
            assert read(futures.payload, entry.request_id) == entry.payload
            assert read(futures.result, entry.request_id) == entry.result
            assert entry.payload is not None or not self.needed(entry)
        queued = {row.request_id for row in read(futures.unfinished) if row.session_id == self.session.session_id}
        assert queued == {e.request_id for e in self.entries.values() if e.state == "queued"}

    @invariant()
    def files_are_those_of_the_model(self):
        large = [data for e in self.entries.values() for data in (e.payload, e.result) if data and len(data) > 32]
        assert len(list(self.clock.blobs.iterdir())) == len(large)

    def teardown(self):
        """The next example shares the database."""
        self.store.write_now(lambda c: (blobs.drop(c, self.entries), c.execute(delete(tables.futures))))


class Clock:
    """The time the journal is told, so that ages in the model are exact."""

    def __init__(self, blobs):
        self.now, self.blobs = START, blobs

    def __call__(self):
        return self.now


@pytest.mark.timeout(240)
def test_the_journal_agrees_with_the_model(store, tmp_path, monkeypatch):
    clock = Clock(tmp_path / "data" / "blobs")
    monkeypatch.setattr(futures, "utc_now", clock)
    monkeypatch.setattr(blobs, "INLINE_BYTES", 32)
    machine = type("Machine", (Journal,), {"store": store, "clock": clock})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
