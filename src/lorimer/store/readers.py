"""The threads that read, each with its own connection. A read after a lost connection is tried again."""

import threading
from pathlib import Path
from queue import SimpleQueue

from sqlalchemy import Connection, Engine

from lorimer.errors import StorageError
from lorimer.store.connections import disconnect, is_passing, translate
from lorimer.store.jobs import Job, Patience, deliver


class Readers:
    """``count`` reading threads over one queue. ``submit`` may be called from any thread."""

    def __init__(self, engine: Engine, directory: Path, retry_seconds: float, count: int = 2) -> None:
        self._engine = engine
        self._directory = directory
        self._retry_seconds = retry_seconds
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._closing = threading.Event()
        self._accepts = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"lorimer-store-reader-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        with self._accepts:
            if self._closing.is_set():
                raise StorageError("the store is closed")
            self._queue.put(job)

    def close(self) -> None:
        """Answer what was asked, then end the threads."""
        with self._accepts:
            if not self._closing.is_set():
                self._closing.set()
                for _ in self._threads:
                    self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        connection: Connection | None = None
        while (job := self._queue.get()) is not None:
            connection = self._run(job, connection)
            deliver([job])
        if connection is not None:
            disconnect(connection)

    def _run(self, job: Job, connection: Connection | None) -> Connection | None:
        """Run the job and return the connection for the next one, or None if it is lost."""
        patience = Patience(self._retry_seconds, self._closing, job.submitted_at)
        while True:
            try:
                connection = connection or self._engine.connect()
                job.run(connection)
                connection.rollback()
                return connection
            except BaseException as error:
                if connection is not None:
                    disconnect(connection)
                    connection = None
                if not is_passing(error) or not patience.wait():
                    job.error = translate(error, self._directory)
                    return connection
