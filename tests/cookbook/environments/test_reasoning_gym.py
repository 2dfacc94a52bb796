"""Tasks of reasoning-gym, where it is installed, played by the bundled model."""

import sys

import pytest

from lorimer.cookbook.environments.reasoning_gym import answer_in, reasoning_gym_dataset
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.rl.rollouts import Policy, do_group_rollout
from lorimer.cookbook.service import get_tokenizer
from lorimer.errors import InvalidInput

MODEL = "lorimer/tiny"


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InvalidInput, match="pip install reasoning-gym"):
        reasoning_gym_dataset("basic_arithmetic", None, size=4, batch_size=2, group_size=2)


def test_answer_is_what_is_marked_or_everything():
    assert answer_in(" 7\n") == "7"
    assert answer_in("so <answer>5</answer>, no: <answer>\n7 </answer>.") == "7"


async def test_an_arithmetic_task_is_played(service):
    pytest.importorskip("reasoning_gym")
    renderer = get_renderer("auto", get_tokenizer(service, MODEL))
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    dataset = reasoning_gym_dataset("basic_arithmetic", renderer, size=6, batch_size=3, group_size=4, seed=1, **options)
    assert len(dataset) == 2
    env = (await dataset.get_batch(0)[0].make_envs())[0]
    end = renderer.tokenizer.encode("<|im_end|>")
    right = await env.step([*renderer.tokenizer.encode(env.get_reference_answer()), *end])
    wrong = await env.step([*renderer.tokenizer.encode("nothing"), *end])
    assert (right.reward, right.metrics["correct"]) == (1.0, 1.0)
    assert wrong.reward < 0.5
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    policy = Policy(sampling_client=sampler, max_tokens=8, seed=0)
    group = await do_group_rollout(dataset.get_batch(1)[0], policy)
    assert len(group.trajectories_G) == 4
    assert all(0 <= reward <= 1 for reward in group.get_total_rewards())
    with pytest.raises(InvalidInput, match="no_such_task"):
        reasoning_gym_dataset("no_such_task", renderer, size=6, batch_size=3, group_size=4)
