"""``lorimer doctor``: looks at the machine, the settings and the server, and says what to do about what is wrong."""

import os
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from lorimer.cli.commands import DataOptions, cli_command
from lorimer.cli.connection import KeyOption, UrlOption, named_server
from lorimer.cli.failures import FAILED, sentence
from lorimer.cli.findings import Check, Finding, Status, failed, ok, run_checks, warning
from lorimer.cli.machine_checks import PROBE_SECONDS, check_device, check_packages, check_python, check_torch
from lorimer.cli.output import examples, print_json, stdout_console
from lorimer.cli.progress import progress_bar
from lorimer.cli.service_checks import (
    check_clock,
    check_data_directory,
    check_database,
    check_hub,
    check_lock,
    check_objects,
    check_port,
    check_sqlite,
)
from lorimer.errors import LorimerError

if TYPE_CHECKING:
    from lorimer.server.settings import Settings

EPILOG = examples(
    "lorimer doctor", "lorimer doctor --data /srv/lorimer -f json", "lorimer doctor --gpu --model Qwen/Qwen3-0.6B"
)

TINY = "lorimer/tiny"
DEVICE_SECONDS = 1800.0
SERVER_SECONDS = OBJECTS_SECONDS = 20.0
COLOURS = {Status.ok: "green", Status.warning: "yellow", Status.failed: "red"}
VARIABLES = ("BASE_URL", "API_KEY", "CREDENTIAL_CMD", "PROJECT_ID")
PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


@cli_command
def doctor(
    *,
    options: DataOptions,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Instead, compare the device of the engine with the CPU, and measure its speed."),
    ] = False,
    model: Annotated[str, typer.Option("--model", "-m", help="Base model of --gpu, as for `lorimer serve`.")] = TINY,
    base_url: UrlOption = None,
    api_key: KeyOption = None,
) -> None:
    """Check this machine, the settings and the server, and say what to do; exit code 1 if something is wrong."""
    chosen = device_checks(model) if gpu else checks(options, base_url, api_key)
    with progress_bar() as report:
        findings = run_checks(chosen, report)
    if options.is_json:
        print_json([asdict(finding) for finding in findings])
    else:
        show(findings)
    if any(finding.status is Status.failed for finding in findings):
        raise typer.Exit(FAILED)


def device_checks(model: str) -> list[Check]:
    """The report of a machine with a GPU, to be sent to us: nobody has run Lorimer on one yet."""
    return [
        Check("python", check_python),
        Check("torch", check_torch, PROBE_SECONDS + 5),
        Check("device", partial(check_device, model), DEVICE_SECONDS),
    ]


def checks(options: DataOptions, base_url: str | None, api_key: str | None) -> list[Check]:
    """Those of a server to come need settings that can be read, and the packages of the server."""
    found = [
        Check("python", check_python),
        Check("packages", check_packages),
        Check("torch", check_torch, PROBE_SECONDS + 5),
        Check("sqlite", check_sqlite),
        Check("client", check_client),
    ]
    try:
        settings: Settings | None = options.settings()
    except ImportError:
        settings = None  # check_packages says so
    except LorimerError as error:
        settings = None
        wrong = failed("settings", str(error), "correct the flag, the variable or the file; `lorimer config` shows all")
        found.append(Check("settings", lambda: [wrong]))
    if settings is not None:
        found += [
            Check("data directory", partial(check_data_directory, settings)),
            Check("lock", partial(check_lock, settings)),
            Check("database", partial(check_database, settings), 15),
            Check("port", partial(check_port, settings)),
            Check("hub", check_hub, 15),
        ]
        if settings.database.startswith("postgres"):
            found.append(Check("clock", partial(check_clock, settings), 15))
        if settings.objects:
            found.append(Check("object store", partial(check_objects, settings), OBJECTS_SECONDS))
    return [*found, Check("server", partial(check_server, base_url, api_key, settings), SERVER_SECONDS)]


def check_client() -> list[Finding]:
    """Variables that steer the SDK; secrets are not shown."""
    found = []
    for prefix in ("LORIMER", "TINKER"):
        for name in VARIABLES:
            if value := os.environ.get(f"{prefix}_{name}"):
                found.append(f"{prefix}_{name}" + (f"={value}" if name in ("BASE_URL", "PROJECT_ID") else " (hidden)"))
    exempt = os.environ.get("NO_PROXY", os.environ.get("no_proxy", ""))
    proxy = next((name for name in PROXIES if os.environ.get(name)), None)
    if proxy and exempt != "*" and "127.0.0.1" not in exempt and "localhost" not in exempt:
        text = f"{proxy} is set, and NO_PROXY does not name this machine"
        return [
            warning("client", text, "set NO_PROXY=127.0.0.1,localhost, or clients look for local servers elsewhere")
        ]
    return [ok("client", ", ".join(found) or "no variables: programs run the service themselves (base_url='local')")]


def check_server(base_url: str | None, api_key: str | None, settings: "Settings | None") -> list[Finding]:
    """Does the server answer that programs of this user would ask, in which version, and does it take the key?"""
    from lorimer.client.connection import Connection, resolve_base_url
    from lorimer.client.transport import decoded, succeeded

    url = named_server(base_url, None) or running_server(settings)
    if not url or url == "local":
        return [ok("server", "none is named and none runs on the data directory; `lorimer serve` starts one")]
    try:
        connection = Connection(resolve_base_url(url), api_key)
    except ValueError as error:
        return [failed("server", str(error), "correct --base-url or LORIMER_BASE_URL")]

    def ask(path: str) -> object:
        answer = connection.run(connection.transport.send("GET", path, timeout=SERVER_SECONDS / 4)).result()
        return decoded(answer if path == "/readyz" else succeeded(answer))

    try:
        ask("/api/v1/healthz")
        described = ask("/openapi.json")
        info = described.get("info") if isinstance(described, dict) else None
        version = info.get("version") if isinstance(info, dict) else "of unknown version"
        ready = ask("/readyz")
        ask("/api/v1/get_server_capabilities")
    except LorimerError as error:
        return [failed("server", f"{url}: {sentence(error)}", "start it with `lorimer serve`, or name another address")]
    finally:
        connection.close()
    reasons = ready.get("reasons") if isinstance(ready, dict) else None
    if reasons:
        return [
            warning("server", f"{url} ({version}) is not ready: {'; '.join(map(str, reasons))}", "wait, or see its log")
        ]
    return [ok("server", f"{url} is ready, version {version}")]


def running_server(settings: "Settings | None") -> str | None:
    """The address of the server that has the data directory."""
    if settings is None:
        return None
    from lorimer.server.control import DescribeServer, ask_server

    reply = ask_server(settings.data.expanduser().absolute(), DescribeServer())
    return reply.url if reply is not None else None


def show(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from lorimer.cli.output import printable

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = printable(finding.text) + (f"\n-> {printable(finding.advice)}" if finding.advice else "")
        table.add_row(Text(finding.status.value, style=COLOURS[finding.status]), finding.check, Text(text))
    stdout_console().print(table)
