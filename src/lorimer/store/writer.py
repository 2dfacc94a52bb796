"""The writer thread: runs all queued jobs in one transaction, commits, then notifies their callers (group commit).

A failing job rolls back only its own changes. If the disk is too full for a group, its jobs are retried one by one, so
that one large job does not fail the others. After a lost connection the group is retried, unless the database reports
that it was committed.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from lorimer.errors import StorageError
from lorimer.store.blobs import LargeBlobs
from lorimer.store.connections import (
    disconnect,
    is_failing_database,
    is_passing,
    may_succeed_alone,
    release_server_lock,
    take_server_lock,
    translate,
)
from lorimer.store.jobs import Job, Patience, deliver

_MAX_JOBS = 256


class CommitUnknown(Exception):
    """The connection was lost while transaction ``xid`` was being committed."""

    def __init__(self, xid: str) -> None:
        super().__init__(xid)
        self.xid = xid


class Writer:
    """The writer thread and its connection. ``submit`` is thread-safe."""

    def __init__(self, engine: Engine, files: LargeBlobs, directory: Path, retry_seconds: float) -> None:
        self._engine = engine
        self._files = files
        self._directory = directory
        self._retry_seconds = retry_seconds
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._closing = threading.Event()
        self._accepts = threading.Lock()
        self._connection: Connection | None = None
        self._holds_server_lock = self._shares_server_lock = False
        self.fence: Callable[[Connection], None] | None = None
        """Begins every transaction; raises `Fenced` if this process must not write any more."""
        self._thread = threading.Thread(target=self._work, name="lorimer-store-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._accepts:
            if self._closing.is_set():
                raise StorageError("the store is closed")
            self._queue.put(job)

    def close(self) -> None:
        """Run all submitted jobs, then stop the thread."""
        with self._accepts:
            if not self._closing.is_set():
                self._closing.set()
                self._queue.put(None)
        self._thread.join()

    def hold_server_lock(self, connection: Connection, is_shared: bool = False) -> None:
        """Take the server lock of a PostgreSQL database, as a job. Every reconnection takes it again."""
        if connection.dialect.name == "postgresql":
            take_server_lock(connection, is_shared=is_shared)
            self._holds_server_lock, self._shares_server_lock = True, is_shared

    def _work(self) -> None:
        is_open = True
        while is_open:
            group, is_open = self._next_group()
            if group:
                self._run_to_end(group)
                deliver(group)
        if self._holds_server_lock and self._connection is not None:
            with suppress(DBAPIError):
                release_server_lock(self._connection, is_shared=self._shares_server_lock)
        self._disconnect()

    def _next_group(self) -> tuple[list[Job], bool]:
        """Wait for a job and return it with all others queued behind it. The flag is False after the last group."""
        group: list[Job] = []
        job = self._queue.get()
        while job is not None:
            group.append(job)
            if len(group) == _MAX_JOBS:
                return group, True
            try:
                job = self._queue.get_nowait()
            except Empty:
                return group, True
        return group, False

    def _run_to_end(self, group: list[Job]) -> None:
        """Run the group until it is committed or every job has its error."""
        try:
            self._run_with_retries(group)
        except BaseException as error:
            if len(group) > 1 and may_succeed_alone(error):
                for job in group:
                    self._run_to_end([job])
                return
            for job in group:
                job.error = translate(error, self._directory)

    def _run_with_retries(self, group: list[Job]) -> None:
        patience = Patience(self._retry_seconds, self._closing, group[0].submitted_at)
        open_xid: str | None = None
        while True:
            try:
                if open_xid is not None:
                    if self._was_committed(open_xid):
                        return self._files.committed()
                    self._files.roll_back()
                return self._transact(group)
            except CommitUnknown as unknown:
                open_xid = unknown.xid
                if not patience.wait():
                    # The files may belong to committed rows. If not, the sweep at the next start deletes them.
                    self._files.forget()
                    raise StorageError("the database was lost during a commit; it may have been made or not") from None
            except (DBAPIError, StorageError) as error:
                if not (is_passing(error) or isinstance(error, StorageError)) or not patience.wait():
                    raise

    def _transact(self, group: list[Job]) -> None:
        connection = self._connect()
        try:
            if not self._run_jobs(connection, group, with_savepoints=False):
                if len(group) == 1:
                    return
                # Failures are rare, so savepoints are used only on the retry after one.
                self._run_jobs(connection, group, with_savepoints=True)
            self._commit(connection)
        except CommitUnknown:
            self._disconnect()
            raise
        except BaseException:
            self._disconnect()
            self._files.roll_back()
            raise

    def _run_jobs(self, connection: Connection, group: list[Job], *, with_savepoints: bool) -> bool:
        """Run the group in a transaction.

        Return whether to commit; without savepoints the first failure rolls back all jobs.
        """
        transaction = connection.begin()
        if self.fence is not None:
            self.fence(connection)
        for job in group:
            self._run_job(connection, job, with_savepoint=with_savepoints)
            if job.error is not None and not with_savepoints:
                transaction.rollback()
                self._files.roll_back()
                return False
        return True

    def _commit(self, connection: Connection) -> None:
        xid = _open_xid(connection)
        try:
            connection.commit()
        except DBAPIError as error:
            if xid is not None and is_passing(error):
                raise CommitUnknown(xid) from error
            raise
        self._files.committed()

    def _run_job(self, connection: Connection, job: Job, *, with_savepoint: bool) -> None:
        """Run one job of the group. With a savepoint, its failure does not affect the other jobs' changes."""
        mark = self._files.mark()
        savepoint = connection.begin_nested() if with_savepoint else None
        try:
            job.run(connection)
            if savepoint is not None:
                savepoint.commit()
        except BaseException as error:
            if is_failing_database(error):
                raise
            job.error = translate(error, self._directory)
            if savepoint is not None:
                savepoint.rollback()
                self._files.roll_back(mark)

    def _was_committed(self, xid: str) -> bool:
        connection = self._connect()
        try:
            status = connection.scalar(text("SELECT pg_xact_status(CAST(:xid AS xid8))"), {"xid": xid})
            connection.rollback()
        except DBAPIError as error:
            self._disconnect()
            raise CommitUnknown(xid) from error
        if status == "in progress":
            raise CommitUnknown(xid)
        return bool(status == "committed")

    def _connect(self) -> Connection:
        if self._connection is None:
            connection = self._engine.connect()
            try:
                if self._holds_server_lock:
                    take_server_lock(connection, is_shared=self._shares_server_lock)
                    connection.commit()
            except BaseException:
                disconnect(connection)
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            disconnect(self._connection)
            self._connection = None


def _open_xid(connection: Connection) -> str | None:
    """Return the transaction id with which to query a commit whose reply was lost; None if nothing was written."""
    if connection.dialect.name != "postgresql":
        return None
    xid: str | None = connection.scalar(text("SELECT CAST(pg_current_xact_id_if_assigned() AS text)"))
    return xid
