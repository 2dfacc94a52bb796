"""Serves the console's files: one page for ``/`` and every path below ``/console``, and its scripts and styles.

The files are public, because they hold no data of this server; the page fetches data from the API with the caller's
key. Paths are looked up among the file names found at startup, so a request never becomes a file system path.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import lorimer.console

STATIC = "/console/static/"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # Cached by the browser but revalidated each time, so that a page never mixes files of two releases.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class File:
    content: bytes
    content_type: str
    etag: str


@cache
def files() -> dict[str, File]:
    """Load every file in the console's folder, keyed by its relative path."""
    folder = Path(lorimer.console.__file__).parent / "static"
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix in CONTENT_TYPES]
    return {path.relative_to(folder).as_posix(): read(path) for path in paths}


def read(path: Path) -> File:
    content = path.read_bytes()
    # A weak ETag, because the compression middleware may send the same file as different bytes.
    return File(content, CONTENT_TYPES[path.suffix], f'W/"{hashlib.sha256(content).hexdigest()[:32]}"')


def is_console(path: str) -> bool:
    """Return whether a path belongs to the console, and is therefore public."""
    return path in ("/", "/console") or path.startswith("/console/")


async def page(request: Request) -> Response:
    """Serve the console page. Its script reads from the URL what to show."""
    return answer(request, files()["index.html"])


async def static(request: Request) -> Response:
    file = files().get(request.path_params["path"])
    if file is None:
        raise HTTPException(404)
    return answer(request, file)


def answer(request: Request, file: File) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    known = {tag.strip() for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(None, 304, headers)
    return Response(file.content, 200, headers, media_type=file.content_type)


ROUTES = [
    Route("/", page, methods=["GET"]),
    Route(STATIC + "{path:path}", static, methods=["GET"]),
    Route("/console", page, methods=["GET"]),
    Route("/console/{path:path}", page, methods=["GET"]),
]
