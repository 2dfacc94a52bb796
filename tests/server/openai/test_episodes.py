"""Programs with the real OpenAI client, recorded as episodes of a run, and what trainers do with the records."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

import lorimer
from tests.server.openai.conftest import TINY, TOOLED

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


class Trainer:
    """A user's run, the HTTP API around its episodes, and OpenAI clients of them."""

    def __init__(self, server, user="ada", model=TINY):
        self.url, self.key = server.url, server.keys[user]
        self.service = lorimer.ServiceClient(base_url=server.url, api_key=self.key)
        self.training = self.service.create_lora_training_client(model, rank=4, seed=0)
        self.run_id = self.training.model_id
        self.http = httpx2.Client(base_url=server.url, headers={"x-api-key": self.key}, timeout=60)

    def call(self, method, path, body=None, status=200):
        answer = self.http.request(method, f"/api/v1/runs/{self.run_id}{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def program(self, episode_id, key=None):
        base_url = f"{self.url}/v1/runs/{self.run_id}/episodes/{episode_id}"
        return openai.OpenAI(base_url=base_url, api_key=key or self.key, max_retries=0)

    def turns(self, episode_id):
        return self.call("GET", f"/episodes/{episode_id}/turns")["turns"]


@pytest.fixture(scope="module")
def trainer(server):
    made = Trainer(server)
    made.call("PUT", "/sampler", {"sampler": TINY, "max_tokens": 24})
    yield made
    made.http.close()


@pytest.fixture(scope="module")
def tokenizer(trainer):
    return trainer.training.get_tokenizer()


def ask(program, messages=QUESTION, **fields):
    return program.chat.completions.create(model="any", messages=messages, **fields)


def scored(trainer, turn):
    """The logprobs of the recorded tokens by another way: the sampler scores them as a prompt."""
    client = trainer.service.create_sampling_client(base_model=TINY)
    tokens = turn["prompt_tokens"] + turn["tokens"]
    return client.compute_logprobs(lorimer.ModelInput.from_ints(tokens)).result()[len(turn["prompt_tokens"]) :]


def test_a_conversation_is_recorded_as_sampled(trainer, tokenizer):
    program = trainer.program("talk")
    first = ask(program, seed=5)
    messages = [*QUESTION, {"role": "assistant", "content": first.choices[0].message.content}]
    second = ask(program, [*messages, {"role": "user", "content": "Sure?"}], temperature=0.5, top_p=0.9)
    turns = trainer.turns("talk")
    assert [(turn["number"], turn["choice"], turn["kind"], turn["sampler"]) for turn in turns] == [
        (1, 0, "chat", TINY),
        (2, 0, "chat", TINY),
    ]
    one, two = turns
    template = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert one["prompt_tokens"] == template
    assert tokenizer.decode(one["tokens"], skip_special_tokens=True) == first.choices[0].message.content
    assert one["stop_reason"] == first.choices[0].finish_reason == "stop"
    assert (first.model, second.model, one["seed"], two["temperature"], two["top_p"]) == (TINY, TINY, 5, 0.5, 0.9)
    assert one["logprobs"] == pytest.approx(scored(trainer, one), abs=1e-4)
    assert two["prompt_tokens"][: len(template) + len(one["tokens"])] == template + one["tokens"]
    assert one["started_at"] <= one["finished_at"] <= two["started_at"]
    episode = trainer.call("GET", "/episodes/talk")
    assert (episode["num_turns"], episode["num_tokens"], episode["state"]) == (
        2,
        sum(len(turn["tokens"]) for turn in turns),
        "open",
    )


def test_a_stream_is_recorded_before_its_last_chunk(trainer, tokenizer):
    text = ""
    for chunk in ask(trainer.program("stream"), stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            if chunk.choices[0].finish_reason:
                (turn,) = trainer.turns("stream")
    assert tokenizer.decode(turn["tokens"], skip_special_tokens=True) == text
    assert chunk.usage.completion_tokens == len(turn["tokens"]) == len(turn["logprobs"])
    whole = ask(trainer.program("whole"), seed=turn["seed"] or 0)
    assert trainer.turns("whole")[0]["prompt_tokens"] == turn["prompt_tokens"] and whole.choices


def test_several_answers_parallel_calls_and_completions(trainer, tokenizer):
    program = trainer.program("many")
    answers = ask(program, n=3).choices
    turns = trainer.turns("many")
    assert [(turn["number"], turn["choice"]) for turn in turns] == [(1, 0), (1, 1), (1, 2)]
    assert [tokenizer.decode(turn["tokens"], skip_special_tokens=True) for turn in turns] == [
        one.message.content for one in answers
    ]
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda _: ask(program).choices[0].message.content, range(6)))
    later = trainer.turns("many")[3:]
    assert sorted(turn["number"] for turn in later) == list(range(2, 8))
    assert sorted(texts) == sorted(tokenizer.decode(turn["tokens"], skip_special_tokens=True) for turn in later)
    completed = program.completions.create(model="any", prompt=["1+1=", "2+2="], max_tokens=4, n=2)
    kinds = [turn for turn in trainer.turns("many") if turn["kind"] == "completion"]
    assert [turn["choice"] for turn in kinds] == [0, 1, 2, 3]
    assert [tokenizer.decode(turn["tokens"], skip_special_tokens=True) for turn in kinds] == [
        one.text for one in completed.choices
    ]
    assert kinds[3]["prompt_tokens"] == tokenizer.encode("2+2=")


def test_the_trainer_chooses_weights_temperature_length_and_seed(trainer):
    sampler = trainer.training.save_weights_and_get_sampling_client()
    path = trainer.training.save_weights_for_sampler("named").result().path
    session_id = sampler.sampling_session_id
    chosen = {"sampler": session_id, "temperature": 0.0, "max_tokens": 1, "seed": 11, "user_metadata": {"group": 1}}
    made = trainer.call("POST", "/episodes", {"episode_id": "chosen", **chosen})
    assert made["path"] == f"/v1/runs/{trainer.run_id}/episodes/chosen" and made["user_metadata"] == {"group": 1}
    ask(trainer.program("chosen"), temperature=1.5, max_tokens=20, seed=3)
    ask(trainer.program("chosen"), max_tokens=2)
    one, two = trainer.turns("chosen")
    assert (one["sampler"], one["temperature"], len(one["tokens"])) == (session_id, 0.0, 1)
    assert len(two["tokens"]) == 1 and one["seed"] not in (None, 3, 11) and one["seed"] != two["seed"]
    trainer.call("POST", "/episodes", {"episode_id": "again", **chosen})
    ask(trainer.program("again"))
    assert trainer.turns("again")[0]["seed"] == one["seed"]
    before = trainer.call("GET", "/sampler")
    try:
        assert trainer.call("PUT", "/sampler", {"sampler": path})["sampler"] == path
        ask(trainer.program("named"), max_tokens=2)
        trainer.call("PUT", "/sampler", {"sampler": session_id})
        ask(trainer.program("named"), max_tokens=2)
    finally:
        trainer.call("PUT", "/sampler", {name: before[name] for name in ("sampler", "temperature", "max_tokens")})
    assert [turn["sampler"] for turn in trainer.turns("named")] == [path, session_id]
    assert [model.id for model in trainer.program("named").models.list()] == [TINY]


def test_tools_are_called_and_forced_calls_are_marked(server):
    trainer = Trainer(server, model=TOOLED)
    trainer.call("PUT", "/sampler", {"sampler": TOOLED})
    forced = ask(trainer.program("tools"), tools=[ADD], tool_choice="required", max_tokens=60, temperature=0)
    ask(trainer.program("tools"), tools=[ADD], max_tokens=4)
    constrained, free = trainer.turns("tools")
    assert (constrained["is_constrained"], free["is_constrained"]) == (True, False)
    call = forced.choices[0].message.tool_calls
    assert forced.choices[0].finish_reason == "length" or json.loads(call[0].function.arguments)["a"] is not None
    trainer.http.close()


def test_episodes_end_by_a_reward_at_either_address(trainer):
    ask(trainer.program("won"))
    won = {"reward": 0.5, "reward_parts": {"right": 1, "short": -0.5}, "user_metadata": {"why": "short"}}
    ended = trainer.call("POST", "/episodes/won/finish", won)
    assert (ended["state"], ended["reward"], ended["reward_parts"]) == ("finished", 0.5, {"right": 1.0, "short": -0.5})
    with pytest.raises(openai.APIStatusError, match="'won' is finished") as refused:
        ask(trainer.program("won"))
    assert refused.value.status_code == 410
    ask(trainer.program("lost"))
    answer = trainer.http.post(f"/v1/runs/{trainer.run_id}/episodes/lost/finish", json={"error": "it broke"})
    assert answer.json()["state"] == "failed"
    listed = trainer.call("GET", "/episodes?state=failed")["episodes"]
    assert [(one["episode_id"], one["error"]) for one in listed] == [("lost", "it broke")]
    trainer.call("DELETE", "/episodes/lost", status=204)
    trainer.call("GET", "/episodes/lost", status=404)


def test_the_header_names_the_episode(trainer):
    client = openai.OpenAI(base_url=f"{trainer.url}/v1/runs/{trainer.run_id}", api_key=trainer.key, max_retries=0)
    ask(client, extra_headers={"X-Lorimer-Episode": "by-header"})
    assert len(trainer.turns("by-header")) == 1
    with pytest.raises(openai.BadRequestError, match="the request names no episode"):
        ask(client)


REFUSED = {
    "episode": ("bad%20id", {}, 400, "the episode is 'bad id'"),
    "parameter": ("bad", {"extra_body": {"min_p": 0.5}}, 400, "min_p"),
    "context": ("bad", {"messages": [{"role": "user", "content": "a b" * 2000}]}, 400, "context length"),
    "image": (
        "bad",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        400,
        "images are not recorded",
    ),
}


@pytest.mark.parametrize(("episode_id", "fields", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_requests_make_no_episode(trainer, episode_id, fields, status, message):
    with pytest.raises(openai.APIStatusError, match=message) as refused:
        ask(trainer.program(episode_id), **{"messages": QUESTION, **fields})
    assert refused.value.status_code == status
    assert "bad" not in [one["episode_id"] for one in trainer.call("GET", "/episodes?limit=1000")["episodes"]]


BAD_CALLS = {
    "no such sampler": ("PUT", "/sampler", {"sampler": "x:sample:0"}, 404),
    "another base model": ("PUT", "/sampler", {"sampler": TOOLED}, 404),
    "no such path": ("PUT", "/sampler", {"sampler": "tinker://x/weights/y"}, 404),
    "episode id": ("POST", "/episodes", {"episode_id": "a/b"}, 422),
    "temperature": ("POST", "/episodes", {"temperature": -1}, 422),
    "both ends": ("POST", "/episodes/talk/finish", {"reward": 1, "error": "x"}, 422),
    "no end": ("POST", "/episodes/talk/finish", {}, 422),
    "no episode": ("POST", "/episodes/nobody/finish", {"reward": 1}, 404),
    "state": ("GET", "/episodes?state=good", None, 400),
    "limit": ("GET", "/episodes/talk/turns?limit=0", None, 400),
}


@pytest.mark.parametrize(("method", "path", "body", "status"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_invalid_calls_of_trainers_are_refused(trainer, method, path, body, status):
    ask(trainer.program("talk"), max_tokens=1)
    assert trainer.call(method, path, body, status)["detail"]


def test_a_run_without_sampler_says_so_and_others_see_nothing(server, trainer):
    other = Trainer(server, "bob")
    with pytest.raises(openai.BadRequestError, match="has no sampler yet"):
        ask(other.program("e"))
    other.call("GET", "/sampler", status=400)
    with pytest.raises(openai.NotFoundError, match="no training run"):
        ask(trainer.program("talk", key=other.key))
    for method, path in (("GET", "/episodes"), ("GET", "/episodes/talk/turns"), ("DELETE", "/episodes/talk")):
        answer = other.http.request(method, f"/api/v1/runs/{trainer.run_id}{path}")
        assert answer.status_code == 404
    other.http.close()


def test_a_turn_whose_episode_ended_meanwhile_is_an_error(trainer):
    stream = ask(
        trainer.program("raced"), [{"role": "user", "content": "Tell me a story."}], stream=True, max_tokens=24
    )
    events = iter(stream)
    next(events)
    trainer.call("POST", "/episodes/raced/finish", {"reward": 0})
    try:
        finished = [chunk.choices[0].finish_reason for chunk in events]
    except openai.APIError as error:
        assert "'raced' is finished" in str(error)
        assert trainer.turns("raced") == []
    else:  # it had been recorded before the episode ended
        assert finished[-1] and len(trainer.turns("raced")) == 1
