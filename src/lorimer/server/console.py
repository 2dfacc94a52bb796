"""The console's files: one page for ``/`` and every path below ``/console``, and the scripts and styles it loads.

They are public, for they say nothing about this server; what they show they ask the API for, with the caller's key. A
path is looked up among the names found at start, so that no request becomes a path of the file system.
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
    # Kept by the browser but asked about each time: a new release must not be half an old one.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class File:
    content: bytes
    content_type: str
    etag: str


@cache
def files() -> dict[str, File]:
    """Everything in the console's folder, by its path there."""
    folder = Path(lorimer.console.__file__).parent / "static"
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix in CONTENT_TYPES]
    return {path.relative_to(folder).as_posix(): read(path) for path in paths}


def read(path: Path) -> File:
    content = path.read_bytes()
    # Weak, for what the compression layer sends is the same file in other bytes.
    return File(content, CONTENT_TYPES[path.suffix], f'W/"{hashlib.sha256(content).hexdigest()[:32]}"')


def is_console(path: str) -> bool:
    """Whether a path belongs to the console, and so is answered to everybody."""
    return path in ("/", "/console") or path.startswith("/console/")


async def page(request: Request) -> Response:
    """The one page; its script reads from the address what to show."""
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
