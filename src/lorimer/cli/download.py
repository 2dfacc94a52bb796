"""Fetches checkpoints as directories, whole or not at all.

Files arrive in a directory beside the target, ``<target>.partial``, which becomes the target once all of them have the
size that was announced and can be read. What is there of an interrupted download is completed where the server says
that its file is still the same. Keys are shown to the server only, never to the address of a file.
"""

import asyncio
import hashlib
import json
import os
import shutil
import tarfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from lorimer.errors import CheckpointError, InvalidInput, TornDownload

if TYPE_CHECKING:
    import httpx2

    from lorimer.client.connection import Connection
    from lorimer.client.rest import RestClient
    from lorimer.types import ParsedCheckpointTinkerPath

T = TypeVar("T")

ARCHIVE = "archive.tar"
MARKER = "checkpoint_complete"
"""An empty file in archives, which old releases of the official command look for."""
ATTEMPTS = 10
PART_BYTES = 1 << 20
TIMEOUT_SECONDS, CONNECT_SECONDS = 60.0, 5.0

Addresses = Callable[[], Coroutine[Any, Any, dict[str, str]]]
"""Gives the address of each file by its name; anew each time, as addresses end."""


@dataclass(frozen=True)
class FetchedFile:
    """A file of a checkpoint, as it lies on disk."""

    name: str
    size_bytes: int
    sha256: str


def directory_name(tinker_path: str) -> str:
    """What the directory of a checkpoint is called: its path with underscores, as ``tinker`` calls it."""
    return tinker_path.removeprefix("tinker://").replace("/", "_")


def download_checkpoint(client: "RestClient", tinker_path: str, target: Path, *, force: bool) -> list[FetchedFile]:
    """The files of a checkpoint in ``target``; one that is there is replaced with ``force`` and refused without."""
    from lorimer.types.paths import parse_path

    parsed = parse_path(tinker_path)
    if os.path.lexists(target) and not force:
        raise InvalidInput(f"{str(target)!r} is there already; --force replaces it")
    connection = client.holder
    if parsed.checkpoint_type == "external":

        async def addresses() -> dict[str, str]:
            return (await client.get_external_weights_urls_async(tinker_path)).urls
    else:

        async def addresses() -> dict[str, str]:
            return {ARCHIVE: await archive_address(connection, parsed)}

    with arrival(target) as arriving:
        names = fetch_all(connection, addresses, arriving)
        if names == [ARCHIVE]:
            names = unpack(arriving / ARCHIVE, arriving)
        for name in names:
            check_file(arriving / name)
        remove_others(arriving, set(names))
        replace(arriving, target)
    return [described(target, name) for name in names]


def download_file(connection: "Connection", url: str, target: Path) -> None:
    """One file that a server gave the address of."""

    async def addresses() -> dict[str, str]:
        return {"file": url}

    with arrival(target) as arriving:
        fetch_all(connection, addresses, arriving)
        os.replace(arriving / "file", target)
        shutil.rmtree(arriving)


@contextmanager
def arrival(target: Path) -> Iterator[Path]:
    """The directory in which files arrive; it stays for the next time if something has come and not all."""
    directory = target.with_name(f"{target.name}.partial")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield directory
    except BaseException:
        with suppress(OSError):
            directory.rmdir()
        raise


# ── fetching ──────────────────────────────────────────────────────────────────────────────────────────


def fetch_all(connection: "Connection", addresses: Addresses, directory: Path) -> list[str]:
    """Every file below ``directory``, with a bar on the terminal; their names."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, emoji=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    stop = threading.Event()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bars:

        async def fetch() -> list[str]:
            found = await addresses()
            if not found:
                raise CheckpointError("the server names no file of this checkpoint")
            async with http_client(connection) as http:
                for name, url in found.items():
                    show = partial(bars.update, bars.add_task(name, total=None))
                    await Fetch(http, addresses, name, url, inside(directory, name), stop, show).run()
            return list(found)

        try:
            return connection.run(fetch()).result()
        except BaseException:
            stop.set()  # Ctrl-C: the loop of the SDK goes on by itself
            raise


@asynccontextmanager
async def http_client(connection: "Connection") -> "AsyncIterator[httpx2.AsyncClient]":
    """Reaches what the connection reaches, without its key and without following redirects."""
    import httpx2

    from lorimer import __version__
    from lorimer.client import embedded

    transport = await embedded.open_transport(None) if connection.is_local else None
    headers = {"User-Agent": f"Lorimer/Python {__version__}", "Accept-Encoding": "identity"}
    timeout = httpx2.Timeout(TIMEOUT_SECONDS, connect=CONNECT_SECONDS)
    async with httpx2.AsyncClient(transport=transport, headers=headers, timeout=timeout) as http:
        yield http


async def archive_address(connection: "Connection", parsed: "ParsedCheckpointTinkerPath") -> str:
    """Where the archive of a checkpoint is: servers redirect to it, or say it, once it is made."""
    from lorimer.client.errors import APIResponseValidationError
    from lorimer.client.transport import decoded, succeeded

    base = connection.transport.base_url
    url = f"{base}/api/v1/training_runs/{parsed.training_run_id}/checkpoints/{parsed.checkpoint_id}/archive"

    async def ask(is_first: bool) -> str:
        answer = await http.get(url, headers=await connection.transport.credentials.header())
        if answer.is_redirect and "location" in answer.headers:
            return str(answer.url.join(answer.headers["location"]))
        body = decoded(succeeded(answer))
        if isinstance(body, dict) and isinstance(body.get("url"), str):
            return str(body["url"])
        raise APIResponseValidationError(answer, body, "the server does not say where the archive is")

    async with http_client(connection) as http:
        return await repeated(ask)


async def repeated(work: Callable[[bool], Coroutine[Any, Any, T]]) -> T:
    """The result of ``work``, which is told whether it is tried for the first time; what may pass is tried again."""
    import httpx2

    from lorimer.client.errors import APIConnectionError, APIStatusError
    from lorimer.client.retries import Backoff, is_transient, retry_after

    backoff = Backoff()
    for attempt in range(ATTEMPTS):
        trouble: Exception
        try:
            return await work(attempt == 0)
        except httpx2.HTTPError as error:
            request = httpx2.Request("GET", "http://unknown")
            trouble = APIConnectionError(request, f"the download was broken off: {error or type(error).__name__}")
        except (APIStatusError, TornDownload) as error:
            trouble = error
        if attempt == ATTEMPTS - 1 or not (is_transient(trouble) or isinstance(trouble, TornDownload)):
            raise trouble
        wait = retry_after(trouble.response.headers) if isinstance(trouble, APIStatusError) else None
        await asyncio.sleep(wait or backoff.next())
    raise AssertionError("the last attempt returns or raises")


@dataclass
class Fetch:
    """One file on its way; goes on where it was cut off."""

    http: "httpx2.AsyncClient"
    addresses: Addresses
    name: str
    url: str
    file: Path
    stop: threading.Event
    show: Callable[..., None]

    async def run(self) -> None:
        async def attempt(is_first: bool) -> None:
            # Addresses end; each is also logged as a download, so that a new one is asked for only if needed.
            await self._attempt(self.url if is_first else (await self.addresses())[self.name])

        await repeated(attempt)

    async def _attempt(self, url: str) -> None:
        from lorimer.client.transport import succeeded

        self.file.parent.mkdir(parents=True, exist_ok=True)
        headers, start = self._remaining()
        async with self.http.stream("GET", url, headers=headers, follow_redirects=True) as answer:
            if answer.status_code >= 400:
                await answer.aread()
                succeeded(answer)
            start = start if answer.status_code == 206 else 0
            length = answer.headers.get("content-length")
            total = start + int(length) if length else None
            self._tag_file.write_text(answer.headers.get("etag", ""), "utf-8")
            self.show(completed=start, total=total)
            await self._write(answer, start)
        size = self.file.stat().st_size
        if total is not None and size != total and not self.stop.is_set():
            raise TornDownload(f"{self.name} has {size} bytes of {total}; the connection ended early")

    def _remaining(self) -> tuple[dict[str, str], int]:
        """Ask for the rest if something is there of a file that can be told from another.

        The last byte is asked for again: of a complete file there would be nothing to ask for.
        """
        size = self.file.stat().st_size if self.file.exists() else 0
        tag = self._tag_file.read_text("utf-8") if self._tag_file.exists() else ""
        if size == 0 or not tag or tag.startswith("W/"):
            return {}, 0
        return {"Range": f"bytes={size - 1}-", "If-Range": tag}, size - 1

    async def _write(self, answer: "httpx2.Response", start: int) -> None:
        written = start
        with self.file.open("r+b" if start else "wb") as out:
            out.truncate(start)
            out.seek(start)
            async for part in answer.aiter_bytes():
                if self.stop.is_set():
                    return
                out.write(part)
                written += len(part)
                self.show(completed=written)

    @property
    def _tag_file(self) -> Path:
        return self.file.with_name(f"{self.file.name}.etag")


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────


def inside(directory: Path, name: str) -> Path:
    """The path of a file by a name that somebody else chose, which must stay inside ``directory``."""
    path = PurePosixPath(name)
    if not path.name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"the checkpoint has a file called {name!r}, which is no relative path; nothing is written"
        )
    return directory / path


def unpack(archive: Path, directory: Path) -> list[str]:
    """The files of a tar, which may hold files only; their names."""
    names = []
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isdir() or member.name == MARKER:
                    continue
                if not member.isreg():
                    raise CheckpointError(f"the archive has {member.name!r}, which is no file; only files are accepted")
                target = inside(directory, str(PurePosixPath(member.name)))
                if target == archive:
                    raise CheckpointError(f"the archive has a file called {member.name!r}, which would replace itself")
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None, "regular files have content"
                with source, target.open("wb") as out:
                    shutil.copyfileobj(source, out, PART_BYTES)
                names.append(str(target.relative_to(directory)))
    except (tarfile.TarError, EOFError) as error:
        archive.unlink(missing_ok=True)
        raise CheckpointError(f"the archive cannot be read ({error}); download it again") from error
    archive.unlink()
    return names


def check_file(file: Path) -> None:
    """A file that says how long it is must be so long; one of JSON must be JSON."""
    if file.suffix == ".safetensors":
        size = file.stat().st_size
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            header = content.read(length) if length < size else b""
        try:
            tensors = {name: one for name, one in json.loads(header).items() if name != "__metadata__"}
            expected = 8 + length + max((one["data_offsets"][1] for one in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file.name} is no safetensors file; download it again") from error
        if size != expected:
            raise CheckpointError(f"{file.name} has {size} bytes of {expected}; download it again")
    elif file.suffix == ".json":
        try:
            json.loads(file.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{file.name} is no JSON ({error}); download it again") from error


def remove_others(directory: Path, names: set[str]) -> None:
    """Drop what an earlier download of another checkpoint left."""
    for file in sorted(directory.rglob("*"), reverse=True):
        if file.is_dir():
            if not any(file.iterdir()):
                file.rmdir()
        elif str(file.relative_to(directory)) not in names:
            file.unlink()


def replace(arriving: Path, target: Path) -> None:
    """Give a complete directory its name; what had it is removed after that."""
    old = target.with_name(f"{target.name}.replaced")
    if os.path.lexists(target):
        remove(old)
        os.rename(target, old)
    os.rename(arriving, target)
    remove(old)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def described(directory: Path, name: str) -> FetchedFile:
    with (directory / name).open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return FetchedFile(name, (directory / name).stat().st_size, digest)
