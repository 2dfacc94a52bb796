"""The official cookbook in a virtual environment: ``python -m tests.official_cookbook.environment`` makes it.

torch is installed first, in the version of this project, so that the cookbook's requirements find it settled.
"""

import importlib.metadata
import subprocess
import sys
import venv
from pathlib import Path

from tests.conformance.servers import ROOT

RELEASE = "tinker-cookbook==0.5.8"
EXTRAS = "tinker-cookbook[math-rl]==0.5.8"
SDK = "tinker==0.36.0"
DIRECTORY = ROOT / ".venvs" / RELEASE.replace("==", "-")
INSTALL_SECONDS = 1800


class NotInstalled(Exception):
    """The cookbook could not be had, for want of a network or an index of packages."""


def cookbook_python() -> Path:
    """The interpreter that has the cookbook; its environment is made if it is not there."""
    python = DIRECTORY / "bin" / "python"
    finished = DIRECTORY / "installed"
    if finished.exists():
        return python
    venv.create(DIRECTORY, clear=True, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    torch = importlib.metadata.version("torch").partition("+")[0]
    for packages in ([f"torch=={torch}"], [EXTRAS, SDK, "peft"]):
        run = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=INSTALL_SECONDS)
        if run.returncode != 0:
            raise NotInstalled(f"{packages} cannot be installed: {run.stderr.strip().splitlines()[-1]}")
    finished.touch()
    return python


if __name__ == "__main__":
    cookbook_python()
