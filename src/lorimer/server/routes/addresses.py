"""Builds signed URLs that a browser or `urllib` can fetch without a key, as seen by the caller."""

import re
from datetime import datetime

from starlette.requests import Request

from lorimer.server.context import context_of
from lorimer.server.signing import DOWNLOADS

PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def signed_address(request: Request, name: str) -> tuple[str, datetime]:
    """Return the full URL of a download, with the host and path prefix of the request, and its expiry."""
    context = context_of(request)
    path, expires = context.signer.sign_download(DOWNLOADS + name, context.now(), context.settings.download_seconds)
    return base_address(request) + path, expires


def base_address(request: Request) -> str:
    """Return the base URL under which the caller reaches this server.

    A proxy in front may add headers saying that it terminates TLS or strips a prefix. These headers are trusted from
    anybody, because the URL goes back only to the caller who sent them.
    """
    base = request.base_url
    scheme, prefix = request.headers.get("x-forwarded-proto"), request.headers.get("x-forwarded-prefix", "")
    if scheme in ("http", "https"):
        base = base.replace(scheme=scheme)
    prefix = prefix.rstrip("/")
    return str(base).rstrip("/") + (prefix if PREFIX.fullmatch(prefix) else "")
