"""Addresses that a browser or `urllib` can fetch without a key, as seen by whoever asked for them."""

import re
from datetime import datetime

from starlette.requests import Request

from lorimer.server.context import context_of
from lorimer.server.signing import DOWNLOADS

PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def signed_address(request: Request, name: str) -> tuple[str, datetime]:
    """The full address of a download, below the host and path prefix of the request itself, and its end."""
    context = context_of(request)
    path, expires = context.signer.sign_download(DOWNLOADS + name, context.now(), context.settings.download_seconds)
    return base_address(request) + path, expires


def base_address(request: Request) -> str:
    """Where the caller reaches this server.

    A proxy in front may say that it speaks TLS or takes a prefix off. Anybody is believed who says so: the address
    goes back to them and to nobody else.
    """
    base = request.base_url
    scheme, prefix = request.headers.get("x-forwarded-proto"), request.headers.get("x-forwarded-prefix", "")
    if scheme in ("http", "https"):
        base = base.replace(scheme=scheme)
    prefix = prefix.rstrip("/")
    return str(base).rstrip("/") + (prefix if PREFIX.fullmatch(prefix) else "")
