"""Make the pages of the site that are not files of docs/, and the links to them; `mkdocs.yml` names this as its hook.

README.md is the first page. The API reference lists the public names of `lorimer`; mkdocstrings takes their
descriptions from the source. The notebook is shown with the outputs that it was saved with; a test runs it.
"""

import importlib
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK, NOTEBOOK_PAGE = "quickstart.ipynb", "quickstart.md"
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "deploy": "deploy.md",
}
"""Pages by the path from the root that links of documents name."""
API = "api.md"
NOT_FOUND_BY_SEARCH = "---\nsearch:\n  exclude: true\n---\n"
LINK = re.compile(r"(\]\()([^)#\s]+)")
LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sh": "sh", ".toml": "toml", ".conf": "nginx"}
STYLE = """\
.md-grid { max-width: 76rem; }
.md-sidebar { width: 10.5rem; }
.md-typeset pre > code { font-size: .64rem; }
.md-typeset table:not([class]) { font-size: .7rem; }
.md-typeset table:not([class]) th, .md-typeset table:not([class]) td { padding: .5em .9em; }
.md-typeset table:not([class]) th { min-width: 3rem; }
.md-typeset table:not([class]) td code { word-break: break-word; }
.doc-heading + .doc-signature { margin-top: 0; }
.doc-contents { padding-left: 1rem; border-left: .1rem solid var(--md-default-fg-color--lightest); }
"""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and the style sheet to those of docs/."""
    File = importlib.import_module("mkdocs.structure.files").File  # it is in the environment of `make docs` only
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=root_page(path)))
    files.append(File.generated(config, API, content=api_page()))
    files.append(File.generated(config, NOTEBOOK_PAGE, content=notebook_page(ROOT / "docs" / NOTEBOOK)))
    files.append(File.generated(config, "site.css", content=STYLE))
    return files


def root_page(path: str) -> str:
    """Return a page for a file or a folder of the root, with links as from docs/."""
    if path == "deploy":
        return folder_page(ROOT / path)
    text = (ROOT / path).read_text("utf-8")
    if path == "LICENSE":
        return f"{NOT_FOUND_BY_SEARCH}# Licence\n\n```text\n{text}```\n"
    header = NOT_FOUND_BY_SEARCH if path == "CHANGELOG.md" else ""
    return header + LINK.sub(lambda found: found[1] + from_docs(found[2]), text)


def from_docs(link: str) -> str:
    """Return a link from the root as one from docs/; ``docs/cli.md`` becomes ``cli.md``."""
    return link if re.match(r"\w+:", link) else posixpath.relpath(link, "docs")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Turn links that leave docs/ into links to the pages made of what they name."""
    return markdown if page.file.src_uri == NOTEBOOK_PAGE else rewritten(markdown)


def rewritten(markdown: str) -> str:
    """Return the text with its links; those of code blocks stay."""

    def link(found: re.Match[str]) -> str:
        if found[2] == NOTEBOOK:
            return found[1] + NOTEBOOK_PAGE
        path = found[2].removeprefix("../").rstrip("/")
        return found[1] + PAGES[path] if found[2].startswith("../") and path in PAGES else found[0]

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def folder_page(folder: Path) -> str:
    """Return a page with every file of a folder."""
    parts = [f"# Files of {folder.name}/\n"]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        language = LANGUAGES.get(path.suffix, "docker" if path.name.startswith("Dockerfile") else "text")
        text = path.read_text("utf-8").rstrip()
        parts.append(f"## {path.relative_to(folder)}\n\n````{language}\n{text}\n````\n")
    return "\n".join(parts)


def api_page() -> str:
    """Return the reference of the public names, by kind."""
    sys.path.insert(0, str(ROOT / "src"))
    import lorimer

    homes: dict[str, str] = lorimer._HOMES
    names = [name for name in lorimer.__all__ if name[0].isupper()]
    clients = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
    errors = [name for name in names if homes.get(name, "").endswith(".errors")]
    types = [name for name in names if name not in homes]
    others = [name for name in names if name not in {*clients, *errors, *types}]
    text = (
        "# API reference\n\nThe public names of `lorimer`, which are those of the official SDK too: `import lorimer as"
        " tinker` runs its programs. [The SDK](sdk.md) explains them with examples.\n"
    )
    for title, group in {"Clients": clients, "Futures and options": others, "Types": types, "Errors": errors}.items():
        text += (
            f"\n## {title}\n\n" + "\n".join(f"::: {homes.get(name, 'lorimer.types')}.{name}" for name in group) + "\n"
        )
    return text


def notebook_page(path: Path) -> str:
    """Return the cells and outputs of a notebook as Markdown."""
    parts = [f"[Download this page as a notebook]({path.name})"]
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        output = "".join("".join(each.get("text", [])) for each in cell.get("outputs", []))
        if output:
            parts.append(f"```text\n{output.rstrip()}\n```")
    parts[0], parts[1] = parts[1], parts[0]  # the first cell is the title
    return "\n\n".join(parts) + "\n"
