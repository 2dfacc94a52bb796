"""A virtual environment for each older release of the SDK that is tested, and the steps run in it.

The release itself is installed there, without its dependencies: these, torch among them, are found in the environment
of the tests, at the end of the path. That is as new as a user who installs the release today would get them.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.conformance.servers import ROOT, environment

RELEASES = ("0.7.0", "0.16.1", "0.18.2", "0.22.2", "0.25.0", "0.28.0", "0.30.4")
ALWAYS = ("0.7.0", "0.25.0")
"""Those that every run of the test-suite tries: the first, and the first that speaks only protobuf."""
DIRECTORY = ROOT / ".venvs"
STEPS = Path(__file__).with_name("steps.py")
STEP_SECONDS = 240


class NotInstalled(Exception):
    """The release could not be had, for want of a network or an index of packages."""


def python_of(release: str) -> Path:
    """The interpreter of the release's environment, which is made if it is not there."""
    directory = DIRECTORY / f"tinker-{release}"
    python = directory / "bin" / "python"
    finished = directory / "installed"
    if finished.exists():
        return python
    venv.create(directory, clear=True, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-deps", f"tinker=={release}"]
    run = subprocess.run(install, capture_output=True, text=True, timeout=120)
    if run.returncode != 0:
        raise NotInstalled(f"tinker {release} cannot be installed: {run.stderr.strip().splitlines()[-1]}")
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", "utf-8")
    finished.touch()
    return python


def run_steps(release: str, url: str, key: str, model: str) -> int:
    """How many steps the release passed; ``AssertionError`` with what it said if not all."""
    run = subprocess.run(
        [str(python_of(release)), "-W", "ignore", str(STEPS), model],
        env=environment(TINKER_BASE_URL=url, TINKER_API_KEY=key) | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=STEP_SECONDS,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return int(run.stdout.split()[-1])
