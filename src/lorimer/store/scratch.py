"""Local copies of the directories of an object store: engines write and read directories, not objects.

With objects in the data directory there is nothing to copy. Otherwise `publish` uploads what an engine wrote before a
row names it, `bring` fetches what an engine is about to read, and the directories used least recently are evicted when
they exceed a limit. What is not uploaded yet is never evicted, because it is not an entry here.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from lorimer.errors import CheckpointError, StorageError
from lorimer.store.directory import DataDirectory
from lorimer.store.manifests import is_whole, read_files
from lorimer.store.objects import DIRECTORIES, Objects
from lorimer.store.remover import Remover

log = logging.getLogger("lorimer.store")

T = TypeVar("T")
Kind = Literal["weights", "snapshots"]
MAX_BYTES = 64 * 1024**3
MIN_IDLE_SECONDS = 60.0
"""A directory used more recently than this is not evicted: an engine or a download may be reading it."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0


@dataclass
class _Entry:
    size_bytes: int
    used_at: float
    is_verified: bool
    """Uploaded or fetched by this process; others are verified when they are first used."""


class Scratch:
    """The directories below ``weights/`` and ``snapshots/`` that are objects too. Use it on one event loop."""

    def __init__(
        self,
        objects: Objects,
        directory: DataDirectory,
        *,
        max_bytes: int = MAX_BYTES,
        min_idle_seconds: float = MIN_IDLE_SECONDS,
    ) -> None:
        self.objects, self.directory = objects, directory
        self.is_local = objects.is_local
        self.remover = Remover(objects, directory)
        self.reads: Callable[[], Collection[str]] = tuple
        """Returns the weights that accepted operations will read; they are not evicted."""
        self._max_bytes, self._min_idle_seconds = max_bytes, min_idle_seconds
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._pins: Counter[str] = Counter()
        self._coming: dict[str, asyncio.Task[None]] = {}

    def path(self, kind: Kind, name: str) -> Path:
        return (self.directory.weights if kind == "weights" else self.directory.snapshots) / name

    def adopt(self) -> None:
        """Make entries of the directories that an earlier server left; call after orphans were swept."""
        if self.is_local:
            return
        found = [path for kind in DIRECTORIES for path in (self.directory.path / kind).iterdir()]
        for path in sorted(found, key=lambda path: path.stat().st_mtime):
            with suppress(CheckpointError):
                self._entries[f"{path.parent.name}/{path.name}"] = _Entry(_size(path), 0.0, False)

    async def publish(self, kind: Kind, name: str) -> None:
        """Upload a directory that an engine wrote, unless it is stored already."""
        if self.is_local:
            return
        await self.objects.upload(f"{kind}/{name}", self.path(kind, name))
        self._keep(f"{kind}/{name}")
        await self._evict()

    async def bring(self, kind: Kind, name: str) -> None:
        """Make sure that a directory is here and intact. Concurrent calls fetch it once."""
        key = f"{kind}/{name}"
        if self.is_local:
            return
        if (entry := self._entries.get(key)) is not None and entry.is_verified:
            self._keep(key)
            return
        if (task := self._coming.get(key)) is None:
            task = self._coming[key] = asyncio.create_task(self._bring(key))
            task.add_done_callback(lambda _: self._coming.pop(key, None))
        await asyncio.shield(task)

    async def bring_patiently(self, kind: Kind, name: str, is_given_up: Callable[[], bool] = lambda: False) -> None:
        """Like `bring`, and wait while the store cannot be used, until ``is_given_up``."""
        await _patiently(lambda: self.bring(kind, name), is_given_up)

    async def _bring(self, key: str) -> None:
        path = self.directory.path / key
        if path.exists():
            if await asyncio.to_thread(is_whole, path):
                self._keep(key)
                return
            log.warning("the local copy of %s is damaged and is fetched again", key)
            self._entries.pop(key, None)
            await asyncio.to_thread(self.directory.remove, path)
        await self.objects.fetch(key, path)
        self._keep(key)
        await self._evict()

    @contextmanager
    def pinned(self, kind: Kind, name: str) -> Iterator[None]:
        """Do not evict a directory inside the block."""
        self.pin(kind, name)
        try:
            yield
        finally:
            self._pins[f"{kind}/{name}"] -= 1

    def pin(self, kind: Kind, name: str) -> None:
        """Do not evict a directory while this process runs."""
        self._pins[f"{kind}/{name}"] += 1

    async def is_whole(self, kind: Kind, name: str, is_given_up: Callable[[], bool] = lambda: False) -> bool:
        """Return whether a directory is stored intact, by `Objects.has_all`; wait like `bring_patiently`."""
        return await _patiently(lambda: self.objects.has_all(f"{kind}/{name}"), is_given_up)

    async def remove(self, kind: Kind, names: Iterable[str]) -> None:
        """Delete directories that no row names, complete or not: the local ones now, objects in the background."""
        chosen = list(names)
        for name in chosen:
            self._entries.pop(f"{kind}/{name}", None)
        await asyncio.to_thread(self._remove_local, kind, chosen)
        if not self.is_local:
            kinds = (kind, "archives") if kind == "weights" else (kind,)
            self.remover.remove(f"{each}/{name}" for name in chosen for each in kinds)

    def _remove_local(self, kind: Kind, names: list[str]) -> None:
        for name in names:
            path = self.path(kind, name)
            for found in [path, *path.parent.glob(f"{path.name}.tmp-*")]:
                self.directory.remove(found)

    def _keep(self, key: str) -> None:
        """Record that a directory is here, verified and in use."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(_size(self.directory.path / key), 0.0, True)
        entry.used_at, entry.is_verified = time.monotonic(), True
        self._entries.move_to_end(key)

    async def _evict(self) -> None:
        excess = sum(entry.size_bytes for entry in self._entries.values()) - self._max_bytes
        if excess <= 0:
            return
        idle_since = time.monotonic() - self._min_idle_seconds
        read = {f"weights/{name}" for name in self.reads()}
        for key, entry in list(self._entries.items()):
            is_free = not self._pins[key] and key not in read and key not in self._coming
            if excess > 0 and is_free and entry.used_at <= idle_since:
                del self._entries[key]
                excess -= entry.size_bytes
                await asyncio.to_thread(self.directory.remove, self.directory.path / key)


async def _patiently(work: Callable[[], Awaitable[T]], is_given_up: Callable[[], bool]) -> T:
    """Repeat ``work`` while the store cannot be used. Raise ``StorageError`` once that ``is_given_up``."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await work()
        except StorageError as error:
            if is_given_up():
                raise
            log.error("the object store failed, retrying in %.1f s: %s", pause, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _size(path: Path) -> int:
    return sum(file["size"] for file in read_files(path).values())
