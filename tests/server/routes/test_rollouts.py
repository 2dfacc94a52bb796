"""Rollouts over HTTP: logged once, found and read again, bounded, and private to the owner of the run."""

from dataclasses import replace

import orjson
import pytest

from lorimer.types.rollouts import LoggedRollout, RolloutsResponse, RolloutStepsResponse

pytestmark = pytest.mark.asyncio(loop_scope="session")


def rollout(step, number=0, text="yes", **fields):
    turns = [
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": text, "tokens": [7], "logprobs": [-1]},
    ]
    return {"step": step, "number": number, "turns": turns, "reward": number / 4, **fields}


async def log(client, run_id, *found):
    return await client.post(f"runs/{run_id}/rollouts", {"rollouts": list(found)})


async def test_what_was_logged_is_found_and_read(ada):
    run_id = await ada.run()
    batch = [rollout(step, number, f"answer {step}.{number}") for step in range(3) for number in range(4)]
    assert (await log(ada, run_id, *batch)).json() == {"num_stored": 12, "num_superseded": 0}
    assert (await log(ada, run_id, *batch)).json() == {"num_stored": 12, "num_superseded": 0}
    found = await ada.fetch(f"runs/{run_id}/rollouts", params={"q": "step=1", "sort": "-reward", "limit": 3})
    page = RolloutsResponse.model_validate(found)
    assert page.total_count == 4 and [one.number for one in page.rollouts] == [3, 2, 1]
    assert page.rollouts[0].content is None and page.rollouts[0].answer == "answer 1.3"
    rest = await ada.fetch(
        f"runs/{run_id}/rollouts",
        params={"q": "step=1", "sort": "-reward", "after": page.next_cursor, "content": "yes"},
    )
    assert rest["next_cursor"] is None and rest["total_count"] is None
    assert [turn["content"] for turn in rest["rollouts"][0]["content"]["turns"]] == ["Is it?", "answer 1.0"]
    one = LoggedRollout.model_validate(await ada.fetch(f"runs/{run_id}/rollouts/{page.rollouts[0].rollout_id}"))
    assert one.content.turns[1].logprobs == [-1.0] and one.training_run_id == run_id
    steps = RolloutStepsResponse.model_validate(await ada.fetch(f"runs/{run_id}/rollout_steps", params={"bins": 3}))
    assert [(step.step, step.num_rollouts, step.mean_reward) for step in steps.steps] == [
        (s, 4, 0.375) for s in range(3)
    ]
    assert steps.edges == [0, 0.25, 0.5, 0.75] and steps.counts == [3, 3, 6] and steps.num_rollouts == 12


async def test_others_get_the_same_answer_as_for_an_unknown_run(ada, bob):
    run_id = await ada.run()
    await log(ada, run_id, rollout(0))
    [one] = (await ada.fetch(f"runs/{run_id}/rollouts"))["rollouts"]
    for path in ("rollouts", "rollout_steps", f"rollouts/{one['rollout_id']}"):
        answer = await bob.get(f"runs/{run_id}/{path}")
        unknown = await bob.get(f"runs/nothing:train:0/{path}")
        assert answer.status_code == unknown.status_code == 404
        assert answer.json()["detail"].replace(run_id, "nothing:train:0") == unknown.json()["detail"]
    refused = await log(bob, run_id, rollout(0, text="mine"))
    assert refused.status_code == 404
    own = await bob.run()
    assert (await bob.get(f"runs/{own}/rollouts/{one['rollout_id']}")).status_code == 404
    assert (await ada.fetch(f"runs/{run_id}/rollouts", params={"q": "mine"}))["rollouts"] == []


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"rollouts": [{"step": 1, "turns": []}]}, 422, "rollouts[0].turns"),
        ({"rollouts": [rollout(1, reward=None) | {"rewards": 1}]}, 422, "rewards"),
        ({"rollouts": [rollout(-1)]}, 422, "rollouts[0].step"),
        ({"rollouts": [rollout(1, kind="dream")]}, 422, "rollouts[0].kind"),
        ({"rollouts": [rollout(1, group="a\nb")]}, 422, "printable"),
        ({"rollouts": [rollout(1) for _ in range(300)]}, 413, "max_rollouts_per_request"),
        ({"rollouts": [rollout(1, text="x" * 2_000_000)]}, 413, "max_rollout_bytes"),
    ],
)
async def test_refusals_name_what_is_wrong_and_change_nothing(ada, given, status, said):
    run_id = await ada.run()
    answer = await ada.post(f"runs/{run_id}/rollouts", given)
    assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text
    assert (await ada.fetch(f"runs/{run_id}/rollouts"))["total_count"] == 0


@pytest.mark.parametrize(
    "query",
    [
        {"q": "loss>1"},
        {"sort": "text"},
        {"after": "x"},
        {"limit": 1001},
        {"content": "maybe"},
        {"content": "yes", "limit": 500},
    ],
)
async def test_wrong_questions_are_refused(ada, query):
    run_id = await ada.run()
    answer = await ada.get(f"runs/{run_id}/rollouts", params=query)
    assert answer.status_code == 400 and "accepted" in answer.json()["detail"]


async def test_a_page_of_large_contents_ends_early(ada):
    run_id = await ada.run()
    for number in range(12):
        assert (await log(ada, run_id, rollout(0, number, "word " * 160_000))).status_code == 200
    found, cursor = [], None
    while True:
        query = {"content": "yes", "sort": "step"} | ({"after": cursor} if cursor else {})
        answer = await ada.get(f"runs/{run_id}/rollouts", params=query)
        page = answer.json()
        assert len(orjson.dumps(page)) < 10_000_000
        found += [one["number"] for one in page["rollouts"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == list(range(12))


async def test_a_lower_limit_thins_older_steps(server, ada):
    run_id = await ada.run()
    for step in range(8):
        await log(ada, run_id, rollout(step), rollout(step, 1))
    settings = server.context.settings
    server.context.settings = replace(settings, max_rollouts_per_run=8)
    try:
        assert (await log(ada, run_id, rollout(8))).status_code == 200
    finally:
        server.context.settings = settings
    steps = (await ada.fetch(f"runs/{run_id}/rollout_steps"))["steps"]
    assert [step["step"] for step in steps] == [0, 4, 7, 8]
