"""``pip install lorimer`` alone: every command and recipe says in one line what is missing."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from tests.conformance.servers import ROOT

HELPER = Path(__file__).with_name("every_command.py")
SAYS_WHAT_IS_MISSING = [
    "demo",
    "chat",
    "serve",
    "config",
    "key create",
    "key list",
    "model list",
    "model pull",
    "export",
]


def requirements(name: str) -> set[str]:
    """What a distribution needs without extras, and what that needs, by their names."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for text in metadata.requires(waiting.pop()) or []:
            requirement, _, marker = text.partition(";")
            needed = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()
            if "extra ==" in marker or needed in found:
                continue
            try:
                metadata.version(needed)
            except metadata.PackageNotFoundError:
                continue  # of another platform or Python
            found.add(needed)
            waiting.append(needed)
    return found


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the built wheel, and the files of what the core needs."""
    folder = tmp_path_factory.mktemp("core")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("lorimer-*.whl")
    venv.create(folder / "venv", with_pip=False)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", packages, wheel], check=True)
    for name in requirements("lorimer"):
        for file in metadata.files(name) or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                os.symlink(file.locate(), packages / file)
    return folder / "venv" / "bin" / "python"


@pytest.mark.slow
def test_every_command_of_the_core(core, tmp_path):
    """A wheel is built, which fetches its build tool."""
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NO_COLOR": "1"}
    run = subprocess.run([core, HELPER], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    outcomes = json.loads(run.stdout)
    assert {"serve", "checkpoint push-hf", "recipe demo"} <= outcomes.keys()
    for name, ended in outcomes.items():
        assert ended["error"] is None, (name, ended)
        assert "Traceback" not in ended["stderr"] + ended["stdout"], (name, ended)
        if ended["code"]:
            told = ended["stderr"].splitlines()
            assert len(told) == 1 and told[0].startswith("lorimer: "), (name, told)
    done = sorted(name for name, ended in outcomes.items() if not ended["code"])
    assert done == ["doctor", "recipe list", "train schema", "version"]
    for name in SAYS_WHAT_IS_MISSING:
        assert re.search(r"pip install [\"']lorimer\[server(,cookbook)?\]", outcomes[name]["stderr"]), (
            name,
            outcomes[name],
        )


RUNNERS = {
    "uvx": ("uv/archive-v0/a1b2", 'uvx --torch-backend auto --from "lorimer[server,cookbook]" lorimer demo --steps 2'),
    "pipx run": ("cache/pipx/a1b2", 'pipx run --spec "lorimer[server,cookbook]" lorimer demo --steps 2'),
    "uv tool": ("uv/tools/lorimer", 'uv tool install --torch-backend auto "lorimer[server,cookbook]"'),
    "pipx": ("pipx/venvs/lorimer", 'pipx install --force "lorimer[server,cookbook]"'),
    "pip": ("venv", 'pip install "lorimer[server,cookbook]"'),
}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "told"), RUNNERS.values(), ids=RUNNERS)
def test_demo_of_the_core_names_the_command_that_works(core, tmp_path, place, told):
    """The environment is where the runner would have made it."""
    environment = tmp_path / place
    environment.parent.mkdir(parents=True, exist_ok=True)
    environment.symlink_to(core.parents[1])
    run = subprocess.run(
        [environment / "bin" / "python", "-m", "lorimer.cli", "demo", "--steps", "2"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NO_COLOR": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (run.returncode, run.stdout) == (1, "")
    (wheel,) = core.parents[2].glob("lorimer-*.whl")
    told = told if place == "venv" else told.replace('"lorimer[', f'"{wheel}[')
    assert run.stderr.count("\n") == 1 and run.stderr.endswith(f": {told}\n"), run.stderr


@pytest.mark.slow
def test_help_of_the_core_needs_nothing_else(core, tmp_path):
    for command in (["--help"], ["demo", "--help"], ["version"]):
        run = subprocess.run([core, "-m", "lorimer.cli", *command], cwd=tmp_path, capture_output=True, timeout=120)
        assert run.returncode == 0, run.stderr
