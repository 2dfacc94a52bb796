"""Environments of verifiers, where it is installed, played by the bundled model."""

import sys

import pytest

from lorimer.cookbook.environments.verifiers import verifiers_dataset
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.rl.rollouts import Policy, do_group_rollout
from lorimer.cookbook.service import get_tokenizer
from lorimer.errors import InvalidInput

MODEL = "lorimer/tiny"
ROWS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in (2, 3) for b in (2, 3)]


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(InvalidInput, match=r"pip install 'verifiers<0\.4'"):
        verifiers_dataset("reverse-text", None, batch_size=2, group_size=2)


@pytest.fixture
def vf():
    verifiers = pytest.importorskip("verifiers")
    if not hasattr(verifiers, "MultiTurnEnv"):
        pytest.skip("verifiers has no MultiTurnEnv: 0.4 or later")
    return verifiers


def is_right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)


async def play(service, environment, group_size=4):
    renderer = get_renderer("auto", get_tokenizer(service, MODEL))
    dataset = verifiers_dataset(environment, renderer, batch_size=2, group_size=group_size)
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    policy = Policy(sampling_client=sampler, max_tokens=8, seed=0)
    return renderer, [await do_group_rollout(builder, policy) for builder in dataset.get_batch(0)]


async def test_single_turn_is_scored_by_the_rubric(service, vf):
    dataset = pytest.importorskip("datasets").Dataset
    environment = vf.SingleTurnEnv(dataset=dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[is_right]))
    renderer, groups = await play(service, environment)
    assert len(groups) == 2
    for group in groups:
        assert not group.rollout_errors
        for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards(), strict=True):
            step = trajectory.transitions[-1]
            asked = renderer.tokenizer.decode(step.ob.to_ints())
            row = next(row for row in ROWS if row["question"] in asked)
            said = renderer.parse_response(step.ac.tokens)[0]["content"]
            assert reward == float(said.strip() == row["answer"])
            assert trajectory.prompt[-1] == {"role": "user", "content": row["question"]}
    assert any(reward == 1 for group in groups for reward in group.get_total_rewards())


async def test_turns_go_on_until_the_environment_is_done(service, vf):
    dataset = pytest.importorskip("datasets").Dataset

    class Again(vf.MultiTurnEnv):  # type: ignore[name-defined]
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "What is 2 + 2?"}]

    environment = Again(dataset=dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[is_right]), max_turns=2)
    renderer, groups = await play(service, environment, group_size=2)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories_G]
    assert [len(trajectory.transitions) for trajectory in trajectories] == [2] * 4
    assert "What is 2 + 2?" in renderer.tokenizer.decode(trajectories[0].transitions[1].ob.to_ints())
    assert groups[0].metrics_G[0]["num_turns"] == 2
