"""The commands of a data directory, on keys and on where its server is: through the server, or without one.

Two processes must not write one SQLite file, so a running server listens on the socket ``control`` in its data
directory; whoever may open that directory owns the server. One JSON line each way.
"""

import asyncio
import contextlib
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
from lorimer.store.users import ApiKey

if TYPE_CHECKING:
    from lorimer.server.context import Context

SOCKET = "control"
LONGEST_PATH = 100
"""Of a socket's address, which the system limits to about 104 bytes."""
ANSWER_SECONDS = 30.0


class CreateKey(msgspec.Struct, frozen=True, tag="create"):
    user: str
    name: str
    note: str = ""


class ListKeys(msgspec.Struct, frozen=True, tag="list"):
    pass


class RevokeKey(msgspec.Struct, frozen=True, tag="revoke"):
    key_id: int


class DescribeServer(msgspec.Struct, frozen=True, tag="describe"):
    """Where does the server listen?"""


class Key(msgspec.Struct, frozen=True):
    """What is shown of a key; ``secret`` only when it has just been made."""

    key_id: int
    user_id: str
    name: str
    note: str
    prefix: str
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None
    secret: str | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    keys: list[Key] = []
    revoked: bool = False
    url: str = ""
    """Where the server listens; empty if it is embedded in a program."""
    error: str = ""


KeyCommand = CreateKey | ListKeys | RevokeKey
Command = KeyCommand | DescribeServer
_commands = msgspec.json.Decoder(Command)
_replies = msgspec.json.Decoder(Reply)


async def run_command(credentials: Credentials, command: KeyCommand) -> Reply:
    match command:
        case CreateKey():
            key, secret = await credentials.create(command.user, command.name, command.note)
            return Reply(keys=[shown(key, secret)])
        case ListKeys():
            return Reply(keys=[shown(key) for key in await credentials.list()])
        case RevokeKey():
            return Reply(revoked=await credentials.revoke(command.key_id))


def shown(key: ApiKey, secret: str | None = None) -> Key:
    return Key(**vars(key), secret=secret)


class Control:
    """The server's end of the socket."""

    def __init__(self, context: "Context") -> None:
        self._context = context
        self._path = context.directory.path / SOCKET
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; a socket that a killed server left is replaced, as the directory is locked."""
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            try:
                reply = await self._answer(_commands.decode(await reader.readline()))
            except (LorimerError, msgspec.MsgspecError, ValueError) as error:
                reply = Reply(error=str(error))
            writer.write(msgspec.json.encode(reply) + b"\n")
            await writer.drain()

    async def _answer(self, command: Command) -> Reply:
        if isinstance(command, DescribeServer):
            return Reply(url=self._context.url)
        return await run_command(self._context.credentials, command)


def ask_server(directory: Path, command: Command) -> Reply | None:
    """The answer of the server that runs on ``directory``; none if none does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        try:
            with short_path(directory / SOCKET) as address:
                connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            return None
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
    """An address for ``path``, which may be longer than addresses of sockets may be."""
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
