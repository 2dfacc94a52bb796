"""Large blobs as objects. The threads of the database never wait for the object store.

A job that stores or reads a large blob which is not at hand raises `Needed`; its changes are rolled back. `Store` then
puts or gets the objects on the caller's side and runs the job again. Bytes that are known before, such as the payload
of a submit, are put first, so that the job runs once. Objects of a job that failed are deleted; those of a crashed
server are orphans, which the sweep of `retention.py` deletes.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import Connection

from lorimer.errors import CheckpointError
from lorimer.store.blobs import INLINE_BYTES, blob_name, check_blob
from lorimer.store.objects import Objects
from lorimer.store.remover import Remover

T = TypeVar("T")

_NUM_REQUESTS = 16
"""Objects that one job has put or got concurrently."""


class Needed(Exception):
    """A job needs these bytes stored, or these blobs fetched, before it can run."""

    def __init__(self, *, puts: Iterable[bytes] = (), gets: Iterable[str] = ()) -> None:
        super().__init__("blobs are not at hand")
        self.puts, self.gets = list(puts), list(gets)


@dataclass
class Exchange:
    """What was put and got for one job."""

    put: dict[str, str] = field(default_factory=dict)
    """Names of blobs by the SHA-256 of their bytes."""
    used: set[str] = field(default_factory=set)
    got: dict[str, bytes | None] = field(default_factory=dict)
    """Bytes by the name of their blob; None if there is no such object."""


class BlobObjects:
    """The large blobs of a store; `LargeBlobs` for the threads of the database, the rest for callers."""

    def __init__(self, objects: Objects, remover: Remover) -> None:
        self._objects, self._remover = objects, remover
        self._thread = threading.local()
        self._dropped: list[str] = []

    # ── on the threads of the database ────────────────────────────────────────────────────────────────

    def run(self, exchange: Exchange, fn: Callable[[Connection], T], connection: Connection) -> T:
        """Run a job with the blobs of its exchange at hand."""
        self._thread.exchange = exchange
        exchange.used.clear()
        return fn(connection)

    def write(self, data: bytes) -> str:
        exchange: Exchange = self._thread.exchange
        name = exchange.put.get(hashlib.sha256(data).hexdigest())
        if name is None:
            raise Needed(puts=[data])
        exchange.used.add(name)
        return name

    def read(self, name: str, owner: str) -> bytes:
        self.expect([name])
        data = self._thread.exchange.got[name]
        if data is None:
            raise FileNotFoundError(name)
        check_blob(name, data, owner)
        return bytes(data)

    def expect(self, names: list[str]) -> None:
        if missing := [name for name in names if name not in self._thread.exchange.got]:
            raise Needed(gets=missing)

    def drop(self, name: str) -> None:
        self._dropped.append(name)

    def mark(self) -> tuple[int, int]:
        return 0, len(self._dropped)

    def roll_back(self, mark: tuple[int, int] = (0, 0)) -> None:
        del self._dropped[mark[1] :]

    def committed(self) -> None:
        self.delete(self._dropped)
        self.forget()

    def forget(self) -> None:
        self._dropped.clear()

    # ── on the caller's side ──────────────────────────────────────────────────────────────────────────

    async def prepare(self, exchange: Exchange, data: bytes) -> None:
        """Put bytes that a job is going to store, if they are too many for a row."""
        if len(data) > INLINE_BYTES:
            await self._put(exchange, data)

    async def supply(self, exchange: Exchange, needed: Needed) -> None:
        limit = asyncio.Semaphore(_NUM_REQUESTS)

        async def get(name: str) -> None:
            async with limit:
                await self._get(exchange, name)

        await asyncio.gather(*(self._put(exchange, data) for data in needed.puts), *map(get, needed.gets))

    async def _put(self, exchange: Exchange, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()
        name = blob_name(data, digest)
        await self._objects.put(f"blobs/{name}", data)
        exchange.put[digest] = name

    async def _get(self, exchange: Exchange, name: str) -> None:
        try:
            exchange.got[name] = await self._objects.get(f"blobs/{name}")
        except CheckpointError:  # it is missing; if its row is gone too, that is in order
            exchange.got[name] = None

    def delete(self, names: Iterable[str]) -> None:
        self._remover.remove([f"blobs/{name}" for name in names])
