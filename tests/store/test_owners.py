"""Leases and fences on a real PostgreSQL server: any interleaving of take-overs and writes of two owners."""

import random
import time
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError

from lorimer.errors import Fenced, InvalidInput
from lorimer.store import futures, owners, sessions, users
from lorimer.store.connections import database_url, is_passing
from lorimer.store.database import Store
from lorimer.store.values import utc_now

PLACE = "m#0"
LEASE = 3600.0


@pytest.fixture
def store(postgres_url, tmp_path):
    opened = Store.open(postgres_url, tmp_path / "data")
    yield opened
    opened.close()


@pytest.fixture
def connect(postgres_url, store, tmp_path):
    """Make connections that give up on a lock after a moment, as a test cannot wait for itself."""
    engine = create_engine(database_url(postgres_url, tmp_path))
    opened: list[Connection] = []

    def connection() -> Connection:
        opened.append(engine.connect())
        opened[-1].execute(text("SET lock_timeout = '30ms'"))
        opened[-1].commit()
        return opened[-1]

    yield connection
    for one in opened:
        one.close()
    engine.dispose()


class OwnerProcess:
    """An owner as its database sees it: at most one open transaction, which began with the fence."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number, self.connection = number, connection
        self.owner_id = ""
        self.written: list[str] = []
        """Ends in the open transaction."""

    def start(self) -> None:
        self.connection.rollback()
        self.written = []
        self.owner_id = random.randbytes(8).hex()
        owners.register(self.connection, self.owner_id, f"node-{self.number}", "", LEASE)
        self.connection.commit()


def expire_lease(connection: Connection, owner_id: str) -> None:
    connection.execute(text("UPDATE owners SET until = 'epoch' WHERE owner_id = :id"), {"id": owner_id})
    connection.commit()


class Interleaving:
    """Two owners of one replica, and what each of their steps must leave true."""

    def __init__(self, store: Store, connect: Callable[[], Connection], seed: int) -> None:
        self.chance = random.Random(seed)
        self.store, self.other = store, connect()
        self.user = store.write_now(users.ensure_user, "ada")
        self.session = store.write_now(sessions.create_session, user_id=self.user.user_id)
        store.write_now(owners.define, {PLACE: "m"})
        self.processes = [OwnerProcess(number, connect()) for number in range(2)]
        for process in self.processes:
            process.start()
        self.queued: list[str] = []
        self.holders: list[str] = []
        """Who held the replica, in order."""
        self.ends: dict[str, str] = {}
        """Who ended each request."""
        self.num_fenced = self.num_waits = 0

    def step(self) -> None:
        process = self.chance.choice(self.processes)
        name = self.chance.choice(["accept", "begin", "write", "commit", "commit", "expire", "claim", "restart"])
        getattr(self, name)(process)

    def holder(self) -> str | None:
        query = text("SELECT owner_id FROM replicas WHERE name = :name")
        found = self.other.execute(query, {"name": PLACE}).scalar_one()
        self.other.rollback()
        return found

    def live(self) -> set[str]:
        found = set(self.other.execute(text("SELECT owner_id FROM owners")).scalars())
        self.other.rollback()
        return found

    def accept(self, _: OwnerProcess) -> None:
        row, _ = futures.accept(
            self.other, user_id=self.user.user_id, session_id=self.session.session_id, kind="forward_backward",
            lane="run", seq_id=len(self.queued) + 1, payload=b"x", place=PLACE,
        )  # fmt: skip
        self.other.commit()
        self.queued.append(row.request_id)

    def begin(self, process: OwnerProcess) -> None:
        if not process.connection.in_transaction():
            try:
                owners.check(process.connection, process.owner_id)
            except Fenced:
                self.num_fenced += 1
                process.connection.rollback()

    def write(self, process: OwnerProcess) -> None:
        """End a request. An owner that held the replica when its transaction began still holds it."""
        open_ones = [one for one in self.queued if one not in self.ends and one not in process.written]
        if process.connection.in_transaction() and self.holder() == process.owner_id and open_ones:
            request_id = self.chance.choice(open_ones)
            assert futures.finish(process.connection, request_id, result=b"done", result_format="json")
            process.written.append(request_id)

    def commit(self, process: OwnerProcess) -> None:
        if process.connection.in_transaction():
            if process.written:
                assert self.holder() == process.owner_id, "the replica was taken over during a transaction"
            process.connection.commit()
            for request_id in process.written:
                assert request_id not in self.ends, "ended twice"
                self.ends[request_id] = process.owner_id
            process.written = []

    def expire(self, process: OwnerProcess) -> None:
        expire_lease(self.other, process.owner_id)
        is_there = process.owner_id in self.live()
        gone = owners.expire(self.other, 0.0)
        self.other.commit()
        if is_there and process.owner_id not in gone:
            self.num_waits += 1
            assert process.connection.in_transaction(), "only an open transaction keeps its row"

    def claim(self, process: OwnerProcess) -> None:
        if not process.connection.in_transaction():
            try:
                owners.check(process.connection, process.owner_id)
                if owners.claim(process.connection, process.owner_id, [PLACE]) is not None:
                    self.holders.append(process.owner_id)
                process.connection.commit()
            except Fenced:
                self.num_fenced += 1
                process.connection.rollback()

    def restart(self, process: OwnerProcess) -> None:
        is_gone = process.owner_id not in self.live()
        if is_gone or self.chance.random() < 0.1:
            process.start()


@pytest.mark.parametrize("seed", range(12))
def test_only_the_holder_of_the_replica_ends_requests(store, connect, seed):
    """A write of an owner that was replaced is never committed; each request ends once, by the owner of that moment."""
    world = Interleaving(store, connect, seed)
    for _ in range(250):
        world.step()
    for process in world.processes:
        process.connection.rollback()
    rows = {row.request_id: row for row in store.read_now(futures.journal, "run", 0)}
    assert {request_id for request_id, row in rows.items() if row.state == "done"} == set(world.ends)
    assert len(world.queued) == len(rows)
    assert set(world.ends.values()) <= set(world.holders)
    assert world.num_fenced and world.num_waits, "the steps did not meet"


def test_a_fenced_store_writes_nothing(store, postgres_url, tmp_path):
    zombie = Store.open(postgres_url, tmp_path / "other")
    try:
        zombie.write_now(owners.register, "me", "node", "", LEASE)
        zombie.set_fence(lambda connection: owners.check(connection, "me"))
        zombie.write_now(users.ensure_user, "before")
        store.write_now(owners.resign, "me")
        with pytest.raises(Fenced, match="lost its lease"):
            zombie.write_now(users.ensure_user, "after")
        assert {user.name for user in store.read_now(users.list_users).values()} == {"before"}
    finally:
        zombie.close()


def test_an_owner_that_is_stopped_in_a_transaction_is_replaced(store, connect):
    """Its transaction keeps its row, until the database ends the transaction because it stands still."""
    process, other = OwnerProcess(0, connect()), connect()
    process.start()
    owners.check(process.connection, process.owner_id, idle_seconds=0.3)
    expire_lease(other, process.owner_id)
    assert owners.expire(other, 0.0) == []
    other.commit()
    deadline = time.monotonic() + 30
    while not owners.expire(other, 0.0):
        other.commit()
        assert time.monotonic() < deadline, "it was not replaced"
        time.sleep(0.05)
    other.commit()
    with pytest.raises(DBAPIError) as caught:
        process.connection.execute(text("SELECT 1"))
    assert is_passing(caught.value), "what it wrote is rolled back, and tried again behind the fence"


def test_leases_hold_after_a_restart_of_the_database(store, connect):
    """As long as the database has not run for a lease, nobody is replaced."""
    connection = connect()
    owners.register(connection, "me", "node", "", -1.0)
    connection.commit()
    assert owners.expire(connection, 1e9) == []
    assert owners.expire(connection, 0.0) == ["me"]


def test_claims_are_shared_and_lost_replicas_say_so(store):
    store.write_now(owners.define, {f"m#{number}": "m" for number in range(3)})
    for owner_id in ("a", "b"):
        store.write_now(owners.register, owner_id, f"node-{owner_id}", "127.0.0.1:1", LEASE)
    names = ["m#0", "m#1", "m#2"]
    claimed = [store.write_now(owners.claim, owner_id, names) for owner_id in ("a", "b", "a", "b")]
    assert claimed == ["m#0", "m#1", "m#2", None]
    state = owners.ReplicaState("ready", {"vocab_size": 3}, {"num_runs": 2})
    store.write_now(owners.renew, "a", LEASE, {"m#0": state, "m#1": state})
    found = {row.name: row for row in store.read_now(owners.list_replicas)}
    assert (found["m#0"].info, found["m#0"].load, found["m#0"].node) == ({"vocab_size": 3}, {"num_runs": 2}, "node-a")
    assert found["m#1"].info is None, "an owner describes its own replicas only"
    store.write_now(owners.resign, "a")
    found = {row.name: row.state for row in store.read_now(owners.list_replicas)}
    assert found == {"m#0": "lost", "m#1": "idle", "m#2": "lost"}


def test_one_replica_is_wanted_and_given_back(store):
    store.write_now(owners.define, {"m#full-0": "m", "m#full-1": "m"})
    for owner_id in ("a", "b"):
        store.write_now(owners.register, owner_id, "node", "", LEASE)
    user = store.write_now(users.ensure_user, "ada")
    session = store.write_now(sessions.create_session, user_id=user.user_id)
    before = utc_now()
    for number, (lane, place) in enumerate([("run", "m#full-0"), (f"{session.session_id}:models", "m#full-1")]):
        store.write_now(
            futures.accept, user_id=user.user_id, session_id=session.session_id, kind="forward", lane=lane,
            seq_id=number, payload=b"x", place=place,
        )  # fmt: skip
    waiting = store.read_now(futures.waiting_at, ["m#full-0", "m#full-1", "m#full-2"])
    assert {place: creates for place, (_, creates) in waiting.items()} == {"m#full-0": False, "m#full-1": True}
    assert all(before <= since <= utc_now() for since, _ in waiting.values())

    def states():
        return {row.name: (row.owner_id, row.state) for row in store.read_now(owners.list_replicas)}

    store.write_now(owners.want, "m#full-0")
    assert states()["m#full-0"] == (None, "wanted")
    assert store.write_now(owners.claim, "a", ["m#full-0"]) == "m#full-0"
    store.write_now(owners.want, "m#full-0")
    store.write_now(owners.give_back, "b", "m#full-0")
    assert states()["m#full-0"] == ("a", "idle"), "only its owner gives it back, and an owned one is not wanted"
    store.write_now(owners.give_back, "a", "m#full-0")
    assert states() == {"m#full-0": (None, "lost"), "m#full-1": (None, "lost")}


def test_processes_agree_on_a_value(store):
    for _ in range(2):
        store.write_now(owners.agree, "secret", "one", "differs")
    with pytest.raises(InvalidInput, match="differs"):
        store.write_now(owners.agree, "secret", "two", "differs")


def accepted_samples(store: Store, count: int) -> list[str]:
    user = store.write_now(users.ensure_user, "ada")
    session = store.write_now(sessions.create_session, user_id=user.user_id)
    return [
        store.write_now(
            futures.accept, user_id=user.user_id, session_id=session.session_id, kind="sample", lane="s",
            seq_id=number, payload=b"", place=PLACE,
        )[0].request_id
        for number in range(count)
    ]  # fmt: skip


def test_no_end_is_left_out_between_two_pages(store):
    """One transaction ends several samples; a page that ends among them is followed by one that has the rest."""
    made = accepted_samples(store, 40)

    def finish(c, request_ids: list[str]) -> None:
        for request_id in request_ids:
            assert futures.finish(c, request_id, result=b"x", result_format="json")

    for first, last in ((0, 7), (7, 10), (10, 31), (31, 40)):
        store.write_now(finish, made[first:last])
    seen, cursor = [], 0
    for _ in range(40):
        rows, cursor = store.read_now(futures.finished_after, "s", range(1000), cursor, limit=8)
        seen += [row.request_id for row in rows]
        store.write_now(futures.mark_fetched, dict.fromkeys([row.request_id for row in rows], utc_now()))
    assert sorted(set(seen)) == sorted(made)


def test_no_end_is_left_out_between_two_cursors(store, connect):
    """The transaction that began first may commit last; whoever reads in between sees it by the next cursor."""
    made = accepted_samples(store, 60)
    chance = random.Random(1)
    connections = [connect() for _ in range(4)]
    pending = dict.fromkeys(range(4), "")
    todo, seen, cursor = list(made), [], 0
    while todo or any(pending.values()):
        number = chance.randrange(4)
        if pending[number]:
            connections[number].commit()
            pending[number] = ""
        elif todo:
            pending[number] = todo.pop()
            assert futures.finish(connections[number], pending[number], result=b"x", result_format="json")
        rows, cursor = store.read_now(futures.finished_after, "s", range(1000), cursor)
        seen += [row.request_id for row in rows]
    rows, _ = store.read_now(futures.finished_after, "s", range(1000), cursor)
    assert set(seen) | {row.request_id for row in rows} == set(made)
    assert len(seen) < 10 * len(made)
