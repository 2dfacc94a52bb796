"""Environments of verifiers 0.2 and later, where it is installed, played from outside by the bundled model."""

import asyncio
import sys

import pytest

from lorimer.cookbook.environments.verifiers_v1 import verifiers_agents
from lorimer.cookbook.rl.problems import ProblemGroupBuilder
from lorimer.cookbook.rl.rollouts import Policy, do_group_rollout
from lorimer.errors import InvalidInput

TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float((trace.branches[0].messages[-1].content or "").strip() == self.data.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(4):
            yield SumTask(SumData(prompt=f"What is {a} + 1?", answer=str(a + 1)), self.config.task)


__all__ = ["SumTaskset"]
"""


def test_missing_verifiers_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(InvalidInput, match=r"pip install 'verifiers>=0\.2'"):
        verifiers_agents(None)


@pytest.mark.slow
def test_an_environment_plays_its_tasks(service, tmp_path, monkeypatch):
    """Its null harness is a script that `uv` runs."""
    vf = pytest.importorskip("verifiers.v1")
    (tmp_path / "sums_of_a_test.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    environment = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": "sums_of_a_test"}, agent=agent))
    client = service.create_lora_training_client("lorimer/tiny", rank=4, seed=0)
    sampler = client.save_weights_and_get_sampling_client()
    policy = Policy(sampling_client=sampler, max_tokens=8, run_id=client.model_id, temperature=0.0)

    async def play():
        async with environment.serving():
            agents = verifiers_agents(environment, timeout_seconds=300)
            task = list(environment.taskset)[1]
            return await do_group_rollout(ProblemGroupBuilder(lambda: agents(task), 2), policy)

    group = asyncio.run(play())
    assert group.rollout_errors == []
    assert [len(one.transitions) for one in group.trajectories_G] == [1, 1]
    assert set(group.get_total_rewards()) <= {0.0, 1.0}
