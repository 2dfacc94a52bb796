"""Run a module of the official cookbook as a user does, and read what it logged."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.servers import environment

RUN_SECONDS = 600
Metrics = dict[str, float]


@dataclass(frozen=True)
class Run:
    """What a recipe left in its log directory, and what it printed."""

    log: Path
    output: str

    @property
    def metrics(self) -> list[Metrics]:
        return [json.loads(line) for line in (self.log / "metrics.jsonl").read_text("utf-8").splitlines()]

    @property
    def checkpoints(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.log / "checkpoints.jsonl").read_text("utf-8").splitlines()]

    def series(self, name: str) -> list[float]:
        """The values of a metric, in the order of the steps that have it."""
        values = [row[name] for row in self.metrics if name in row]
        assert values, f"{name!r} is not logged; what is: {sorted(self.metrics[-1])}"
        return values

    def path(self, kind: str = "state_path") -> str:
        return str(self.checkpoints[-1][kind])


@dataclass(frozen=True)
class Cookbook:
    """The cookbook in its environment, a working directory for it, and the server to which it speaks."""

    python: Path
    directory: Path
    url: str
    key: str

    def python_output(self, *arguments: str) -> str:
        """What the cookbook's interpreter prints; ``AssertionError`` with it if the run fails."""
        variables = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "HOME": str(self.directory / "home")}
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "200",
        }
        run = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.directory,
            env=environment(**variables, **offline) | {"PYTHONPATH": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
        )
        assert run.returncode == 0, run.stdout[-6000:]
        return run.stdout

    def recipe(self, recipe: str, log: str, **options: object) -> Run:
        """Run ``tinker_cookbook.recipes.<recipe>`` with ``options`` as its command line has them."""
        folder = self.directory / "runs" / log
        command = ["-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={folder}"]
        command += [f"{name}={value}" for name, value in options.items()]
        return Run(folder, self.python_output(*command))
