"""Which server a command talks to, and the clients it does that with.

In this order: ``--base-url``; ``--data``; ``LORIMER_BASE_URL`` or ``TINKER_BASE_URL``; the server that runs on the data
directory of the settings; the service in this process over that directory.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from lorimer.cli.failures import NoServer
from lorimer.cli.output import note
from lorimer.errors import InUse, InvalidInput, StorageError

if TYPE_CHECKING:
    from lorimer.client.connection import Connection
    from lorimer.client.rest import RestClient

T = TypeVar("T")

PANEL = "Server"
URL_VARIABLES = ("LORIMER_BASE_URL", "TINKER_BASE_URL")
PROBE_SECONDS = 10.0

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--base-url", "--url", metavar="URL", help="Address of the server (LORIMER_BASE_URL).", rich_help_panel=PANEL
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", help="Key to show the server (LORIMER_API_KEY).", rich_help_panel=PANEL),
]
DirectoryOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Data directory to use instead of an address (LORIMER_DATA).",
        rich_help_panel=PANEL,
    ),
]


def rest_client(base_url: str | None, api_key: str | None, data: Path | None) -> "RestClient":
    """A client of the server that the options and the environment mean, which answers."""
    from lorimer.client.rest import RestClient

    return RestClient(base_url=find_server(base_url, data), api_key=api_key)


def find_server(base_url: str | None, data: Path | None) -> str:
    """The address for clients: of a server that answers, or ``local`` with its settings in the environment."""
    address = named_server(base_url, data)
    if address is None or address == "local":
        return served_address(data)
    from lorimer.client.connection import Connection, resolve_base_url

    try:
        resolve_base_url(address)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
    connection = Connection(address)
    try:
        check_answers(connection)
    finally:
        connection.close()
    return connection.base_url


def named_server(base_url: str | None, data: Path | None) -> str | None:
    """The address that was given; none if a data directory is meant."""
    if base_url and data:
        raise InvalidInput(f"--base-url {base_url!r} and --data {str(data)!r} are both given; one of them is accepted")
    if data:
        return None
    return base_url or next((value for name in URL_VARIABLES if (value := os.environ.get(name))), None)


def check_answers(connection: "Connection") -> None:
    """The clients wait for seconds for a server that is away; somebody at a terminal does not."""
    from lorimer.client.errors import APIConnectionError, no_server

    url = connection.base_url
    try:
        answer = connection.run(connection.transport.send("GET", "/api/v1/healthz", timeout=PROBE_SECONDS)).result()
    except APIConnectionError as error:
        raise NoServer(no_server(url, error)) from error
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if answer.status_code >= 400 or kind != "application/json":
        found = f"answers {answer.status_code} with {kind or 'nothing'}"
        raise NoServer(f"{url} {found} where a server of this protocol says that it is well; give its address alone")


# ── a data directory ──────────────────────────────────────────────────────────────────────────────────


def served_address(data: Path | None) -> str:
    """The address of the server that has the data directory; ``local`` if none does."""
    try:
        from lorimer.cli.settings import effective_settings

        settings = effective_settings({"data": data}, None, None).settings
    except ImportError as error:
        raise NoServer(
            f"no server is named, and none can run here because a package is missing ({error});"
            " give --base-url or LORIMER_BASE_URL, or pip install 'lorimer[server]'"
        ) from error
    directory = settings.data.expanduser().absolute()
    if (directory / "lock").exists() and (url := running_address(directory)):
        note(f"lorimer: asking the server at {url}, which has {directory}")
        return url
    if not (settings.database or (directory / "lorimer.db").exists()):
        raise NoServer(
            f"no server is named, and {str(directory)!r} has no data yet; start one with `lorimer serve`,"
            " or give --base-url, LORIMER_BASE_URL or --data"
        )
    os.environ["LORIMER_DATA"] = str(directory)
    os.environ.setdefault("LORIMER_START_ENGINES", "lazy")
    return "local"


def running_address(directory: Path) -> str | None:
    """Where the server that runs on a data directory listens; none if none does."""
    from lorimer.server.control import DescribeServer, ask_server

    try:
        reply = ask_server(directory, DescribeServer())
    except (StorageError, OSError) as error:
        raise in_use(directory) from error
    if reply is None:
        return None
    if not reply.url:
        raise in_use(directory)
    return reply.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def in_use(directory: Path) -> StorageError:
    """Somebody has the directory and does not say where it can be asked: a program with the service in it."""
    try:
        owner = (directory / "lock").read_text("utf-8", "replace").strip()
    except OSError:
        owner = ""
    return InUse(
        f"the data directory {str(directory)!r} is in use by {owner or 'another process'}, which has no address:"
        " wait until it ends, or give --base-url or another --data"
    )


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────


def collect(fetch: Callable[[int, int], tuple[list[T], int]], limit: int, page: int) -> tuple[list[T], int]:
    """The first ``limit`` things, or all if it is 0, and how many there are.

    ``fetch`` gives those of one page, by limit and offset, and how many there are.
    """
    found: list[T] = []
    while True:
        wanted = min(page, limit - len(found)) if limit else page
        some, total = fetch(wanted, len(found))
        found += some
        if len(some) < wanted or len(found) == limit or len(found) >= total:
            return found, total
