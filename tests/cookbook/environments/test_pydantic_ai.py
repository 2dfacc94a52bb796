"""An agent of pydantic-ai, where it is installed, is recorded turn by turn, also where the framework asks again."""

import asyncio

import pytest

from lorimer.cookbook.rl.agents import ExternalAgents
from lorimer.cookbook.rl.problems import ProblemGroupBuilder
from lorimer.cookbook.rl.rollouts import Policy, do_group_rollout
from lorimer.recipes.agent_rl import shared_client

MODEL = "lorimer/tiny"


async def roll_out(service, play, task, num_envs=8):
    client = await service.create_lora_training_client_async(MODEL, rank=4, seed=0)
    sampler = await client.save_weights_and_get_sampling_client_async()
    policy = Policy(sampling_client=sampler, max_tokens=8, run_id=client.model_id, seed=0)
    agents = ExternalAgents(play, timeout_seconds=60)
    group = await do_group_rollout(ProblemGroupBuilder(lambda: agents(task), num_envs), policy)
    return client.get_tokenizer(), group


async def test_answers_are_recorded_and_rewarded(service):
    pytest.importorskip("pydantic_ai")
    from tests.cookbook.environments.pydantic_agent import play

    tokenizer, group = await roll_out(service, play, (2, 2))
    await shared_client(asyncio.get_running_loop()).close()
    shared_client.cache_clear()
    assert group.rollout_errors == []
    for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards(), strict=True):
        step = trajectory.transitions[-1]
        assert "What is 2 * 2?" in tokenizer.decode(step.ob.to_ints())
        said = tokenizer.decode(step.ac.tokens, skip_special_tokens=True)
        assert reward == float(said.strip() == "4")


async def test_a_turn_that_the_framework_asks_for_again_continues_the_episode(service):
    pytest.importorskip("pydantic_ai")
    import openai
    from pydantic_ai import Agent, ModelRetry, TextOutput  # type: ignore[import-not-found]
    from pydantic_ai.models.openai import OpenAIChatModel  # type: ignore[import-not-found]
    from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

    async def play(call):
        asked = []

        def twice(text: str) -> str:
            asked.append(text)
            if len(asked) == 1:
                raise ModelRetry("Say it again.")
            return text

        async with openai.AsyncOpenAI(base_url=call.base_url, api_key=call.api_key) as client:
            model = OpenAIChatModel(call.model, provider=OpenAIProvider(openai_client=client))
            await Agent(model, output_type=TextOutput(twice), retries=1).run("What is 3 + 4?")
        return 1.0

    tokenizer, group = await roll_out(service, play, None, num_envs=2)
    assert group.rollout_errors == []
    for trajectory in group.trajectories_G:
        first, second = trajectory.transitions
        before = [*first.ob.to_ints(), *first.ac.tokens]
        assert second.ob.to_ints()[: len(before)] == before, "the history was rewritten"
        assert "Say it again." in tokenizer.decode(second.ob.to_ints()[len(before) :])
