"""Programs outside over API replicas: any of them serves the next turn, and one that is killed costs nothing."""

from collections.abc import Iterator

import openai
import pytest

import lorimer
from tests.cluster.installation import Installation, missing_programs
from tests.faults.tenant import MODEL

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    if missing := missing_programs():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("episodes") / "installation"
    with Installation(folder, {MODEL: MODEL}, num_replicas=1, num_workers=1, users=["alice"]) as opened:
        yield opened


def test_turns_of_one_episode_by_several_replicas(installation):
    key = installation.keys["alice"]
    service = lorimer.ServiceClient(base_url=installation.url, api_key=key)
    training = service.create_lora_training_client(MODEL, rank=4, seed=0)
    rest = service.create_rest_client()
    sampler = training.save_weights_and_get_sampling_client().sampling_session_id
    episode = rest.create_episode(training.model_id, "e", sampler=sampler, max_tokens=4, seed=7).result()
    addresses = [*(f"http://127.0.0.1:{port}" for port in installation.ports), installation.url]
    for number, address in enumerate(addresses):
        with openai.OpenAI(base_url=address + episode.path, api_key=key, max_retries=8) as client:
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": f"Turn {number}"}])
    installation.apis[0].kill()
    ended = rest.finish_episode(training.model_id, "e", 1.0).result()
    turns = rest.get_turns(training.model_id, "e").result()
    assert (ended.state, ended.num_turns) == ("finished", len(addresses))
    assert [(turn.number, turn.sampler) for turn in turns] == [(1, sampler), (2, sampler), (3, sampler)]
    assert all(turn.logprobs for turn in turns)
