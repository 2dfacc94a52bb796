"""Which runs an engine holds when there are more than it has room for."""

from tests.scheduler.service import service


async def test_a_run_keeps_its_place_between_two_steps_and_leaves_when_its_client_does(tmp_path):
    async with service(tmp_path / "data", max_loaded_runs=1) as opened:
        user, session = await opened.session()
        busy, other = [await opened.create(user, session, number) for number in range(2)]
        await opened.done(await opened.train(user, busy, 1))
        waiting = await opened.train(user, other, 1)
        for seq_id in range(2, 12):
            await opened.done(await opened.train(user, busy, seq_id))
            assert (await opened.outcome(waiting, timeout=0)).state == "pending"
        await opened.done(waiting)
        assert [state.phase for state in opened.training.runs.values() if state.model_id == other.model_id] == [
            "loaded"
        ]
