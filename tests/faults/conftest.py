"""The logs of the fault tests are their own: which process was killed when, and what it came to. Also their table."""

import json
import logging
from collections.abc import Callable, Iterator

import pytest

logging.getLogger("httpx2").setLevel(logging.WARNING)

Tell = Callable[..., None]


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Tell:
    """Add a row to the table that ends `make faults`: the fault, what the client saw, what was lost."""

    def add(fault: str, saw: str, lost: int = 0) -> None:
        record_property("fault", json.dumps([fault, saw, lost]))

    return add


def rows(reports: list[pytest.TestReport]) -> Iterator[tuple[str, str, str, str]]:
    for report in reports:
        told = [json.loads(str(value)) for name, value in report.user_properties if name == "fault"]
        seconds = f"{report.duration:.0f}"
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        if report.when == "call" and report.passed:
            for fault, saw, lost in told or [(name, "a pause", 0)]:
                yield fault, saw, str(lost), seconds
        elif report.failed:
            yield name, "NOT AS PROMISED", "?", seconds
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            yield name, f"not run: {reason.removeprefix('Skipped: ')}", "", seconds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    reports = [
        report
        for kind in ("passed", "failed", "error", "skipped")
        for report in stats.get(kind, [])
        if isinstance(report, pytest.TestReport) and "tests/faults/" in report.nodeid
    ]
    if not reports or not terminalreporter.config.getoption("log_cli_level"):
        return
    table = [("fault", "what the client saw", "lost", "seconds"), *rows(reports)]
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    terminalreporter.section("faults")
    for row in table:
        terminalreporter.write_line(" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
