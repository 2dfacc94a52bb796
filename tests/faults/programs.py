"""Starts tenants' programs, follows what they print, and compares what came of them."""

import itertools
import json
import math
import subprocess
import sys
import tarfile
import threading
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from safetensors.numpy import load

from tests.conformance.servers import ROOT, environment
from tests.faults.tenant import Plan

PROGRAM_SECONDS = 1200.0


@dataclass(eq=False)
class RunningProgram:
    """A tenant's program in its own process."""

    url: str
    key: str
    plan: Plan
    home: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True)
        variables = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "HOME": str(self.home)}
        self._errors = (self.home / "stderr").open("wb")
        command = [sys.executable, "-m", "tests.faults.tenant", self.plan.argument]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(**variables), stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
        self.process.stdout.close()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def num_steps(self) -> int:
        return sum("step" in line for line in self.lines)

    def stderr(self) -> str:
        return (self.home / "stderr").read_text("utf-8", "replace")

    def finish(self, seconds: float = PROGRAM_SECONDS) -> "RunningProgram":
        """Wait for the end, which must be a good one."""
        try:
            code = self.process.wait(seconds)
        finally:
            self.stop()
        assert code == 0, self.stderr()[-4000:]
        return self

    def stop(self) -> None:
        if self.is_running:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self._errors.close()

    def of(self, key: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if key in line]

    @property
    def model_id(self) -> str:
        return str(self.of("run")[0]["run"])

    @property
    def longest_pause(self) -> float:
        seconds = [line["seconds"] for line in self.lines]
        return max(later - earlier for earlier, later in itertools.pairwise(seconds))

    # ── what the server has of it ─────────────────────────────────────────────────────────────────────

    def checkpoints(self) -> list[str]:
        """Names as listed, such as ``weights/end``."""
        answer = self._get(f"/training_runs/{self.model_id}/checkpoints").raise_for_status()
        return [one["checkpoint_id"] for one in answer.json()["checkpoints"]]

    def tensors(self, checkpoint_id: str) -> dict[str, np.ndarray]:
        """The adapter or the model of a checkpoint, as one downloads it."""
        answer = self._get(f"/training_runs/{self.model_id}/checkpoints/{checkpoint_id}/archive")
        assert answer.status_code == 302, answer.text
        with urllib.request.urlopen(answer.headers["location"], timeout=60) as download:
            content = download.read()
        with tarfile.open(fileobj=BytesIO(content), mode="r") as archive:
            member = archive.extractfile("model.safetensors" if self.plan.full else "adapter_model.safetensors")
            assert member is not None
            return load(member.read())

    def _get(self, path: str) -> httpx2.Response:
        return httpx2.get(f"{self.url}/api/v1{path}", headers={"X-API-Key": self.key}, timeout=60)


def finish_all(programs: Sequence[RunningProgram]) -> None:
    try:
        for program in programs:
            program.finish()
    finally:
        for program in programs:
            program.stop()


@dataclass(frozen=True)
class Expected:
    """What a plan comes to when nothing is disturbed."""

    lines: list[dict[str, Any]]
    checkpoints: list[str]
    tensors: dict[str, np.ndarray]


def expectation(program: RunningProgram) -> Expected:
    return Expected(program.lines, program.checkpoints(), program.tensors("weights/end"))


def assert_same(program: RunningProgram, expected: Expected) -> float:
    """Nothing lost, nothing twice, nothing different. Gives the largest difference of a weight."""
    assert [_kind(line) for line in program.lines] == [_kind(line) for line in expected.lines]
    losses, theirs = ([line["loss"] for line in lines if "loss" in line] for lines in (program.lines, expected.lines))
    assert all(math.isfinite(loss) for loss in losses)
    np.testing.assert_allclose(losses, theirs, rtol=1e-4, atol=1e-4)
    if program.plan.load_at < 0:
        assert [line["count"] for line in program.of("step")] == list(range(1, program.plan.steps + 1))
    assert sorted(program.checkpoints()) == sorted(expected.checkpoints)
    for checkpoint_id in program.checkpoints():
        assert all(np.isfinite(tensor).all() for tensor in program.tensors(checkpoint_id).values())
    found = program.tensors("weights/end")
    assert found.keys() == expected.tensors.keys()
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor, expected.tensors[name], rtol=1e-5, atol=1e-5, err_msg=name)
    return max(float(np.abs(tensor - expected.tensors[name]).max()) for name, tensor in found.items())


def _kind(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what is a measurement or is called differently in each run."""
    return {name: value for name, value in line.items() if name not in ("seconds", "path", "loss", "run")}
