"""A recipe of reinforcement learning whose samples come from vLLM."""

import subprocess

from lorimer.cookbook.logs import read_metrics
from tests.conformance.servers import environment
from tests.recipes.conftest import recipe_command
from tests.vllm.conftest import SAMPLER


def test_reinforcement_learning_samples_with_vllm(installation, tmp_path, figures):
    """The trainer finds the logprobs of the samples in each step, with the weights of the step before."""

    def learn():
        options = {"steps": 8, "batch_size": 16, "eval_every": 8, "num_questions": 50, "log_dir": tmp_path / "log"}
        command = recipe_command("arithmetic_rl", base_url=installation.server.url, **options)
        run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
        assert run.returncode == 0, run.stderr[-3000:]

    places = installation.num_places(learn)
    steps = [metrics for metrics in read_metrics(tmp_path / "log") if "optim/kl_sample_train_v1" in metrics]
    gaps = [abs(metrics["optim/kl_sample_train_v1"]) for metrics in steps]
    figures(correct=[metrics["env/all/correct"] for metrics in steps], gaps=max(gaps), places=places)
    assert set(places) == {SAMPLER}
    assert len(steps) == 8
    assert max(gaps) < 1e-4
    assert steps[-1]["optim/param_norm"] != steps[0]["optim/param_norm"]
