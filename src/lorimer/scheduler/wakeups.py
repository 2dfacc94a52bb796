"""Wake-ups between processes, by PostgreSQL's NOTIFY: which requests have arrived for a replica, and which have ended.

They are hints. One may be lost, so whoever waits for one also looks by itself now and then. They are sent after the
commit, on a connection of their own: inside the writing transaction NOTIFY would serialise all commits that use it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

import psycopg
from sqlalchemy import URL

log = logging.getLogger("lorimer.scheduler")

CHANNEL = "lorimer"
COALESCE_SECONDS = 0.005
"""The least time between two messages; wake-ups meanwhile are sent together."""
MAX_IDS = 200
"""In one message, which may have 8,000 bytes."""
RECONNECT_SECONDS = 0.5

Kind = Literal["arrived", "settled", "replicas", "keys", "lost"]


@dataclass(frozen=True)
class Wakeup:
    kind: Kind
    """``lost``: some may have been missed, because the connection was lost."""
    place: str = ""
    request_ids: tuple[str, ...] = ()


class Wakeups:
    """Sends and receives; call ``on_wakeup`` receives on the event loop that made this."""

    def __init__(self, url: URL, on_wakeup: Callable[[Wakeup], None]) -> None:
        self._conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._on_wakeup = on_wakeup
        self._loop = asyncio.get_running_loop()
        self._outgoing: SimpleQueue[Wakeup | None] = SimpleQueue()
        self._is_closing = threading.Event()
        self.num_sent = 0
        """Messages sent, for statistics."""
        self._threads = [
            threading.Thread(target=target, name=f"lorimer-wakeups-{name}", daemon=True)
            for name, target in (("send", self._send), ("receive", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, kind: Kind, place: str = "", request_ids: Sequence[str] = ()) -> None:
        self._outgoing.put(Wakeup(kind, place, tuple(request_ids)))

    def close(self) -> None:
        self._is_closing.set()
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)

    # ── sending ───────────────────────────────────────────────────────────────────────────────────────

    def _send(self) -> None:
        connection: psycopg.Connection | None = None
        sent_at = 0.0
        while (first := self._outgoing.get()) is not None:
            self._is_closing.wait(max(0.0, sent_at + COALESCE_SECONDS - time.monotonic()))
            messages = _messages(self._collect(first))
            sent_at = time.monotonic()
            with suppress(psycopg.Error):
                if connection is not None and connection.closed:
                    connection = None
                connection = connection or self._connect()
                with connection.cursor() as cursor:
                    cursor.executemany("SELECT pg_notify(%s, %s)", [(CHANNEL, message) for message in messages])
                self.num_sent += len(messages)
        if connection is not None:
            connection.close()

    def _collect(self, first: Wakeup) -> list[Wakeup]:
        found = [first]
        with suppress(Empty):
            while (following := self._outgoing.get_nowait()) is not None:
                found.append(following)
            self._outgoing.put(None)
        return found

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(self._conninfo, autocommit=True, connect_timeout=5)

    # ── receiving ─────────────────────────────────────────────────────────────────────────────────────

    def _receive(self) -> None:
        is_first = True
        while not self._is_closing.is_set():
            try:
                with self._connect() as connection:
                    connection.execute(f"LISTEN {CHANNEL}")
                    if not is_first:
                        self._post(Wakeup("lost"))
                    is_first = False
                    while not self._is_closing.is_set():
                        for notification in connection.notifies(timeout=0.5):
                            if (wakeup := _parse(notification.payload)) is not None:
                                self._post(wakeup)
            except psycopg.Error as error:
                log.warning("wake-ups are not received, only looked for: %s", error)
                self._is_closing.wait(RECONNECT_SECONDS)

    def _post(self, wakeup: Wakeup) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_wakeup, wakeup)


def _messages(wakeups: Sequence[Wakeup]) -> list[str]:
    """Merge wake-ups of a kind and place, and encode them in messages that are short enough."""
    merged: dict[tuple[Kind, str], list[str]] = {}
    for wakeup in wakeups:
        merged.setdefault((wakeup.kind, wakeup.place), []).extend(wakeup.request_ids)
    found: list[str] = []
    for (kind, place), ids in merged.items():
        for start in range(0, max(1, len(ids)), MAX_IDS):
            found.append("\n".join([kind, place, *ids[start : start + MAX_IDS]]))
    return found


def _parse(message: str) -> Wakeup | None:
    kind, _, rest = message.partition("\n")
    place, *ids = rest.split("\n")
    match kind:
        case "arrived" | "settled" | "replicas" | "keys":
            return Wakeup(kind, place, tuple(ids))
    return None  # of another version
