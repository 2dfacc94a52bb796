"""Routes for the caller's own keys: list, create and revoke. Other users' keys are invisible.

The operator of a server in open mode creates the first key with ``lorimer key create``, because that ends open mode.
"""

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from lorimer.errors import InvalidInput, NotFound, TooLarge
from lorimer.server.bodies import decode
from lorimer.server.context import context_of, key_of, user_of, user_quotas
from lorimer.server.errors import Refusal
from lorimer.server.openapi import Endpoint
from lorimer.server.routes.ownership import is_id, quote_id
from lorimer.server.routes.replies import done, reply
from lorimer.store import audit, rollouts, users
from lorimer.store.quotas import stored_bytes
from lorimer.store.users import ApiKey
from lorimer.types.overview import CreateKeyRequest, CreateKeyResponse, KeyEntry, KeysResponse

MAX_NAME_CHARS = 200
MAX_KEYS = 100
"""The maximum number of unrevoked keys per user."""


async def list_keys(request: Request) -> Response:
    """List the caller's keys without their secrets."""
    context = context_of(request)
    keys, *used = await context.store.read(keys_and_storage, user_of(request).user_id)
    entries = [KeyEntry.model_validate(shown(request, context.credentials.with_last_use(key))) for key in keys]
    return reply(KeysResponse(keys=entries, quotas=user_quotas(request, *used)))


def keys_and_storage(c: Connection, user_id: str) -> tuple[list[ApiKey], int, int]:
    return users.list_keys(c, user_id), stored_bytes(c, user_id), rollouts.bytes_of_user(c, user_id)


def shown(request: Request, key: ApiKey) -> dict[str, object]:
    current = key_of(request)
    facts = {name: value for name, value in vars(key).items() if name != "user_id"}
    return facts | {"is_current": current is not None and current.key_id == key.key_id}


async def create_key(request: Request) -> Response:
    """Create a key for the caller. Its secret appears only in this response."""
    context, user = context_of(request), user_of(request)
    body = await decode(request, CreateKeyRequest)
    if context.credentials.is_open:
        detail = "this server runs without keys; its operator makes the first one with `lorimer key create NAME`"
        raise Refusal(409, "open_server", detail)
    if not 1 <= len(body.name) <= MAX_NAME_CHARS or not is_id(body.name):
        raise InvalidInput(f"name is {quote_id(body.name)}; 1 to {MAX_NAME_CHARS} characters are accepted")
    held = await context.store.read(users.list_keys, user.user_id)
    usable = sum(key.revoked_at is None for key in held)
    if usable >= MAX_KEYS:
        raise TooLarge(f"you have {usable} keys; at most {MAX_KEYS} is accepted: revoke one")
    key, secret = await context.credentials.create(user.name, body.name)
    await context.store.write(record_key_event, "key_created", key)
    return reply(CreateKeyResponse.model_validate(shown(request, key) | {"secret": secret}))


async def revoke_own_key(request: Request) -> Response:
    """Revoke one of the caller's keys, but never the key of this request."""
    context, text = context_of(request), request.path_params["key_id"]
    held = await context.store.read(users.list_keys, user_of(request).user_id)
    key = next((key for key in held if str(key.key_id) == text), None)
    if key is None:
        raise NotFound(f"there is no key {quote_id(text)}")
    current = key_of(request)
    if current is not None and current.key_id == key.key_id:
        raise Refusal(409, "key_in_use", f"key {key.key_id} is the one you ask with; use another to revoke it")
    if await context.credentials.revoke(key.key_id):
        await context.store.write(record_key_event, "key_revoked", key)
    return done()


def record_key_event(c: Connection, event: str, key: ApiKey) -> None:
    audit.record(c, user_id=key.user_id, event=event, details={"key_id": key.key_id, "prefix": key.prefix})


ROUTES = [
    Endpoint("GET", "/api/v1/keys", list_keys, answer=KeysResponse),
    Endpoint("POST", "/api/v1/keys", create_key, body=CreateKeyRequest, answer=CreateKeyResponse),
    Endpoint("DELETE", "/api/v1/keys/{key_id}", revoke_own_key, status=204),
]
