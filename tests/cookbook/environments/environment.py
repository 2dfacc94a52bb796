"""Other projects' packages in virtual environments of their own: ``python -m tests.cookbook.environments.environment``.

Two series of verifiers cannot be installed together, and neither they nor an agent framework belong to the lock file.
Each environment has one of them and what it needs besides, and finds everything else in the environment that makes it.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.conformance.servers import ROOT

RELEASES = {
    "verifiers-0.1": ["verifiers==0.1.14"],
    "verifiers-0.2": ["verifiers==0.2.1", "uv==0.13.7"],
    "verifiers-0.3": ["verifiers==0.3.1", "uv==0.13.7"],
    "verifiers-0.4": ["verifiers==0.4.0", "uv==0.13.7"],
    "pydantic-ai": ["pydantic-ai-slim[openai]==2.66.0"],
}
INSTALL_SECONDS = 1800


def make(name: str) -> None:
    directory: Path = ROOT / ".venvs" / name
    wanted = "\n".join(RELEASES[name])
    finished = directory / "installed"
    if finished.exists() and finished.read_text("utf-8") == wanted:
        return
    venv.create(directory, clear=True, symlinks=True)
    python = str(directory / "bin" / "python")
    (packages,) = (directory / "lib").glob("python*/site-packages")
    (packages / "lorimer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    subprocess.run([*pip, "install", "--quiet", *RELEASES[name]], check=True, timeout=INSTALL_SECONDS)
    finished.write_text(wanted, "utf-8")


if __name__ == "__main__":
    for environment in sys.argv[1:] or RELEASES:
        make(environment)
