"""Ray in a virtual environment of its own: ``python -m tests.ray.environment`` makes it.

It has Ray and what Ray needs besides, and finds everything else in the environment that makes it. So Ray is tested with
the versions of the lock file without being a part of it.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.conformance.servers import ROOT

RELEASE = "ray==2.60.0"
DIRECTORY = ROOT / ".venvs" / RELEASE.replace("==", "-")
INSTALL_SECONDS = 1800


def ray_python() -> Path | None:
    """The interpreter that has Ray; None if its environment was not made."""
    return DIRECTORY / "bin" / "python" if (DIRECTORY / "installed").exists() else None


def make() -> None:
    if ray_python() is not None:
        return
    venv.create(DIRECTORY, clear=True, symlinks=True)
    python = str(DIRECTORY / "bin" / "python")
    (packages,) = (DIRECTORY / "lib").glob("python*/site-packages")
    (packages / "lorimer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    subprocess.run([*pip, "install", "--quiet", RELEASE], check=True, timeout=INSTALL_SECONDS)
    (DIRECTORY / "installed").touch()


if __name__ == "__main__":
    make()
