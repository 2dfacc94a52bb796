"""Checks the documents: the paths, anchors and make targets they name exist, the site has them, their examples run."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import docs_site
import lorimer
from tests.conformance.servers import environment

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
DOCUMENT_IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
MAX_LINES = {"README.md": 150, "ARCHITECTURE.md": 220, "CONTRIBUTING.md": 80, "AGENTS.md": 30}

SOURCE_SUFFIXES = (".py", ".md", ".toml")
FOLDERS = {"src", "tests", "docs", "tools", "bench", ".ci"} | {
    path.parent.name for path in ROOT.glob("src/lorimer/*/__init__.py")
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fenced(text: str, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(text) if language in languages]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def looks_like_path(span: str) -> bool:
    """Return whether a code span is a source file or a path in one of our folders, unlike ``lorimer/tiny``."""
    if not re.fullmatch(r"[\w.*/-]+", span):
        return False
    return span.endswith(SOURCE_SUFFIXES) or ("/" in span and span.split("/")[0] in FOLDERS)


def missing_paths(text: str, folder: Path) -> list[str]:
    """Resolve code spans from the root, the document or the package, and links from the document, as browsers do."""
    spans = [span for code in code_spans(text) if looks_like_path(span := code.split("::")[0])]
    starts = (ROOT, folder, ROOT / "src" / "lorimer")
    missing = [span for span in spans if not any(any(start.glob(span.rstrip("/"))) for start in starts)]
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", text))
    return missing + [link for link in links if not re.match(r"\w+:", link) and not (folder / link).exists()]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub and mkdocs give to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower() for heading in headings]
    return {re.sub(r"\s", "-", heading) for heading in plain} & {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def missing_anchors(text: str, folder: Path) -> list[str]:
    """Return the links to headings that are not in the document they name, or in this one."""
    links = re.findall(r"\]\(((?:[\w./-]+\.md)?)#([^)\s]+)\)", FENCE.sub("", text))
    return [f"{path}#{anchor}" for path, anchor in links if anchor not in anchors(target(path, text, folder))]


def target(path: str, text: str, folder: Path) -> str:
    return (folder / path).read_text("utf-8") if path else text


def site_pages() -> set[str]:
    """Return the pages in the navigation of the site."""
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    return {page for section in sections for pages in section.values() for page in pages}


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # A make that runs these tests must not pass its own flags on.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def make_targets() -> set[str]:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert phony
    return set(phony[1].split())


@pytest.mark.parametrize("path", DOCUMENTS, ids=DOCUMENT_IDS)
def test_named_paths_exist(path):
    assert missing_paths(path.read_text("utf-8"), path.parent) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=DOCUMENT_IDS)
def test_named_anchors_exist(path):
    assert missing_anchors(path.read_text("utf-8"), path.parent) == []


def test_site_has_every_page():
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert site_pages() == written | {*docs_site.PAGES.values(), docs_site.API, docs_site.NOTEBOOK_PAGE}


def test_links_of_the_site_stay_in_it():
    """Links of pages that are made of files outside of docs/, and links to those; mkdocs checks the rest."""
    pages = {path.name: path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")}
    pages |= {page: docs_site.root_page(path) for path, page in docs_site.PAGES.items() if path != "LICENSE"}
    assert "](../deploy)" in pages["deployment.md"]
    for name, text in pages.items():
        links = re.findall(r"\]\(([^)#\s]+)", FENCE.sub("", docs_site.rewritten(text)))
        local = {link for link in links if not re.match(r"\w+:", link)}
        assert {link for link in local if not (ROOT / "docs" / link).is_file()} <= site_pages(), name


def test_api_reference_has_every_public_name():
    named = re.findall(r"^::: lorimer\.[\w.]+\.(\w+)$", docs_site.api_page(), re.MULTILINE)
    assert sorted(named) == sorted(name for name in lorimer.__all__ if name[0].isupper())


@pytest.mark.parametrize("path", DOCUMENTS, ids=DOCUMENT_IDS)
def test_named_make_targets_exist(path):
    text = path.read_text("utf-8")
    commands = [*code_spans(text), *"\n".join(fenced(text, "", "sh", "bash", "shell", "console")).splitlines()]
    named = {found[1] for command in commands if (found := re.match(r"\$? ?make ([a-z-]+)", command.strip()))}
    assert named <= make_targets()


def test_readme_leads_to_every_document():
    """Directly or through a page that it links; and it says how to install without make."""
    text = README.read_text("utf-8")
    named = set(re.findall(r"\]\((docs/[\w-]+\.md)", text))
    further = {
        f"docs/{name}" for path in named for name in re.findall(r"\]\(([\w-]+\.md)", (ROOT / path).read_text("utf-8"))
    }
    assert {"docs/recipes.md", "docs/evaluation.md"} <= named
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= named | further
    assert 'pip install ".[server,cookbook]"' in text


@pytest.mark.parametrize(("name", "max_lines"), MAX_LINES.items(), ids=MAX_LINES)
def test_document_is_short(name, max_lines):
    assert len((ROOT / name).read_text("utf-8").splitlines()) <= max_lines


def test_readme_has_its_two_commands_and_an_example():
    text = README.read_text("utf-8")
    shell = "\n".join(fenced(text, "sh"))
    assert "make demo" in shell
    (tests,) = re.findall(r"^make (test[a-z-]*)", shell, re.MULTILINE)
    assert f"make --keep-going {tests}\n" in (ROOT / ".ci" / "run").read_text("utf-8")
    assert fenced(text, "python")


def test_reading_order_names_functions_that_are_in_the_files_it_names():
    """Each item of the README's reading order: its plain names are defined in one of its files."""
    section = README.read_text("utf-8").partition("## Read the code in this order")[2].partition("\n## ")[0]
    items = [code_spans(item) for item in re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]]
    assert len(items) > 4 and "train" in items[0]
    for spans in items:
        texts = [(ROOT / "src" / "lorimer" / span).read_text("utf-8") for span in spans if span.endswith(".py")]
        names = [span for span in spans if span.isidentifier()]
        missing = [name for name in names if not any(re.search(rf"(def|class) {name}\b", text) for text in texts)]
        assert texts and not missing, spans


def test_every_place_that_a_new_loss_touches_is_named():
    """The modules of the service that list losses by name are those that ARCHITECTURE.md tells to change."""
    (item,) = re.findall(r"^- \*\*a loss\*\*.*(?:\n  .*)*", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.MULTILINE)
    package = ROOT / "src" / "lorimer"
    sources = [
        path for folder in ("types", "engine", "scheduler", "server") for path in (package / folder).rglob("*.py")
    ]
    listing = {str(path.relative_to(package)) for path in sources if '"gspo"' in path.read_text("utf-8")}
    assert set(code_spans(item)) == listing


EXAMPLES = fenced(README.read_text("utf-8"), "python")


@pytest.mark.service
@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_readme_example_runs(code, open_server, tmp_path):
    settings = environment(TINKER_BASE_URL=open_server.url, TINKER_API_KEY="tml-local", TINKER_TELEMETRY="0")
    settings["LORIMER_DATA"] = str(tmp_path / "data")  # for examples that embed the server
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr


NOTEBOOK = ROOT / "docs" / docs_site.NOTEBOOK


def notebook_cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


def test_notebook_is_of_format_4_5():
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert {cell["id"] for cell in notebook["cells"]} == {
        f"cell-{number:02}" for number in range(len(notebook["cells"]))
    }
    for number, cell in enumerate(notebook_cells("code"), 1):
        assert cell.keys() == {"cell_type", "id", "metadata", "source", "execution_count", "outputs"}
        assert cell["execution_count"] == number
    text = "\n".join("".join(cell["source"]) for cell in notebook_cells("markdown"))
    assert missing_paths(text, NOTEBOOK.parent) == []


@pytest.mark.service
def test_notebook_prints_what_it_was_saved_with(tmp_path):
    """Run its cells in one program, in the dtype they were saved with; numbers may differ between machines."""
    program = "\n".join("".join(cell["source"]) for cell in notebook_cells("code"))
    settings = environment(LORIMER_DATA=str(tmp_path / "data"), LORIMER_DTYPE="float32")
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    saved = "".join("".join(output["text"]) for cell in notebook_cells("code") for output in cell["outputs"])
    assert re.sub(r"[\d.]+", "N", run.stdout) == re.sub(r"[\d.]+", "N", saved)


GUIDES = [ROOT / "docs" / name for name in ("sdk.md", "optimizers.md", "agents.md")]
"""Pages whose examples are one program."""


@pytest.mark.service
@pytest.mark.parametrize("path", GUIDES, ids=[path.name for path in GUIDES])
def test_guide_runs_from_top_to_bottom(path, open_server, tmp_path):
    program = "\n".join(fenced(path.read_text("utf-8"), "python"))
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(LORIMER_BASE_URL=open_server.url),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr


def test_make_help_lists_every_target():
    listed = re.findall(r"^ +make ([a-z-]+) +\S", make("help").stdout, re.MULTILINE)
    assert sorted(listed) == sorted(make_targets())


def test_make_alone_is_help():
    assert make().stdout == make("help").stdout


def test_make_refuses_an_old_python(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n', "utf-8")
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    run = make(f"PYTHON={old}", "demo", folder=tmp_path)
    assert run.returncode != 0
    assert "Python 3.9.1" in run.stderr
    assert "needs Python 3.11" in run.stderr
    assert not (tmp_path / ".venv").exists()


# ── the checker itself ────────────────────────────────────────────────────────────────────────────────


def test_planted_missing_paths_are_found():
    text = (
        "`src/lorimer/errors.py`, `engine/`, `tests/test_docs.py::make`, `lorimer/tiny`, `alpha/rank`, `adapter.json`, "
        "[there](README.md#licence), [web](https://example.org/a.py), `engine/*.py`\n"
        "`src/gone.py`, `engine/gone`, `gone.md`, [gone](docs/gone.md)\n"
        "```python\nopen('`src/also_gone.py`')\n```\n"
    )
    assert missing_paths(text, ROOT) == ["src/gone.py", "engine/gone", "gone.md", "docs/gone.md"]


def test_planted_missing_anchors_are_found():
    text = (
        "## The `code`, and more\n[a](#the-code-and-more) [b](#gone) [c](docs/sdk.md#gone)\n```\n# not-a-heading\n```\n"
    )
    assert missing_anchors(f"{text}[d](#not-a-heading)", ROOT) == ["#gone", "docs/sdk.md#gone", "#not-a-heading"]


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────

AVOIDED = re.compile(r"(?<![A-Za-z])(?:MOST|LEAST)_|\b[Oo]n[\s#/*]+record\b|\b[Aa]t[\s#/*]+once\b")
"""What CONTRIBUTING.md replaces and must not come back: MAX_ and MIN_, committed, immediately or concurrently."""
WRITTEN_FOLDERS = ("src", "tests", "bench", "tools", "docs")
WRITTEN_SUFFIXES = {".py", ".pyi", ".js", ".html", ".css", ".md", ".proto", ".sh", ".toml"}


def avoided_words(text: str) -> list[str]:
    """Return the avoided words in a text, with their line numbers."""
    return [f"{len(text[: found.end()].splitlines())}: {found[0]!r}" for found in AVOIDED.finditer(text)]


def written_files() -> list[Path]:
    """Return the sources and documents that we write, without vendored files."""
    files = [path for folder in WRITTEN_FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    files += [*sorted(ROOT.glob("*.md")), ROOT / "Makefile", ROOT / "pyproject.toml"]
    files = [path for path in files if path.is_file() and "vendor" not in path.parts]
    return [path for path in files if path.suffix in WRITTEN_SUFFIXES or path.name == "Makefile"]


def test_avoided_words_do_not_come_back():
    found = {}
    for path in written_files():
        text = path.read_text("utf-8")
        if path.name == "CONTRIBUTING.md":
            text = text.partition("## Words\n")[0] + text.partition("## Words\n")[2].partition("\n## ")[2]
        if words := avoided_words(text):
            found[str(path.relative_to(ROOT))] = words
    assert found == {}


def test_planted_words_are_found():
    """The words are broken by ~ here, so that they are not found in this file."""
    planted = ["MOST~_BYTES", "_LEAST~_SECONDS", "on ~record", "At ~once", "at\n    # ~once"]
    for words in planted:
        assert len(avoided_words(f"first\nx {words.replace('~', '')} y")) == 1, words
    assert avoided_words("ALMOST_DONE, at_least_one, most_bytes, a record, at one\n") == []
