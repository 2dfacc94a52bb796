"""Engines that die while a run is on its way into them: it comes into the next, or is given up alone."""

import json

import pytest

from lorimer.engine import messages
from tests.scheduler.runs import STEPS, assert_equal_weights, submit, undisturbed

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def kill_at(crowded, monkeypatch):
    """Has the engine killed as soon as it was sent such a command about a run, so many times."""

    def arm(kind, model_id, times=1):
        left, send = [True] * times, crowded.slot.send

        def send_and_kill(command, to):
            send(command, to)
            if left and isinstance(command, kind) and command.model_id == model_id:
                left.pop()
                crowded.kill_engine()

        monkeypatch.setattr(crowded.slot, "send", send_and_kill)

    return arm


async def test_an_engine_that_dies_while_it_loads_a_run_changes_nothing(crowded, kill_at):
    user, session = await crowded.session("loading")
    expected = await undisturbed(crowded, user, session, 0)
    run = await crowded.create(user, session, 1)
    for seq_id in range(1, 8):
        accepted = await submit(crowded, user, run, seq_id)
    await crowded.done(accepted)
    assert (await crowded.park(user, run)).resume_seq == 7
    deaths = crowded.slot.num_deaths
    kill_at(messages.LoadState, run.model_id)
    for seq_id in range(8, 3 * STEPS + 1):
        accepted = await submit(crowded, user, run, seq_id)
    step = json.loads(await crowded.done(accepted))
    assert crowded.slot.num_deaths == deaths + 1
    assert step["metrics"]["optimizer_step"] == STEPS
    assert_equal_weights(await crowded.save(user, run, 3 * STEPS + 1, "end"), expected)


async def test_what_ends_every_engine_that_loads_it_is_given_up_alone(crowded, kill_at):
    user, session = await crowded.session("poisonous")
    bad, good = await crowded.create(user, session, 0), await crowded.create(user, session, 1)
    await crowded.done(await submit(crowded, user, bad, 1))
    await crowded.park(user, bad)
    kill_at(messages.LoadState, bad.model_id, times=10)
    outcome = await crowded.outcome(await submit(crowded, user, bad, 2))
    assert (outcome.state, outcome.category) == ("failed", "user")
    assert f"the engine ended 2 times while it restored {bad.model_id}" in outcome.error
    await crowded.done(await submit(crowded, user, good, 1))
