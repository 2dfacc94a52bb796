"""The script of docs/rl.md runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from lorimer.cookbook.logs import read_metrics
from tests.conformance.servers import ROOT, environment
from tests.test_docs import fenced


@pytest.mark.service
def test_guide_runs(base_url, tmp_path: Path):
    script = tmp_path / "guide.py"
    script.write_text("\n".join(fenced((ROOT / "docs" / "rl.md").read_text("utf-8"), "python")))
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(LORIMER_BASE_URL=base_url),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert len(read_metrics(tmp_path / "runs" / "graded")) == 2
    assert "test/correct" in read_metrics(tmp_path / "runs" / "simple")[-1]
