"""Objects in S3, or a store that speaks its protocol, through obstore.

The endpoint, the region and the credentials come from the usual variables (`AWS_ENDPOINT_URL`, `AWS_REGION`,
`AWS_ACCESS_KEY_ID`, ...). Requests that fail are retried here and not by obstore, because a create that is repeated
finds its own object. Large files are sent in parts and read in ranges, so that a cut connection repeats one part.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, S3Store

from lorimer.errors import CheckpointError, NameTaken, StorageError
from lorimer.store.directory import storage_error
from lorimer.store.manifests import MANIFEST, decode_files, read_files
from lorimer.store.objects import DIRECTORIES, refuse_unconditional
from lorimer.store.weights import WeightsFile

T = TypeVar("T")

PART_BYTES = 8 * 1024 * 1024
NUM_PARTS = 4
"""Parts of a file that are sent or read concurrently; also the number of files."""
NUM_ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.2
REQUEST_SECONDS = 60.0
"""The longest time of one request; a part takes less unless the store is slower than 150 KB/s."""
CONNECT_SECONDS = 5.0
NUM_CREATORS = 8
"""Concurrent creators of one name, of which a store must let exactly one succeed."""


async def open_stored_objects(
    url: str, *, request_seconds: float = REQUEST_SECONDS, pause_seconds: float = FIRST_PAUSE_SECONDS
) -> "StoredObjects":
    """Connect to the store at ``url`` and check that it can be written, read, listed, and created in exclusively."""
    try:
        store = _open(url, request_seconds)
    except (BaseError, ValueError, OSError) as error:
        raise StorageError(f"the object store {url!r} cannot be used: {reason_of(error)}") from error
    objects = StoredObjects(store, url, pause_seconds=pause_seconds)
    await objects.check()
    return objects


def _open(url: str, request_seconds: float) -> Any:
    if url.startswith("file://"):
        return LocalStore(url.removeprefix("file://"), mkdir=True)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    environment = os.environ.get
    endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL") or environment("AWS_ENDPOINT")
    options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if not (environment("AWS_REGION") or environment("AWS_DEFAULT_REGION")):
        options["region"] = "us-east-1"
    return S3Store(
        bucket,
        prefix=prefix.strip("/") or None,
        client_options={
            "timeout": timedelta(seconds=request_seconds),
            "connect_timeout": timedelta(seconds=min(CONNECT_SECONDS, request_seconds)),
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
        },
        retry_config={"max_retries": 0},
        **options,
    )


class StoredObjects:
    """The objects of one bucket below one prefix."""

    is_local = False

    def __init__(
        self, store: Any, url: str, *, num_attempts: int = NUM_ATTEMPTS, pause_seconds: float = FIRST_PAUSE_SECONDS
    ) -> None:
        self.url = url
        self._store = store
        self._num_attempts, self._pause_seconds = num_attempts, pause_seconds

    async def check(self) -> None:
        """Raise ``StorageError`` if a right is missing or creators of one name do not exclude each other."""
        names = [f"check/{secrets.token_hex(16)}" for _ in range(2)]
        await self.put(names[0], b"first")
        try:
            await self.put(names[0], b"second")
            raise refuse_unconditional(self.url, 2, 2)
        except NameTaken:
            pass
        creators = [self.put(names[1], f"{number}".encode()) for number in range(NUM_CREATORS)]
        outcomes = await asyncio.gather(*creators, return_exceptions=True)
        if (num_winners := outcomes.count(None)) != 1:
            others = [error for error in outcomes if error is not None and not isinstance(error, NameTaken)]
            raise others[0] if others else refuse_unconditional(self.url, num_winners, NUM_CREATORS)
        found = {name async for name in self.names("check/", timedelta(0))}
        if await self.get(names[0]) != b"first" or not found >= set(names):
            raise StorageError(f"the object store {self.url!r} does not return or list what was just written")
        await self.delete(names)

    async def put(self, name: str, data: bytes, *, replace: bool = False) -> None:
        async def attempt(is_repeated: bool) -> None:
            mode: Any = "overwrite" if replace else "create"
            try:
                await obstore.put_async(self._store, name, data, mode=mode, use_multipart=False)
            except AlreadyExistsError as error:
                try:
                    found = await self.get(name)
                except CheckpointError:  # a conflict with another creator, which has not succeeded either
                    raise ConnectionError(f"conflicting puts of {name!r}") from error
                # The answer to an earlier attempt may have been lost.
                if not is_repeated or found != data:
                    raise NameTaken(f"the object {name!r} exists already in {self.url!r}") from error

        await self._repeat(attempt, name, "be written")

    async def get(self, name: str) -> bytes:
        async def attempt(_: bool) -> bytes:
            return bytes(await (await obstore.get_async(self._store, name)).bytes_async())

        return await self._repeat(attempt, name, "be read")

    async def upload(self, name: str, directory: Path) -> dict[str, WeightsFile]:
        files = await asyncio.to_thread(read_files, directory)
        manifest = await asyncio.to_thread((directory / MANIFEST).read_bytes)
        if await self._is(f"{name}/{MANIFEST}", manifest):
            return files
        limit = asyncio.Semaphore(NUM_PARTS)

        async def send(file: str, recorded: WeightsFile) -> None:
            async with limit:
                await self._send(f"{name}/{file}", directory / file, recorded)

        await asyncio.gather(*(send(file, recorded) for file, recorded in files.items()))
        try:
            await self.put(f"{name}/{MANIFEST}", manifest)
        except NameTaken:
            if not await self._is(f"{name}/{MANIFEST}", manifest):
                raise
        return files

    async def _is(self, name: str, data: bytes) -> bool:
        """Return whether an object exists and has this content."""
        try:
            return await self.get(name) == data
        except CheckpointError:
            return False

    async def _send(self, name: str, path: Path, recorded: WeightsFile) -> None:
        if not path.exists() or path.stat().st_size != recorded["size"]:
            raise CheckpointError(f"{path.name!r} of what was saved is missing or torn in the data directory")

        await self.put_file(name, path)

    async def put_file(self, name: str, path: Path) -> None:
        async def attempt(_: bool) -> None:
            await obstore.put_async(self._store, name, path, chunk_size=PART_BYTES, max_concurrency=NUM_PARTS)

        await self._repeat(attempt, name, "be written")

    async def fetch(self, name: str, into: Path) -> None:
        manifest = await self.get(f"{name}/{MANIFEST}")
        files = decode_files(manifest)
        if files is None or any("/" in file or file.startswith(".") for file in files):
            raise CheckpointError(f"the object '{name}/{MANIFEST}' is damaged: its checksum does not match its content")
        temporary = into.with_name(f"{into.name}.tmp-{secrets.token_hex(4)}")
        try:
            temporary.mkdir(mode=0o700)
            for file, recorded in files.items():
                await self._receive(f"{name}/{file}", temporary / file, recorded)
            (temporary / MANIFEST).write_bytes(manifest)
            os.rename(temporary, into)
        except OSError as error:
            raise storage_error(error, into, "be written") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)

    async def _receive(self, name: str, path: Path, recorded: WeightsFile) -> None:
        for is_last in (False, True):  # bytes that were damaged on the way arrive intact the second time
            found = await self._copy_to(name, path, recorded["size"])
            if found == recorded:
                return
            if is_last:
                raise CheckpointError(
                    f"the object {name!r} is damaged: it has {found['size']} bytes with SHA-256 {found['sha256']},"
                    f" saved were {recorded['size']} with {recorded['sha256']}"
                )

    async def _copy_to(self, name: str, path: Path, expected_size: int) -> WeightsFile:
        size, digest = await self._size(name), hashlib.sha256()
        if size != expected_size:
            return {"size": size, "sha256": "not computed"}
        starts = range(0, size, PART_BYTES)
        with open(path, "wb", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
            for first in range(0, len(starts), NUM_PARTS):
                window = starts[first : first + NUM_PARTS]
                parts = [self._range(name, start, min(start + PART_BYTES, size)) for start in window]
                for part in await asyncio.gather(*parts):
                    await asyncio.to_thread(digest.update, part)
                    await asyncio.to_thread(file.write, part)
        return {"size": size, "sha256": digest.hexdigest()}

    async def _range(self, name: str, start: int, end: int) -> bytes:
        async def attempt(_: bool) -> bytes:
            return bytes(await obstore.get_range_async(self._store, name, start=start, end=end))

        return await self._repeat(attempt, name, "be read")

    async def _size(self, name: str) -> int:
        async def attempt(_: bool) -> int:
            return int((await obstore.head_async(self._store, name))["size"])

        return await self._repeat(attempt, name, "be read")

    async def has_all(self, name: str) -> bool:
        try:
            files = decode_files(await self.get(f"{name}/{MANIFEST}"))
            sizes = await asyncio.gather(*(self._size(f"{name}/{file}") for file in files or ()))
        except CheckpointError:
            return False
        return files is not None and sizes == [recorded["size"] for recorded in files.values()]

    async def delete(self, names: Iterable[str]) -> None:
        for name in list(names):
            if not name.startswith((*DIRECTORIES, "archives")):
                await self._delete(name)
                continue
            if name.startswith(DIRECTORIES):
                await self._delete(f"{name}/{MANIFEST}")  # first, so that what is left is incomplete
            async for file, _ in self._list(f"{name}/"):
                await self._delete(file)

    async def _delete(self, name: str) -> None:
        async def attempt(_: bool) -> None:
            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(self._store, name)

        await self._repeat(attempt, name, "be deleted")

    async def names(self, prefix: str, older_than: timedelta) -> AsyncIterator[str]:
        before = datetime.now(UTC) - older_than
        newest: dict[str, datetime] = {}
        async for file, changed in self._list(prefix):
            name = prefix + file.removeprefix(prefix).partition("/")[0]
            newest[name] = max(changed, newest.get(name, changed))
        for name, changed in newest.items():
            # Stores round to seconds, up or down.
            if changed <= before or older_than <= timedelta(0):
                yield name

    async def _list(self, prefix: str) -> AsyncIterator[tuple[str, datetime]]:
        async def attempt(_: bool) -> list[tuple[str, datetime]]:
            found = await obstore.list(self._store, prefix.rstrip("/")).collect_async()
            return [(item["path"], item["last_modified"]) for item in found]

        for file, changed in await self._repeat(attempt, prefix, "be listed"):
            yield file, changed

    async def sign(self, name: str, seconds: float) -> str | None:
        if not isinstance(self._store, S3Store):
            return None
        return str(await obstore.sign_async(self._store, "GET", name, timedelta(seconds=seconds)))

    async def _repeat(self, attempt: Callable[[bool], Awaitable[T]], name: str, action: str) -> T:
        """Run ``attempt(is_repeated)`` until it succeeds, a few times. Translate the errors of obstore."""
        for number in range(self._num_attempts):
            try:
                return await attempt(number > 0)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise self._failed(name, action, error) from error
                raise CheckpointError(f"the object {name!r} is missing in {self.url!r}") from error
            except (PermissionDeniedError, UnauthenticatedError) as error:
                raise self._failed(name, action, error) from error
            except (BaseError, OSError, TimeoutError) as error:
                if number == self._num_attempts - 1:
                    raise self._failed(name, action, error) from error
                await asyncio.sleep(self._pause_seconds * 2**number)
        raise AssertionError("unreachable")

    def _failed(self, name: str, action: str, error: Exception) -> StorageError:
        return StorageError(
            f"the object store {self.url!r} cannot be used: {name!r} cannot {action}: {reason_of(error)}"
        )


def reason_of(error: Exception) -> str:
    """Return what an error of obstore says, in one line: the store's own message, or why it was not reached."""
    text = str(error).partition("\n\nDebug source")[0].strip()
    code, message = (re.search(rf"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if code is not None:
        return f"{code[1]}: {message[1]}" if message is not None and message[1] else code[1]
    if (status := re.search(r"non-2xx status code: ([^:\n]*)", text)) is not None:
        return status[1].strip()
    source = re.search(r'message: "([^"]*)"', str(error))
    return " ".join((source[1] if source is not None else text.rpartition(" - ")[2] or text).split())[:300]
