"""Supervised learning on the cookbook: it runs, and killed at any moment it ends as if it had not been."""

import signal
import subprocess
import time

from lorimer.cookbook.checkpoints import Checkpoints
from lorimer.cookbook.logs import read_metrics
from tests.conformance.servers import environment
from tests.cookbook.surroundings import weights_of
from tests.recipes.conftest import recipe_command

OPTIONS = {"steps": 8, "batch_size": 4, "rank": 4, "every": 2, "num_questions": 4}


def lines_of(log_dir):
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(log_dir)]


def start_and_kill(base_url, log_dir, num_lines):
    """Start the recipe and kill it without warning once it has logged so many steps."""
    command = recipe_command("sl_basic", base_url=base_url, log_dir=log_dir, **OPTIONS)
    with subprocess.Popen(command, cwd=log_dir.parent, env=environment(), stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 200
        while len(read_metrics(log_dir)) < num_lines:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_killed_run_ends_as_an_uninterrupted_one(run_recipe, base_url, service, tmp_path):
    run_recipe("sl_basic", log_dir=tmp_path / "whole", **OPTIONS)
    whole = Checkpoints(tmp_path / "whole").last()
    for num_lines in (1, 5):
        log_dir = tmp_path / f"killed_{num_lines}"
        start_and_kill(base_url, log_dir, num_lines)
        printed = run_recipe("sl_basic", log_dir=log_dir, **OPTIONS)
        assert lines_of(log_dir) == lines_of(tmp_path / "whole")
        last = Checkpoints(log_dir).last()
        assert weights_of(service, last.state_path) == weights_of(service, whole.state_path)
        assert f"checkpoint: {last.sampler_path}" in printed
    assert "step 4/8" not in printed, "it went on from the checkpoint after the fourth step, or a later one"
