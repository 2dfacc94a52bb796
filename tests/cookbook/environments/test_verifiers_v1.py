"""Environments of verifiers 0.2 and later, where it is installed, played from outside by the bundled model."""

import asyncio
import sys
from types import ModuleType

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
            yield SumTask(SumData(idx=a, prompt=f"What is {a} + 1?", answer=str(a + 1)), self.config.task)


__all__ = ["SumTaskset"]
"""


def test_missing_verifiers_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(InvalidInput, match=r"pip install 'verifiers>=0\.2'"):
        verifiers_agents(None)


def test_an_older_release_is_named(monkeypatch):
    """0.1.14 has a verifiers.v1 too, with another interface."""
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.clients"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(InvalidInput, match=r"older than 0\.2: pip install 'verifiers>=0\.2'"):
        verifiers_agents(None)


def make_environment(vf):
    taskset, harness, runtime = {"id": "sums_of_a_test"}, {"id": "null"}, {"type": "subprocess"}
    if hasattr(vf, "SingleAgentEnv"):
        agent = {"harness": harness, "runtime": runtime}
        return vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset=taskset, agent=agent))
    return vf.Environment(vf.EnvConfig(taskset=taskset, harness=harness | {"runtime": runtime}))


@pytest.mark.slow
def test_an_environment_plays_its_tasks(service, tmp_path, monkeypatch):
    """Its null harness is a script that `uv` runs."""
    vf = pytest.importorskip("verifiers.v1")
    if not hasattr(vf, "ModelContext"):
        pytest.skip("verifiers is older than 0.2")
    (tmp_path / "sums_of_a_test.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    environment = make_environment(vf)
    client = service.create_lora_training_client("lorimer/tiny", rank=4, seed=0)
    sampler = client.save_weights_and_get_sampling_client()
    policy = Policy(sampling_client=sampler, max_tokens=8, run_id=client.model_id, temperature=0.0)

    async def play():
        async with environment.serving():
            agents = verifiers_agents(environment, timeout_seconds=300)
            taskset = environment.taskset
            task = list(taskset if hasattr(taskset, "__iter__") else taskset.load())[1]
            return await do_group_rollout(ProblemGroupBuilder(lambda: agents(task), 2), policy)

    group = asyncio.run(play())
    assert group.rollout_errors == []
    assert [len(one.transitions) for one in group.trajectories_G] == [1, 1]
    tokenizer = client.get_tokenizer()
    for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards(), strict=True):
        step = trajectory.transitions[0]
        assert "What is 1 + 1?" in tokenizer.decode(step.ob.to_ints())
        said = tokenizer.decode(step.ac.tokens, skip_special_tokens=True)
        assert reward == float(said.strip() == "2")
