"""Looks up whom a credential belongs to: API keys and the tokens exchanged for them, cached for a short time.

A key is identified by the SHA-256 of its secret; secrets are neither stored nor logged. A revoked key stops working
immediately in this process, and within ``REMEMBER_SECONDS`` in any other process on the same database.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sqlalchemy import Connection

from lorimer.errors import StorageError, Unauthorized
from lorimer.server.signing import Signer
from lorimer.store import checkpoints, rollouts, users
from lorimer.store.database import Store
from lorimer.store.users import ApiKey, User

REMEMBER_SECONDS = 10.0
MAX_REMEMBERED = 10_000
LOCAL_USER = "local"
TOKEN_PREFIX = "eyJ"


@dataclass(frozen=True)
class Identity:
    """The authenticated user and their key. Open mode has no key."""

    user: User
    key: ApiKey | None


class Credentials:
    """Authenticates credentials. ``allow_open``: while the database has no key, everybody is the local user."""

    def __init__(self, store: Store, signer: Signer, *, allow_open: bool) -> None:
        self._store = store
        self._signer = signer
        self._allow_open = allow_open
        self._found: dict[bytes, tuple[float, Identity]] = {}
        self._used: dict[int, datetime] = {}
        self._local: User | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when this process has changed keys or quotas."""
        self._looking: asyncio.Task[None] | None = None
        self.is_open = False

    async def start(self) -> None:
        """Determine whether the server is in open mode, and create the local user if it is."""
        if self._allow_open and not await self._store.read(any_key):
            self._local = await self._store.write(users.ensure_user, LOCAL_USER)
            self.is_open = True

    def forget(self) -> None:
        """Forget what is cached, because another process has changed keys or quotas."""
        self._found.clear()
        self.look_for_keys()

    def look_for_keys(self) -> None:
        """End open mode soon if another process has created a key."""
        if self.is_open and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look_for_keys())

    async def _look_for_keys(self) -> None:
        with suppress(StorageError):
            self.is_open = not await self._store.read(any_key)

    async def identify(self, credential: str) -> Identity:
        """Authenticate a credential. Raise ``Unauthorized`` if it is missing, unknown, expired or revoked."""
        if self.is_open:
            assert self._local is not None
            return Identity(self._local, None)
        if not credential:
            raise Unauthorized("no key was sent; X-API-Key with a key of `lorimer key create` is accepted")
        digest = hashlib.sha256(credential.encode("utf-8", "surrogatepass")).digest()
        remembered = self._found.get(digest)
        if remembered and remembered[0] > time.monotonic():
            self._note_use(remembered[1])
            return remembered[1]
        identity = await self._look_up(credential)
        self._note_use(identity)
        if len(self._found) >= MAX_REMEMBERED:
            self._found.clear()
        self._found[digest] = (time.monotonic() + REMEMBER_SECONDS, identity)
        return identity

    def _note_use(self, identity: Identity) -> None:
        if identity.key is not None:
            self._used[identity.key.key_id] = datetime.now(UTC)

    async def _look_up(self, credential: str) -> Identity:
        if credential.startswith(TOKEN_PREFIX):
            return await self._look_up_token(credential)
        found = await self._store.read(users.find_key, credential)
        if found is None:
            raise Unauthorized("the key is not known, or was revoked")
        return Identity(found[1], found[0])

    async def _look_up_token(self, token: str) -> Identity:
        claims = self._signer.read_token(token, datetime.now(UTC))
        identity = await self._store.read(holder, claims.user_id, claims.key_id)
        if identity is None:
            raise Unauthorized("the key of this token was revoked")
        return identity

    async def create(self, user_name: str, name: str, note: str = "") -> tuple[ApiKey, str]:
        """Create a key and return it with its secret, which is not stored. Ends open mode."""
        created: tuple[ApiKey, str] = await self._store.write(users.create_key, user_name, name, note)
        self.is_open = False
        self.on_change()
        return created

    async def set_quotas(self, user_name: str, values: Mapping[str, float | None]) -> User:
        """Set a user's own quotas, which apply to all of their keys. Quotas not named stay unchanged."""
        user: User = await self._store.write(users.set_quotas, user_name, values)
        self._found.clear()
        self.on_change()
        return user

    async def revoke(self, key_id: int) -> bool:
        """Revoke a key immediately. Return false if it does not exist or was already revoked."""
        revoked: bool = await self._store.write(users.revoke_key, key_id)
        self._found.clear()
        self.on_change()
        return revoked

    async def flush(self) -> None:
        """Persist when keys were last used."""
        used, self._used = self._used, {}
        try:
            if used:
                await self._store.write(users.touch_keys, used)
        except BaseException:
            self._used = used | self._used
            raise

    async def holders(self) -> tuple[dict[str, User], dict[str, int]]:
        """Return all users, and the bytes of checkpoints and rollouts of each, by user id."""
        found: tuple[dict[str, User], dict[str, int]] = await self._store.read(users_and_storage)
        return found

    async def list(self) -> list[ApiKey]:
        keys: list[ApiKey] = await self._store.read(users.list_keys)
        return [self.with_last_use(key) for key in keys]

    def with_last_use(self, key: ApiKey) -> ApiKey:
        """Return a stored key with its last use, if that was by this process and is not persisted yet."""
        used = [at for at in (key.last_used_at, self._used.get(key.key_id)) if at is not None]
        return replace(key, last_used_at=max(used, default=None))


def users_and_storage(connection: Connection) -> tuple[dict[str, User], dict[str, int]]:
    stored: Counter[str] = Counter()
    for item in checkpoints.storage_usage(connection):
        stored[item.user_id] += item.size_bytes
    stored.update(rollouts.bytes_by_user(connection))
    return users.list_users(connection), dict(stored)


def any_key(connection: Connection) -> bool:
    """Return whether any key was ever created: revoking the last key must not reopen the server."""
    return bool(users.list_keys(connection))


def holder(connection: Connection, user_id: str, key_id: int | None) -> Identity | None:
    """Return the identity of a token whose key is not revoked, else none.

    A token issued in open mode is void once keys exist.
    """
    user = users.get_user(connection, user_id)
    if user is None or key_id is None:
        return None
    keys = [key for key in users.list_keys(connection, user_id) if key.key_id == key_id and key.revoked_at is None]
    return Identity(user, keys[0]) if keys else None
