"""The console's files: served to everybody, under a strict policy, and nothing else with them."""

import re
from pathlib import Path

import pytest

import lorimer.console
from lorimer.server.console import files

FOLDER = Path(lorimer.console.__file__).parent / "static"
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "font-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
}
PAGES = ["/", "/console", "/console/", "/console/runs/a%3Atrain%3A0?compare=b", "/console/checkpoints/a/weights%2Fb"]


@pytest.mark.parametrize("path", PAGES)
async def test_every_page_is_the_same_file_and_needs_no_key(start, path):
    async with start() as running:
        await running.new_key()
        answer = await running.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.content == (FOLDER / "index.html").read_bytes()
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_static_files_have_types_and_are_sent_once(start):
    kinds = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
    async with start() as running:
        await running.new_key()
        names = [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()]
        assert {"app.js", "style.css", "pages/run.js", "vendor/uPlot.esm.js", "vendor/LICENSE"} <= set(names)
        for name in names:
            answer = await running.http.get(f"/console/static/{name}")
            assert answer.status_code == 200, name
            assert answer.content == (FOLDER / name).read_bytes()
            if (suffix := Path(name).suffix) in kinds:
                assert answer.headers["content-type"] == kinds[suffix]
            again = await running.http.get(
                f"/console/static/{name}", headers={"if-none-match": f'"x", {answer.headers["etag"]}'}
            )
            assert (again.status_code, again.content) == (304, b"")


async def test_nothing_else_is_served(start):
    async with start() as running:
        await running.new_key()
        for name in ("..%2f__init__.py", "%2e%2e/%2e%2e/errors.py", "none.js", "", "pages", "/etc/passwd", "app.js%00"):
            answer = await running.http.get(f"/console/static/{name}")
            assert answer.status_code == 404, name
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await running.http.request(method, "/console/static/app.js")).status_code == 401
        assert (await running.http.get("/consoles")).status_code == 401
        head = await running.http.request("HEAD", "/")
        assert (head.status_code, head.content) == (200, b"")


def test_the_files_never_parse_text_as_html():
    """Nor do they run text, name another host, or carry scripts and styles that the policy would refuse."""
    bad = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
        r"|createContextualFragment|setHTML|\bsrcdoc=|https?://(?!www\.w3\.org/2000/svg)|<script>|<style|\son\w+=\"|style=\""
    )
    for name, file in files().items():
        if not name.startswith("vendor/"):
            found = bad.search(file.content.decode())
            assert found is None, f"{name} has {found and found[0]!r}"


def test_imports_name_files_that_are_there():
    for name, file in files().items():
        if name.endswith(".js") and not name.startswith("vendor/"):
            for target in re.findall(r'from "(\.[^"]+)"', file.content.decode()):
                assert (FOLDER / name).parent.joinpath(target).resolve().relative_to(FOLDER).as_posix() in files()
