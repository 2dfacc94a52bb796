"""Runs commands of ``lorimer`` in this process, as a user types them."""

import json
import os
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from lorimer.cli.main import app


def lorimer(*arguments, text="", **environment):
    """Run a command; only variables named here are seen of ``LORIMER_*`` and ``TINKER_*``."""
    hidden = {name: None for name in os.environ if name.startswith(("LORIMER_", "TINKER_"))}
    variables = {**hidden, "NO_COLOR": "1", "COLUMNS": None, **environment}
    return CliRunner().invoke(app, list(map(str, arguments)), input=text, env=variables)


@dataclass(frozen=True)
class CommandLine:
    """The commands of one user of one server."""

    url: str
    key: str

    def run(self, *arguments, text="", **environment):
        return lorimer(*arguments, text=text, LORIMER_BASE_URL=self.url, LORIMER_API_KEY=self.key, **environment)

    def __call__(self, *arguments, **options) -> str:
        """What a command prints that succeeds."""
        run = self.run(*arguments, **options)
        assert run.exit_code == 0, run.stdout + run.stderr
        return run.stdout

    def json(self, *arguments, **options) -> Any:
        return json.loads(self(*arguments, "-f", "json", **options))

    def refused(self, *arguments, **options) -> tuple[int, str]:
        """The exit code of a command that fails, and its one line on stderr."""
        return refused(self.run(*arguments, **options))


def refused(run) -> tuple[int, str]:
    assert run.exit_code != 0, run.stdout
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    assert run.stderr.startswith("lorimer: ") and run.stderr.count("\n") == 1, run.stderr
    return run.exit_code, run.stderr
