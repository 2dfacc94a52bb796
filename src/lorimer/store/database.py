"""The store: opens and migrates the database, and runs functions on its writer and reader threads.

    row = await store.write(futures.accept, lane=..., ...)      # durable when it returns
    row = await store.read(futures.get, request_id)

Functions take the connection first. A lost connection retries them, so they must have no other side effects.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Connection

from lorimer.errors import StorageError
from lorimer.store.blob_objects import BlobObjects, Exchange, Needed
from lorimer.store.blobs import BlobFiles, LargeBlobs
from lorimer.store.connections import Durability, database_url, reader_engine, translate, writer_engine
from lorimer.store.directory import DataDirectory
from lorimer.store.jobs import Job, Patience
from lorimer.store.migrations import migrate
from lorimer.store.readers import Readers
from lorimer.store.scratch import Scratch
from lorimer.store.writer import Writer

P = ParamSpec("P")
T = TypeVar("T")

_LOCK_SECONDS = 2.0
_MAX_RUNS = 100
"""Runs of one job that needs large blobs; each run names all that it knows to need."""


class Store:
    """The open database. Create it with `Store.open`; use it from any thread or event loop until `close`."""

    def __init__(self, url: URL, writer: Writer, readers: Readers, blobs: BlobObjects | None = None) -> None:
        """``blobs``: the large blobs, if they are in an object store."""
        self.url = url
        self._writer = writer
        self._readers = readers
        self._blobs = blobs

    @classmethod
    def open(
        cls,
        url: str | None,
        directory: DataDirectory | Path | str,
        *,
        durability: Durability = "process",
        retry_seconds: float = 60.0,
        scratch: Scratch | None = None,
    ) -> "Store":
        """Open the database ``url``, or the file ``lorimer.db`` in ``directory``, and migrate it.

        ``durability`` says what a committed write survives: a crash of the process, or also a power failure. A lost
        PostgreSQL connection is retried for ``retry_seconds`` before callers see an error. Large blobs are files of
        the directory, or objects of ``scratch``.
        """
        root = directory if isinstance(directory, DataDirectory) else DataDirectory(directory)
        where = database_url(url, root.path)
        blobs = None if scratch is None or scratch.is_local else BlobObjects(scratch.objects, scratch.remover)
        files: LargeBlobs = blobs or BlobFiles(root, sync=durability == "power")
        options = {"blob_files": files}
        make_private_file(where)
        engine = writer_engine(where, durability, options)
        try:
            with engine.connect() as connection:
                migrate(connection)
        except Exception as error:
            raise translate(error, root.path) from error
        writer = Writer(engine, files, root.path, retry_seconds)
        return cls(where, writer, Readers(reader_engine(where, options), root.path, retry_seconds), blobs)

    async def write(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn(connection, ...)`` on the writer thread. Its changes are committed when this returns."""
        return await self.submit(_call(fn, args, kwargs))

    async def read(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the read-only ``fn(connection, ...)`` on a reader thread. Sees every write that has returned."""
        return await self.submit_read(_call(fn, args, kwargs))

    def submit(self, fn: Callable[[Connection], T], stores: bytes = b"") -> "asyncio.Future[T]":
        """Enqueue a `write` without waiting. The future resolves when the changes are committed.

        ``stores`` are bytes that ``fn`` is going to store, if they are known; see `blob_objects`.
        """
        if self._blobs is not None:
            return asyncio.ensure_future(self._exchange(self._blobs, self._writer, fn, stores))
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._writer.submit(Job(fn, waiter))
        return waiter

    def submit_read(self, fn: Callable[[Connection], T]) -> "asyncio.Future[T]":
        """Enqueue a `read` without waiting."""
        if self._blobs is not None:
            return asyncio.ensure_future(self._exchange(self._blobs, self._readers, fn))
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._readers.submit(Job(fn, waiter))
        return waiter

    async def _exchange(
        self, blobs: BlobObjects, threads: Writer | Readers, fn: Callable[[Connection], T], stores: bytes = b""
    ) -> T:
        """Run a job, and put or get the large blobs that it turns out to need before it runs again."""
        exchange = Exchange()
        await blobs.prepare(exchange, stores)
        for _ in range(_MAX_RUNS):
            waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            threads.submit(Job(partial(blobs.run, exchange, fn), waiter))
            try:
                result = await waiter
            except Needed as needed:
                await blobs.supply(exchange, needed)
            except StorageError:
                raise  # it may have been committed, so its objects are kept
            except Exception:
                blobs.delete(exchange.put.values())
                raise
            else:
                blobs.delete(set(exchange.put.values()) - exchange.used)
                return result
        raise StorageError("a transaction stores or reads other bytes each time it runs")

    def write_now(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a `write` from a thread without an event loop, and block until it is committed."""
        if self._blobs is not None:
            return asyncio.run(self.write(fn, *args, **kwargs))
        waiter: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._writer.submit(Job(_call(fn, args, kwargs), waiter))
        return waiter.result()

    def read_now(self, fn: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a `read` from a thread without an event loop, and block until it returns."""
        if self._blobs is not None:
            return asyncio.run(self.read(fn, *args, **kwargs))
        waiter: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._readers.submit(Job(_call(fn, args, kwargs), waiter))
        return waiter.result()

    def set_fence(self, fence: Callable[[Connection], None]) -> None:
        """Begin every following write with ``fence``, which raises `Fenced` if this process must not write."""
        self._writer.fence = fence

    def lock(self, *, is_shared: bool = False) -> None:
        """Lock a PostgreSQL database for this server, or for all processes of one installation.

        Raise `StorageError` that names the holder if another server has it.

        Retries for two seconds, in case the holder was just killed. `DataDirectory.lock` protects a SQLite file.
        """
        patience = Patience(_LOCK_SECONDS, threading.Event())
        while True:
            try:
                return self.write_now(self._writer.hold_server_lock, is_shared)
            except StorageError:
                if not patience.wait():
                    raise

    def close(self) -> None:
        """Finish all submitted work and stop the threads."""
        self._readers.close()
        self._writer.close()


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Connection], T]:
    return partial(_apply, fn, args, kwargs)


def _apply(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], connection: Connection) -> T:
    return fn(connection, *args, **kwargs)


def make_private_file(url: URL) -> None:
    """Create SQLite's file with mode 0600 before SQLite does; its WAL gets the same mode."""
    if url.drivername != "sqlite":
        return
    assert url.database is not None
    try:
        os.close(os.open(url.database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StorageError(f"the database {url.database!r} cannot be opened: {error.strerror}") from error
