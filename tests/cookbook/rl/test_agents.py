"""Agents outside, written with the OpenAI client, play episodes on a real server: trajectories, losses, training."""

import asyncio
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import openai
import pytest

from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.rl import training
from lorimer.cookbook.rl.agents import AgentFailed, ExternalAgents, Outcome, program, read_reward, to_trajectory
from lorimer.cookbook.rl.datums import trajectory_to_data
from lorimer.cookbook.rl.problems import ProblemDataset, ProblemGroupBuilder
from lorimer.cookbook.rl.rollouts import Policy, do_group_rollout
from lorimer.cookbook.rl.transcripts import turns_of
from lorimer.types.episodes import Episode, Turn
from tests.cookbook.rl.episodes import MODEL

PROGRAM = """
import json, openai, sys
task = json.load(sys.stdin)
client = openai.OpenAI(max_retries=0)
if task == "hang":
    import time; time.sleep(600)
if task == "break":
    sys.exit("no idea")
said = client.chat.completions.create(model="any", messages=[{"role": "user", "content": task}])
print("thinking aloud")
print(json.dumps({"reward": 0.25, "length": len(said.choices[0].message.content)}))
"""


@pytest.fixture(scope="module")
def client(service):
    return service.create_lora_training_client(MODEL, rank=4, seed=0)


@pytest.fixture(scope="module")
def policy(client):
    sampler = client.save_weights_and_get_sampling_client()
    return Policy(sampling_client=sampler, max_tokens=6, seed=1, step=3, run_id=client.model_id)


def rollout(agents, policy, task="What is 2 + 3?", size=2):
    return asyncio.run(do_group_rollout(ProblemGroupBuilder(lambda: agents(task), size), policy))


def chat(call):
    return openai.OpenAI(base_url=call.base_url, api_key=call.api_key, max_retries=0).chat.completions


def talk(call):
    """Two turns; the second extends the first."""
    messages = [{"role": "user", "content": call.task}]
    for _ in range(2):
        said = chat(call).create(model=call.model, messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
    return Outcome(len(said), {"length": len(said)})


def test_an_agent_plays_a_group_from_the_policy(policy, client, service):
    group = rollout(ExternalAgents(talk), policy, size=3)
    assert len(group.trajectories_G) == 3 and group.rollout_errors == [] and group.sampler_step == 3
    for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards(), strict=True):
        assert len(trajectory.transitions) == 2
        metrics = trajectory.transitions[-1].metrics
        assert metrics["length"] == reward and metrics["constrained_turns"] == 0
        data = trajectory_to_data(trajectory, 1.0)
        assert len(data) == metrics["data_per_episode"]
        assert all(len(step.ac.tokens) <= 6 for step in trajectory.transitions)
        turns = turns_of(trajectory, client.get_tokenizer())
        assert turns[0].role == "user" and turns[1].tokens == trajectory.transitions[0].ac.tokens
        assert (turns[-2].role, turns[-2].content) == ("user", "Sure?")
    again = rollout(ExternalAgents(talk), policy, size=3)
    assert [[step.ac.tokens for step in one.transitions] for one in again.trajectories_G] == [
        [step.ac.tokens for step in one.transitions] for one in group.trajectories_G
    ]
    episodes = service.create_rest_client().list_episodes(client.model_id, state="finished").result().episodes
    assert {one.user_metadata["step"] for one in episodes} == {3}


def test_recorded_logprobs_are_those_of_the_trainer(policy, client):
    group = rollout(ExternalAgents(talk), policy, size=1)
    (trajectory,) = group.trajectories_G
    for datum in trajectory_to_data(trajectory, 1.0):
        output = client.forward([datum.to_datum("importance_sampling")], "importance_sampling").result()
        trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()
        assert (datum.mask * trained) == pytest.approx(datum.logprobs, abs=1e-4)


async def parallel(call):
    async with openai.AsyncOpenAI(base_url=call.base_url, api_key=call.api_key, max_retries=0) as made:
        asked = [[{"role": "user", "content": f"{call.task} {number}"}] for number in range(3)]
        await asyncio.gather(*(made.chat.completions.create(model="any", messages=one) for one in asked))
    return 1


def test_parallel_calls_of_a_coroutine_are_one_trajectory(policy):
    group = rollout(ExternalAgents(parallel), policy, size=2)
    assert [len(one.transitions) for one in group.trajectories_G] == [3, 3]
    assert [one.transitions[-1].metrics["data_per_episode"] for one in group.trajectories_G] == [3, 3]


def fail_at_times(call):
    chat(call).create(model="any", messages=[{"role": "user", "content": "Hello"}])
    if call.task == "raise":
        raise ValueError("a bug of the agent")
    if call.task == "sleep":
        time.sleep(3)
    return "much" if call.task == "nonsense" else None


def mute(call):
    return 1.0


FAILURES = {
    "exception": (fail_at_times, "raise", "a bug of the agent"),
    "timeout": (fail_at_times, "sleep", "longer than 2 seconds"),
    "no number": (fail_at_times, "nonsense", "returned 'much'"),
    "no reward": (fail_at_times, "none", "returned no reward, and its episode is open"),
    "no request": (mute, "none", "made 0 requests"),
}


@pytest.mark.parametrize(("agent", "task", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failing_agent_costs_its_own_episode(policy, agent, task, message):
    tasks = iter([task, "good"])

    def mixed(call):
        return agent(call) if call.task == task else talk(call)

    agents = ExternalAgents(mixed, timeout_seconds=2 if task == "sleep" else 60)
    group = asyncio.run(do_group_rollout(ProblemGroupBuilder(lambda: agents(next(tasks)), 2), policy))
    assert len(group.trajectories_G) == 1
    assert message in str(group.rollout_errors[0])


def ends_itself(call):
    chat(call).create(model="any", messages=[{"role": "user", "content": "Hello"}])
    httpx_client = chat(call)._client._client  # the connection of the OpenAI client will do
    answer = httpx_client.post(call.base_url + "/finish", json={"reward": 0.75}, headers={"x-api-key": call.api_key})
    assert answer.status_code == 200


def test_an_agent_may_end_its_episode_itself(policy):
    group = rollout(ExternalAgents(ends_itself), policy, size=1)
    assert group.get_total_rewards() == [0.75]


def test_programs_of_any_language_are_agents(policy):
    command = [sys.executable, "-c", PROGRAM]
    tasks = iter(["What is 2 + 3?", "hang", "break"])
    agents = ExternalAgents(program(command), timeout_seconds=20)
    begun = time.monotonic()
    group = asyncio.run(do_group_rollout(ProblemGroupBuilder(lambda: agents(next(tasks)), 3), policy))
    assert time.monotonic() - begun < 60
    assert group.get_total_rewards() == [0.25] and "length" in group.trajectories_G[0].transitions[-1].metrics
    hung, broken = group.rollout_errors
    assert "longer than 20 seconds" in str(hung) and "no idea" in str(broken)


def test_rewards_are_read_from_the_last_line():
    assert read_reward("x\n0.5\n") == Outcome(0.5)
    assert read_reward('{"reward": 1, "turns": 2}') == Outcome(1.0, {"turns": 2.0})
    assert read_reward(" \n") is None
    for line in ("done", '{"turns": 2}', '{"reward": "x"}', "[1]"):
        with pytest.raises(AgentFailed, match="a reward is accepted"):
            read_reward(line)


NOW = datetime.now(UTC)


def recorded(number, prompt, tokens, is_constrained=False):
    return Turn(
        number=number, choice=0, kind="chat", prompt_tokens=prompt, tokens=tokens, logprobs=[-1.0] * len(tokens),
        stop_reason="stop", sampler="s", temperature=1, top_p=1, top_k=-1, is_constrained=is_constrained,
        started_at=NOW, finished_at=NOW,
    )  # fmt: skip


EPISODE = Episode(
    run_id="r", episode_id="e", number=1, state="finished", path="/", reward=2.0, reward_parts={"a": 1.0}, num_turns=2,
    num_tokens=2, num_bytes=1, created_at=NOW, last_used_at=NOW,
)  # fmt: skip


def test_confined_turns_are_context_only():
    turns = [recorded(1, [1], [2], is_constrained=True), recorded(2, [1, 2, 3], [4])]
    trajectory = to_trajectory(EPISODE, turns)
    (datum,) = trajectory_to_data(trajectory, 1.0)
    assert datum.tokens.tolist() == [1, 2, 3, 4] and datum.mask.tolist() == [0, 0, 1]
    assert trajectory.transitions[-1].metrics == {"a": 1.0, "constrained_turns": 1, "data_per_episode": 1}
    with pytest.raises(AgentFailed, match="confined to a grammar"):
        to_trajectory(EPISODE, turns[:1])


def test_a_policy_without_run_says_so(policy):
    nameless = Policy(sampling_client=policy.sampling_client, max_tokens=4)
    group = rollout(ExternalAgents(talk), nameless, size=1)
    assert "Policy.run_id" in str(group.rollout_errors[0])


def reward_length(call):
    said = chat(call).create(model="any", messages=[{"role": "user", "content": call.task}])
    return said.usage.completion_tokens


def test_the_loop_trains_on_agents(service, log_dir: Path):
    agents = ExternalAgents(reward_length)
    tasks = [f"What is {number} + 1?" for number in range(4)]
    config = training.Config(
        base_model=MODEL,
        dataset_builder=lambda _: (
            ProblemDataset(tasks, agents, batch_size=2, group_size=4),
            ProblemDataset(tasks, agents, batch_size=2, group_size=1),
        ),
        log_dir=log_dir,
        learning_rate=1e-3,
        rank=4,
        max_tokens=8,
        num_steps=2,
        sinks=("jsonl",),
    )
    result = asyncio.run(training.train(config, service))
    assert result.metrics["test/reward/total"] > 0
    steps = read_metrics(log_dir)
    assert [step["env/all/total_episodes"] for step in steps[:2]] == [8, 8]
    assert all(abs(step["optim/kl_sample_train_v2"]) < 1e-6 for step in steps[:2] if step["optim/num_updates"])
