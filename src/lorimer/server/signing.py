"""Signs tokens that stand for a key, and download URLs that need no key.

Both use the secret of the data directory, each with its own derived key, so they survive a restart and one cannot be
used as the other. A token names the key it was exchanged for: revoking the key ends the token, which
`server/credentials.py` checks. The route that serves a download checks what its path refers to.
"""

import hashlib
import hmac
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import quote, urlencode

import jwt

from lorimer.errors import Forbidden, Gone, Unauthorized
from lorimer.store.users import User

TOKEN_SECONDS = 24 * 3600
"""Lifetime of a token. The SDK renews it five minutes before expiry, and continuously if it lives for less."""

USER_URN = "tml:user:"
ISSUER = "passport-lorimer"
"""The SDK accepts tokens whose issuer starts with `passport-` as proof of identity."""
ORGANIZATION = "lorimer"

DOWNLOADS = "/api/v1/downloads/"
"""Every path below this prefix is public and signed."""


@dataclass(frozen=True)
class Claims:
    """The user and key that a token stands for."""

    user_id: str
    key_id: int | None
    """The key the token was exchanged for; `None` in open mode."""


def user_urn(user_id: str) -> str:
    return f"{USER_URN}{user_id}"


class Signer:
    """Creates and verifies signatures; `secret` is the secret of the data directory."""

    def __init__(self, secret: bytes) -> None:
        self._token_key = _derive(secret, b"tokens")
        self._download_key = _derive(secret, b"downloads")

    def issue_token(self, user: User, key_id: int | None, now: datetime) -> str:
        """Issue a JWT that the client sends instead of the key."""
        claims = {
            "iss": ISSUER,
            "sub": user_urn(user.user_id),
            "org_id": ORGANIZATION,
            "email": user.email,
            "key_id": key_id,
            "iat": int(now.timestamp()),
            "exp": int(now.timestamp()) + TOKEN_SECONDS,
        }
        return jwt.encode(claims, self._token_key, algorithm="HS256")

    def read_token(self, token: str, now: datetime) -> Claims:
        """Verify a token and return its claims. Raise `Unauthorized` if it was not issued here or has expired."""
        try:
            claims = jwt.decode(
                token,
                self._token_key,
                algorithms=["HS256"],
                issuer=ISSUER,
                # The expiry is checked below against `now`, which tests can set.
                options={"require": ["exp", "sub"], "verify_exp": False, "verify_iat": False},
            )
        except jwt.InvalidTokenError as error:
            raise Unauthorized(
                "the token was not issued by this server; exchange a key at /api/v1/auth/token"
            ) from error
        if claims["exp"] <= now.timestamp():
            raise Unauthorized("the token has expired; exchange a key at /api/v1/auth/token")
        return Claims(str(claims["sub"]).removeprefix(USER_URN), claims.get("key_id"))

    def sign_download(self, path: str, now: datetime, lifetime_seconds: float) -> tuple[str, datetime]:
        """Sign `path`, a path below `DOWNLOADS`. Return the URL and its expiry."""
        expires = int(now.timestamp() + lifetime_seconds)
        query = urlencode({"expires": expires, "signature": self._signature(path, str(expires))})
        ends_at = now + timedelta(seconds=expires - now.timestamp())
        return f"{quote(path, safe='/:')}?{query}", ends_at.replace(microsecond=0)

    def check_download(self, path: str, expires: str, signature: str, now: datetime) -> None:
        """Verify the signature of `path`. Raise `Forbidden` if it is wrong and `Gone` if it has expired."""
        if not hmac.compare_digest(self._signature(path, expires).encode(), signature.encode()):
            raise Forbidden("the address is not signed by this server; ask for a new one")
        if int(expires) <= now.timestamp():
            raise Gone("the address has expired; ask for a new one")

    def _signature(self, path: str, expires: str) -> str:
        return hmac.new(self._download_key, f"{path}\n{expires}".encode(), hashlib.sha256).hexdigest()


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hmac.new(secret, b"lorimer " + purpose, hashlib.sha256).digest()
