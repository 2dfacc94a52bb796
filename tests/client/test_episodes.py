"""Episodes by the SDK against a real server: samplers, turns of many pages, rewards, errors."""

import os

import httpx2
import pytest

import lorimer

MODEL = "lorimer/debug"


def test_episodes_by_their_methods(service, server):
    client = service.create_lora_training_client(MODEL, rank=4, seed=0)
    rest, run_id = service.create_rest_client(), client.model_id
    sampler = client.save_weights_and_get_sampling_client().sampling_session_id
    chosen = rest.set_run_sampler(run_id, sampler, temperature=0.5, max_tokens=2).result()
    assert (chosen.sampler, chosen.temperature, chosen.max_tokens) == (sampler, 0.5, 2)
    made = rest.create_episode(run_id, "first", user_metadata={"task": 1}).result()
    assert (made.state, made.number, made.sampler) == ("open", 1, None)
    for number in range(3):
        body = {"model": "any", "prompt": [10, 20, number], "n": 2}
        headers = {"x-api-key": os.environ["LORIMER_API_KEY"]}
        answer = httpx2.post(f"{server.url}{made.path}/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
    turns = rest.get_turns(run_id, "first").result()
    assert [(turn.number, turn.choice) for turn in turns] == [(n, c) for n in (1, 2, 3) for c in (0, 1)]
    assert [turn.prompt_tokens for turn in turns[::2]] == [[10, 20, number] for number in range(3)]
    ended = rest.finish_episode(run_id, "first", 1.5, reward_parts={"a": 1.5}, user_metadata={"b": 2}).result()
    assert (ended.reward, ended.user_metadata, ended.num_turns) == (1.5, {"task": 1, "b": 2}, 6)
    assert rest.get_episode(run_id, "first").result() == ended
    rest.create_episode(run_id).result()
    assert [one.state for one in rest.list_episodes(run_id).result().episodes] == ["finished", "open"]
    listed = rest.list_episodes(run_id, state="finished", limit=1).result()
    assert ([one.episode_id for one in listed.episodes], listed.has_more) == (["first"], False)
    rest.delete_episode(run_id, "first").result()
    with pytest.raises(lorimer.NotFoundError, match="has no episode 'first'"):
        rest.get_turns(run_id, "first").result()
    with pytest.raises(ValueError, match="a reward or an error"):
        rest.finish_episode(run_id, "second")
