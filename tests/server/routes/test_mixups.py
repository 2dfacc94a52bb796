"""Mistakes that servers of this kind have made: weights that get mixed up, replaced or rolled back."""

from dataclasses import replace

import numpy as np
import pytest

from .conftest import MODEL, TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [*TOKENS, 60, 70, 80]}]}


async def scores(client, sampler_id, seq_id):
    fields = {"prompt": PROMPT, "prompt_logprobs": True, "sampling_params": {"max_tokens": 1}}
    found = (await client.sample(sampler_id, seq_id, **fields)).prompt_logprobs
    return [value for value in found if value is not None]


async def test_many_samplers_with_room_for_two_keep_their_weights(server, ada, monkeypatch):
    """Sampling what was put out of memory is slower, never an error or other weights; training goes on untouched."""
    core = server.context.scheduler.owner.drivers[f"{MODEL}#0"].core
    monkeypatch.setattr(core, "limits", replace(core.limits, max_loaded_samplers=2))
    run_id = await ada.run()
    samplers, first = [], []
    for number in range(5):
        await ada.train(run_id, 3 * number + 1)
        await ada.step(run_id, 3 * number + 2, learning_rate=0.05)
        body = {"model_id": run_id, "seq_id": 3 * number + 3, "sampling_session_seq_id": number}
        saved = await ada.result(await ada.ok("save_weights_for_sampler", body))
        samplers.append(saved["sampling_session_id"])
        first.append(await scores(ada, samplers[-1], 0))
    trained = await ada.logprobs(run_id, 16)
    assert len({round(sum(found), 3) for found in first}) == 5, "each step changed something"
    for seq_id in (1, 2):
        for sampler_id, expected in zip(samplers, first, strict=True):
            assert await scores(ada, sampler_id, seq_id) == pytest.approx(expected, abs=1e-5)
    np.testing.assert_array_equal(await ada.logprobs(run_id, 17), trained)
    await ada.train(run_id, 18)
    assert (await ada.step(run_id, 19))["metrics"]["optimizer_step"] == 6, "sampling the old rolled nothing back"


async def test_saves_for_training_and_sampling_share_no_names(ada):
    run_id = await ada.run()
    await ada.train(run_id, 1)
    await ada.step(run_id, 2, learning_rate=0.05)
    state = await ada.save(run_id, 3, "latest")
    now = await ada.logprobs(run_id, 4)
    await ada.train(run_id, 5)
    await ada.step(run_id, 6, learning_rate=0.05)
    sampler = await ada.save(run_id, 7, "latest", "save_weights_for_sampler")
    export = await ada.save(run_id, 8, "latest", "save_weights_external")
    assert len({state, sampler, export}) == 3
    listed = (await ada.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"]
    assert {one["tinker_path"] for one in listed} == {state, sampler, export}
    load = {"model_id": run_id, "seq_id": 9, "path": state, "optimizer": True}
    await ada.result(await ada.ok("load_weights", load))
    np.testing.assert_allclose(await ada.logprobs(run_id, 10), now, atol=1e-6)
    assert (await ada.step(run_id, 11))["metrics"]["optimizer_step"] == 2
