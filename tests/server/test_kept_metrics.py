"""Metrics survive the death of the server: what a client was given or has reported is there afterwards."""

import pytest


async def read(client, run_id):
    found = await client.fetch(f"training_runs/{run_id}/metrics")
    return {f"{one['source']}/{one['name']}": one["points"] for one in found["series"]}


async def test_a_killed_server_comes_back_with_all_metrics_and_counts_on(serve):
    async with serve(snapshot_seconds=600) as (_, client):
        run_id = await client.run()
        losses = []
        for step in range(3):
            losses.append((await client.train(run_id, 2 * step + 1)).loss)
            await client.step(run_id, 2 * step + 2)
        await client.ok(f"training_runs/{run_id}/metrics", {"points": [{"step": 0, "values": {"reward": 1.5}}]})
        before = await read(client, run_id)
    async with serve(snapshot_seconds=600) as (_, client):
        assert await read(client, run_id) == before
        assert [(step, value) for step, _, value in before["engine/loss:sum"]] == list(enumerate(losses))
        losses.append((await client.train(run_id, 7)).loss)  # the six before it are computed again, and not told again
        await client.step(run_id, 8)
        after = await read(client, run_id)
    assert [value for _, _, value in after["engine/loss:sum"]] == losses
    assert [step for step, _, _ in after["engine/grad_norm"]] == [0, 1, 2, 3]
    assert after["client/reward"] == before["client/reward"]
    assert losses[3] == pytest.approx(min(losses)), "the run went on where it was"
