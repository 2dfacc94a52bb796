"""Rollouts in the SDK: logged beside training in requests of bounded size, numbered, and found; HTTP and embedded."""

import pytest

import lorimer
from lorimer import types
from lorimer.client import rollouts as client_rollouts
from lorimer.errors import InvalidInput

ASKED = {"role": "user", "content": "2 + 2"}


@pytest.fixture(scope="module")
def service(either_service):
    return either_service


@pytest.fixture
def rest(service):
    return service.create_rest_client()


def rollout(text, **fields):
    return {"turns": [ASKED, {"role": "assistant", "content": text}], **fields}


def test_rollouts_and_samples_are_logged_and_found(trainer, rest):
    turns = [types.RolloutTurn(**ASKED), types.RolloutTurn(role="assistant", content="4", tokens=[9], logprobs=[-0.5])]
    graded = types.Rollout(step=0, turns=turns, reward=1.0, group="a")
    assert trainer.log_rollouts([graded, rollout("5", group="a", reward=0)], 3).result().num_stored == 2
    assert trainer.log_rollouts([rollout("6", group="a", reward=0.25)], 3).result().num_stored == 1
    trainer.log_samples([rollout("four"), rollout("fourth", split="other")], 3).result()
    found = rest.list_rollouts(trainer.model_id, "step=3", sort="step", content=True).result()
    assert found.total_count == 5
    assert [(one.kind, one.split, one.group, one.number, one.answer) for one in found.rollouts] == [
        ("rollout", "train", "a", 0, "4"),
        ("rollout", "train", "a", 1, "5"),
        ("rollout", "train", "a", 2, "6"),
        ("sample", "test", "", 0, "four"),
        ("sample", "other", "", 0, "fourth"),
    ]
    assert found.rollouts[0].content.turns[1].logprobs == [-0.5]
    one = rest.get_rollout(trainer.model_id, found.rollouts[0].rollout_id).result()
    assert one == found.rollouts[0]
    steps = rest.list_rollout_steps(trainer.model_id, "kind=rollout", bins=2).result()
    assert (steps.edges, steps.counts) == ([0.0, 0.5, 1.0], [2, 1])


async def test_many_are_sent_in_parts_and_coroutines_do_the_same(trainer, rest, monkeypatch):
    monkeypatch.setattr(client_rollouts, "MAX_ROLLOUTS", 7)
    sent = await trainer.log_rollouts_async([rollout(str(number)) for number in range(30)], 0)
    assert (await sent).num_stored == 30
    assert (await (await trainer.log_samples_async([rollout("x")], 1))).num_stored == 1
    page = await rest.list_rollouts_async(trainer.model_id, "kind=rollout", sort="step", limit=20)
    rest_of = await rest.list_rollouts_async(trainer.model_id, "kind=rollout", sort="step", after=page.next_cursor)
    assert [int(one.answer) for one in page.rollouts + rest_of.rollouts] == list(range(30))
    assert (await rest.get_rollout_async(trainer.model_id, page.rollouts[3].rollout_id)).answer == "3"
    assert [one.step for one in (await rest.list_rollout_steps_async(trainer.model_id)).steps] == [0, 1]


def test_requests_are_bounded_by_size():
    large = [types.Rollout(step=0, turns=[types.RolloutTurn(role="assistant", content="x" * 1_500_000)])] * 5
    assert [len(some) for some in client_rollouts.parted(large)] == [2, 2, 1]
    assert list(client_rollouts.parted([])) == []


def test_a_resumed_program_replaces_what_it_logs_again(service, rest):
    for steps, first in (((0, 1, 2), None), ((1, 2, 3), 1)):
        trainer = service.create_lora_training_client("lorimer/debug", rank=1, run_key="again", first_step=first)
        for step in steps:
            trainer.log_rollouts([rollout(f"{step} from {first}"), rollout("same")], step).result()
    found = rest.list_rollouts(trainer.model_id, sort="step").result().rollouts
    assert [one.answer for one in found if one.answer != "same"] == ["0 from None", "1 from 1", "2 from 1", "3 from 1"]
    assert len(found) == 8
    assert rest.log_samples(found[0].training_run_id, [rollout("later")], 3).result().num_stored == 1
    assert rest.log_rollouts(trainer.model_id, [rollout("other", number=5)], 3).result().num_superseded == 0
    assert rest.list_rollouts(trainer.model_id, "later kind=sample").result().total_count == 1


def test_refusals_name_what_is_wrong(trainer, rest):
    with pytest.raises(InvalidInput, match=r"rollouts\[1\]\.reward"):
        trainer.log_rollouts([rollout("a"), rollout("b", reward=float("nan"))], 1)
    with pytest.raises(InvalidInput, match=r"rollouts\[0\]\.step"):
        trainer.log_rollouts([rollout("a")])
    with pytest.raises(InvalidInput, match="text"):
        trainer.log_rollouts([{"text": "a"}], 1)
    with pytest.raises(lorimer.NotFoundError):
        rest.list_rollouts("nothing:train:0").result()
    with pytest.raises(lorimer.NotFoundError):
        rest.get_rollout(trainer.model_id, 10**12).result()
    with pytest.raises(lorimer.BadRequestError, match="accepted are"):
        rest.list_rollouts(trainer.model_id, "loss<3").result()
    assert rest.list_rollouts(trainer.model_id).result().total_count == 0
