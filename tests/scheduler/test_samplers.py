"""More samplers than the engine holds: the least recently used leaves, and is loaded again when it is asked for."""

import pytest

from lorimer.engine import messages
from lorimer.store import weights
from lorimer.types.encoding import decode_sample_response

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_least_recently_used_sampler_leaves_and_comes_back_the_same(crowded, monkeypatch):
    user, session = await crowded.session("sampling")
    run = await crowded.create(user, session)
    samplers = []
    for number in range(3):  # of different weights
        await crowded.done(await crowded.train(user, run, 3 * number + 1, shift=number))
        await crowded.done(await crowded.step(user, run, 3 * number + 2))
        await crowded.done(await crowded.scheduler.save_ephemeral(user, run, 3 * number + 3, number))
        samplers.append(await crowded.sampler(session, number))
    commands, send = [], crowded.slot.send

    def recording(command, to):
        if isinstance(command, messages.LoadSampler | messages.DropSampler):
            commands.append((type(command).__name__, command.sampler_id))
        send(command, to)

    monkeypatch.setattr(crowded.slot, "send", recording)
    seq_ids = iter(range(100))

    async def tokens(number):
        sampler = samplers[number]
        accepted = await crowded.sample(user, sampler, next(seq_ids), seed=3, max_tokens=8)
        response = decode_sample_response(await crowded.done(accepted), accepted.sample_sequence_ids)
        return [(list(one.tokens), list(one.logprobs)) for one in response.sequences]

    names = [(await crowded.store.read(weights.get_weights, sampler.weights_id)).name for sampler in samplers]
    frozen = [await tokens(2), await tokens(1)]  # these two the engine has frozen itself; 1 was used last
    assert commands == []
    other = await tokens(0)
    assert commands == [("DropSampler", names[2]), ("LoadSampler", names[0])]
    assert await tokens(1) == frozen[1]
    assert len(commands) == 2
    again = await tokens(2)
    assert commands[2:] == [("DropSampler", names[0]), ("LoadSampler", names[2])]
    assert [sequence for sequence, _ in again] == [sequence for sequence, _ in frozen[0]]
    assert again[0][1] == pytest.approx(frozen[0][0][1], abs=1e-6)
    assert other[0][1] != pytest.approx(frozen[1][0][1], abs=1e-3)
    assert len(crowded.core.sampling.samplers) == 2


async def test_samplers_in_use_stay_although_there_are_too_many(crowded):
    user, session = await crowded.session("together")
    run = await crowded.create(user, session)
    for number in range(4):
        await crowded.done(await crowded.scheduler.save_ephemeral(user, run, number + 1, number))
    samplers = [await crowded.sampler(session, number) for number in range(4)]
    accepted = [await crowded.sample(user, each, 0, seed=1, max_tokens=60) for each in samplers]
    results = [decode_sample_response(await crowded.done(each), each.sample_sequence_ids) for each in accepted]
    assert len({tuple(result.sequences[0].tokens) for result in results}) == 1  # their weights are the same
    await crowded.done(await crowded.scheduler.save_ephemeral(user, run, 5, 4))
    assert len(crowded.core.sampling.samplers) == 2
