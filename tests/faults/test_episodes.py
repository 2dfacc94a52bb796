"""Programs outside talk to a server that is killed between their turns: what they have seen is recorded."""

from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import lorimer
from lorimer.server.backup import back_up
from lorimer.server.restore import restore
from lorimer.server.settings import Settings
from lorimer.store import Store, episodes
from tests.faults.supervisor import Supervisor
from tests.faults.tenant import MODEL

pytestmark = pytest.mark.timeout(900)
NUM_TURNS = 4


def say(client: openai.OpenAI, number: int) -> list[str]:
    """Ask once, every other time as a stream; the tokens of the answer as text."""
    messages = [{"role": "user", "content": f"Turn {number}"}]
    fields: dict[str, Any] = {"model": "any", "messages": messages, "max_tokens": 8, "logprobs": True}
    if number % 2 == 0:
        answer: Any = client.chat.completions.create(**fields)
        return [one.token for one in answer.choices[0].logprobs.content]
    chunks: Any = client.chat.completions.create(**fields, stream=True)
    scored = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    return [one.token for part in scored if part for one in part.content]


def test_answered_turns_and_rewards_survive_kills_and_backups(tmp_path: Path, tell) -> None:
    with Supervisor(tmp_path / "data") as server:
        service = lorimer.ServiceClient(base_url=server.url)
        run_id = service.create_lora_training_client(MODEL, rank=4, seed=0).model_id
        rest = service.create_rest_client()
        rest.set_run_sampler(run_id, MODEL).result()
        base_url = f"{server.url}/v1/runs/{run_id}/episodes/e"
        client = openai.OpenAI(base_url=base_url, api_key="tml-local", max_retries=20)
        seen = []
        for number in range(NUM_TURNS):
            seen.append(say(client, number))
            server.kill("both" if number == 1 else "api")
        turns = rest.get_turns(run_id, "e").result()
        assert [turn.number for turn in turns] == list(range(1, NUM_TURNS + 1))
        for turn, tokens in zip(turns, seen, strict=True):
            # The end of an answer is sampled, and not shown.
            assert len(turn.tokens) == len(turn.logprobs) == len(tokens) + (turn.stop_reason == "stop")
        rest.finish_episode(run_id, "e", 0.5, reward_parts={"a": 1.0}).result()
        server.kill("api")
        assert rest.get_episode(run_id, "e").result().reward == 0.5
        back_up(Settings(data=tmp_path / "data"), tmp_path / "backup", lambda *_: None)
        client.close()
    tell("kill -9 of the server between the turns of a program outside", "a retry of the OpenAI client")
    restore(Settings(data=tmp_path / "restored"), tmp_path / "backup", lambda *_: None, replace=False)
    store = Store.open(None, tmp_path / "restored")
    found, _ = store.read_now(episodes.read_turns, run_id, "e")
    store.close()
    assert [turn.logprobs for turn in found] == [turn.logprobs for turn in turns]


def test_a_request_that_was_cut_off_keeps_its_number(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "data") as server:
        service = lorimer.ServiceClient(base_url=server.url)
        run_id = service.create_lora_training_client(MODEL, rank=4, seed=0).model_id
        rest = service.create_rest_client()
        rest.set_run_sampler(run_id, MODEL).result()
        url = f"{server.url}/v1/runs/{run_id}/episodes/e/chat/completions"
        body = {"model": "any", "messages": [{"role": "user", "content": "Go on"}], "stream": True}
        with httpx2.stream("POST", url, json=body, timeout=60) as answer:
            assert answer.status_code == 200
            assert next(answer.iter_lines())
        body |= {"stream": False, "max_tokens": 2}
        assert httpx2.post(url, json=body, timeout=60).status_code == 200
        last = rest.get_turns(run_id, "e").result()[-1]
        assert (last.number, len(last.tokens) <= 2) == (2, True)
