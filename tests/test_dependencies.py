"""Dependencies are decisions: each has a line that says what it is for, and the lock file agrees with them."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/dependencies.md"
LOCK = ROOT / "requirements.lock"
LOCKED_EXTRAS = ("core", "server", "cookbook", "dev")
PYTHONS = ("3.11", "3.12", "3.13")
NOT_LOCKED = re.compile(r"(torch|triton|cuda-.*|nvidia-.*)")
"""torch's wheel differs by platform; the others come with it."""
ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def declared() -> dict[str, list[Requirement]]:
    """Requirements by extra; those without one are the core's."""
    project = pyproject()["project"]
    extras = {"core": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in extras.items()}


def explained(text: str) -> dict[str, dict[str, str]]:
    """What the document says each dependency is for, by extra."""
    sections = re.split(r"^## `?([\w ]+)`?$", text, flags=re.MULTILINE)[1:]
    found = {title.lower(): dict(ROW.findall(body)) for title, body in zip(sections[::2], sections[1::2], strict=True)}
    return {title: rows for title, rows in found.items() if rows}


def disagreements(requirements: dict[str, list[Requirement]], text: str) -> set[str]:
    """Dependencies without a line that says what they are for, and lines without their dependency."""
    wanted = {f"{extra}: {one.name}" for extra, lines in requirements.items() for one in lines}
    given = {
        f"{extra}: {name}" for extra, rows in explained(text).items() for name, use in rows.items() if len(use) > 4
    }
    return wanted ^ given


def test_every_dependency_has_a_line_that_says_what_it_is_for():
    text = DOCUMENT.read_text("utf-8")
    assert disagreements(declared(), text) == set()
    added = declared()
    added["server"].append(Requirement("left-pad>=1"))
    assert disagreements(added, text) == {"server: left-pad"}
    assert disagreements(declared(), text.replace("| `jinja2` | chat templates, in a sandbox |\n", "")) == {
        "server: jinja2"
    }


# ── the lock file ───────────────────────────────────────────────────────────────────────────────────────


def locked() -> dict[str, list[tuple[Requirement, list[str]]]]:
    """Pinned releases with their hashes, by name; one name has several where they differ by Python or platform."""
    text = re.sub(r"^#.*\n", "", LOCK.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[tuple[Requirement, list[str]]]] = {}
    for line in text.splitlines():
        requirement, *hashes = re.split(r"\s+--hash=", line.strip())
        found.setdefault(canonicalize_name(requirement.split("==")[0]), []).append((Requirement(requirement), hashes))
    return found


def environment(python: str, platform: str) -> dict[str, str]:
    system = {"linux": "Linux", "darwin": "Darwin", "win32": "Windows"}[platform]
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": platform,
        "platform_system": system,
    }


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_lock_has_one_allowed_release_of_every_dependency(python, platform):
    pinned = locked()
    values = environment(python, platform)
    wanted = [one for extra in LOCKED_EXTRAS for one in declared()[extra]]
    wanted += [Requirement(line) for line in pyproject()["build-system"]["requires"]]
    for one in wanted:
        if NOT_LOCKED.fullmatch(one.name) or (one.marker and not one.marker.evaluate(values)):
            continue
        lines = pinned.get(canonicalize_name(one.name), [])
        found = [pin for pin, _ in lines if pin.marker is None or pin.marker.evaluate(values)]
        assert len(found) == 1, f"make lock: {one} has {found}"
        (pin,) = found[0].specifier
        assert pin.operator == "==" and one.specifier.contains(pin.version, prereleases=True), (
            f"make lock: {one}, {pin}"
        )


def test_lock_is_hashed_and_names_neither_torch_nor_a_place():
    for name, lines in locked().items():
        assert not NOT_LOCKED.fullmatch(name), f"{name} belongs to UNLOCKED in the Makefile"
        for pin, hashes in lines:
            assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), pin
            assert pin.url is None
    assert not re.search(r"://|^-|/", LOCK.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("changed", ["pyproject.toml", "requirements.lock"])
def test_a_change_of_dependencies_installs_again_from_hashes(tmp_path, changed):
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.installed").touch()
    assert "pip install" not in planned(tmp_path)
    (tmp_path / changed).touch()
    os.utime(tmp_path / ".venv/.installed", (2, 2))
    lines = [line for line in planned(tmp_path).replace("\\\n", " ").splitlines() if "pip install" in line]
    assert "--require-hashes" in lines[0] and "requirements.lock" in lines[0]
    assert [line for line in lines if "--no-deps" not in line] == [lines[1]], "only torch is resolved"
    assert "torch==" in lines[1]


def planned(folder: Path) -> str:
    """What `make test` would run, without running it."""
    names = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-n", "test"], cwd=folder, env=names, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.slow
def test_sbom_lists_what_is_installed_and_what_is_bundled():
    names = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("the SBOM is of .venv, and these tests run elsewhere")
    subprocess.run(["make", "sbom"], cwd=ROOT, env=names, check=True, timeout=300)
    sbom = json.loads((ROOT / "build/sbom.json").read_text("utf-8"))
    assert sbom["bomFormat"] == "CycloneDX"
    versions = {canonicalize_name(one["name"]): one["version"] for one in sbom["components"]}
    assert {"torch", "uplot", "starlette"} <= versions.keys()
    pins = {name: {str(pin.specifier)[2:] for pin, _ in lines} for name, lines in locked().items()}
    assert {name for name in versions.keys() & pins.keys() if versions[name] not in pins[name]} <= {"pip", "setuptools"}
