"""Runs administrative commands on a data directory (keys, quotas, server address), through its server if one runs.

Two processes must not write one SQLite file, so a running server listens on the socket ``control`` in its data
directory; whoever may open that directory owns the server. A command and its reply are one JSON line each. After
`HoldFiles` the server deletes no file until the connection closes, even if the client crashes.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lorimer.errors import LorimerError, StorageError
from lorimer.server.credentials import Credentials
from lorimer.server.settings import Settings
from lorimer.store.users import ApiKey, User

if TYPE_CHECKING:
    from lorimer.server.context import Context

logger = logging.getLogger(__name__)

SOCKET = "control"
LONGEST_PATH = 100
"""The maximum length of a socket path; the operating system allows about 104 bytes."""
ANSWER_SECONDS = 30.0


class Quotas(msgspec.Struct, frozen=True, omit_defaults=True):
    """A user's quotas: unset keeps the current value, None uses the server's setting, 0 removes the limit."""

    max_stored_bytes: int | msgspec.UnsetType | None = msgspec.UNSET
    requests_per_second: float | msgspec.UnsetType | None = msgspec.UNSET

    def given(self) -> dict[str, float | None]:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value is not msgspec.UNSET}


class CreateKey(msgspec.Struct, frozen=True, tag="create"):
    user: str
    name: str
    note: str = ""
    quotas: Quotas = Quotas()


class SetQuotas(msgspec.Struct, frozen=True, tag="quotas"):
    user: str
    quotas: Quotas


class ListKeys(msgspec.Struct, frozen=True, tag="list"):
    pass


class RevokeKey(msgspec.Struct, frozen=True, tag="revoke"):
    key_id: int


class DescribeServer(msgspec.Struct, frozen=True, tag="describe"):
    """Ask for the URL that the server listens on."""


class HoldFiles(msgspec.Struct, frozen=True, tag="hold"):
    """Defer file deletion until this connection closes, and ask for the URLs of the database and the object store."""


class Key(msgspec.Struct, frozen=True):
    """The public fields of a key; ``secret`` only directly after its creation."""

    key_id: int
    user_id: str
    name: str
    note: str
    prefix: str
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None
    user: str
    stored_bytes: int
    """Bytes of the user's checkpoints and rollouts."""
    max_stored_bytes: int
    requests_per_second: float
    """The quotas in effect, the user's own or the server's; 0 means no limit."""
    secret: str | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    keys: list[Key] = []
    revoked: bool = False
    url: str = ""
    """The URL the server listens on; empty if the server is embedded in a program."""
    database: str = ""
    """The URL of the server's database, including its password; empty for the file in the data directory."""
    objects: str = ""
    """The URL of the server's object store; empty if objects are in the data directory."""
    error: str = ""


KeyCommand = CreateKey | ListKeys | RevokeKey | SetQuotas
Command = KeyCommand | DescribeServer | HoldFiles
_commands = msgspec.json.Decoder(Command)
_replies = msgspec.json.Decoder(Reply)


async def run_command(credentials: Credentials, settings: Settings, command: KeyCommand) -> Reply:
    secrets: dict[int, str] = {}
    match command:
        case RevokeKey():
            return Reply(revoked=await credentials.revoke(command.key_id))
        case CreateKey():
            key, secret = await credentials.create(command.user, command.name, command.note)
            await credentials.set_quotas(command.user, command.quotas.given())
            keys, secrets = [key], {key.key_id: secret}
        case SetQuotas():
            user = await credentials.set_quotas(command.user, command.quotas.given())
            keys = [key for key in await credentials.list() if key.user_id == user.user_id]
        case ListKeys():
            keys = await credentials.list()
    users, stored = await credentials.holders()
    return Reply(
        keys=[
            shown(key, users[key.user_id], stored.get(key.user_id, 0), settings, secrets.get(key.key_id))
            for key in keys
        ]
    )


def shown(key: ApiKey, user: User, stored_bytes: int, settings: Settings, secret: str | None) -> Key:
    own_bytes, own_rate = user.max_stored_bytes, user.requests_per_second
    return Key(
        **vars(key),
        user=user.name,
        stored_bytes=stored_bytes,
        max_stored_bytes=settings.max_stored_bytes if own_bytes is None else own_bytes,
        requests_per_second=settings.requests_per_second if own_rate is None else own_rate,
        secret=secret,
    )


class Control:
    """Serves the control socket of a running server."""

    def __init__(self, context: "Context") -> None:
        self._context = context
        self._path = context.directory.path / SOCKET
        self._server: asyncio.Server | None = None
        self._holding: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start listening. Replace a socket left by a killed server; the lock on the directory makes that safe."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            with short_path(self._path) as address:
                listener.bind(address)
            self._path.chmod(0o600)
        except OSError as error:
            listener.close()
            raise StorageError(f"{str(self._path)!r} cannot be made: {error.strerror or error}") from error
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        for task in self._holding:
            task.cancel()
        if self._holding:
            await asyncio.wait(self._holding)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            try:
                command = _commands.decode(await reader.readline())
                if isinstance(command, HoldFiles):
                    return await self._hold(reader, writer)
                reply = await self._answer(command)
            except (LorimerError, msgspec.MsgspecError, ValueError) as error:
                reply = Reply(error=str(error))
            writer.write(msgspec.json.encode(reply) + b"\n")
            await writer.drain()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._holding.add(task)
        directory = self._context.directory
        directory.hold_files()
        logger.info("a backup started: file deletion is deferred until it ends")
        try:
            settings = self._context.settings
            reply = Reply(database=settings.database, objects=settings.objects)
            writer.write(msgspec.json.encode(reply) + b"\n")
            await writer.drain()
            while await reader.read(1024):
                pass
        except asyncio.CancelledError:
            pass  # the server is shutting down
        finally:
            self._holding.discard(task)
            await asyncio.to_thread(directory.release_files)
            logger.info("a backup ended")

    async def _answer(self, command: KeyCommand | DescribeServer) -> Reply:
        if isinstance(command, DescribeServer):
            return Reply(url=self._context.url)
        return await run_command(self._context.credentials, self._context.settings, command)


class Held:
    """An open connection to the server, with its reply."""

    def __init__(self, connection: socket.socket, reply: Reply) -> None:
        self._connection, self.reply = connection, reply

    def is_connected(self) -> bool:
        """Return whether the server is still running."""
        self._connection.setblocking(False)
        try:
            return self._connection.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


@contextlib.contextmanager
def held_server(directory: Path, command: Command) -> Iterator[Held | None]:
    """Send ``command`` to the server on ``directory`` and stay connected inside the block.

    Yield none if no server runs.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            with short_path(directory / SOCKET) as address:
                connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            found = None
        else:
            found = Held(connection, _ask(connection, command))
        yield found


def ask_server(directory: Path, command: Command) -> Reply | None:
    """Return the reply of the server on ``directory``, or none if no server runs."""
    with held_server(directory, command) as held:
        return None if held is None else held.reply


def _ask(connection: socket.socket, command: Command) -> Reply:
    connection.sendall(msgspec.json.encode(command) + b"\n")
    answer = b""
    while not answer.endswith(b"\n") and (part := connection.recv(65536)):
        answer += part
    if not answer:
        raise StorageError("the running server ended before it answered; try again")
    reply = _replies.decode(answer)
    if reply.error:
        raise StorageError(reply.error)
    return reply


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a socket address for ``path``, which may exceed the length limit of socket paths."""
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    if sys.platform != "linux":
        raise OSError(f"the path has more than {LONGEST_PATH} bytes; choose a shorter --data")
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
