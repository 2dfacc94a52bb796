"""A server that is killed comes back with everything: losses that users uploaded, who has finished what, runs of models
that it does not serve today; and all of it is in one directory that can be copied elsewhere."""

import shutil

import numpy as np
import pytest

from lorimer.types import TrainingRequest
from tests.server.routes.conftest import LOSS, MODEL, Client, datum, sample_body

WEIGHTS = np.array([1.0, -0.5, 0.0, 2.0, 0.25], np.float32)
DATA = [datum(), datum(target_tokens=np.array([5, 6, 7, 8, 9], np.int64), weights=WEIGHTS)]
LONG = {"num_samples": 8, "sampling_params": {"max_tokens": 400, "stop": []}}


async def test_the_death_of_an_engine_is_part_of_the_run(serve):
    """The engine is stopped, gets an operation, and is killed before it can answer."""
    async with serve(snapshot_seconds=600) as (server, client):
        run_id = await client.run()
        await client.train(run_id, 1)
        await client.step(run_id, 2)
        assert (await client.fetch(f"runs/{run_id}"))["engine_deaths"] == []
        (engine,) = server.engines()
        engine.suspend()
        promise = await client.submit(TrainingRequest(run_id, 3, DATA, "cross_entropy"))
        # The driver has sent the first to the engine when it has accepted the second.
        await client.submit(TrainingRequest(run_id, 4, DATA, "cross_entropy"))
        engine.kill()
        await client.poll(promise["request_id"], "application/x-protobuf")
        (death,) = (await client.fetch(f"runs/{run_id}"))["engine_deaths"]
        assert death["time"] and death["training_run_id"] == run_id
        assert (death["kind"], death["step"], death["num_deaths"]) == ("forward_backward", 1, 1)


async def test_a_killed_server_comes_back_with_everything_elsewhere_too(serve, model, tmp_path):
    async with serve(snapshot_seconds=600) as (server, client):
        losses, poller = UploadedLoss(client), Poller(client)
        await losses.before()
        server.engines()[0].kill()
        await losses.after_the_engine()
        await poller.before()
    async with serve(models=f"other/name={model}", start_engines="lazy") as (_, client):
        await refuse_another_models_run(client, losses.run_id, poller.sampler_id)
    shutil.copytree(tmp_path / "place", tmp_path / "elsewhere", ignore=shutil.ignore_patterns("control"))
    async with serve("elsewhere", snapshot_seconds=600) as (_, client):
        await losses.after_the_server(client)
        await poller.after(client)


async def refuse_another_models_run(client: Client, run_id: str, sampler_id: str) -> None:
    """Runs of a model that is not served wait; they are neither lost nor in the way."""
    for path, body in (
        ("optim_step", {"model_id": run_id, "seq_id": 4, "adam_params": {}}),
        ("asample", sample_body(sampler_id, 9)),
    ):
        answer = await client.post(path, body)
        assert answer.status_code == 404, answer.text
        assert MODEL in answer.json()["detail"] and "other/name" in answer.json()["detail"]
    assert (await client.fetch(f"training_runs/{run_id}"))["base_model"] == MODEL


class UploadedLoss:
    """A run trained by a loss of its user's, beside one trained by the same loss of ours."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def before(self) -> None:
        client, session_id = self.client, await self.client.session()
        self.run_id, self.twin = await client.run(session_id), await client.run(session_id, 1)
        upload = {"session_id": session_id, "custom_loss_seq_id": 0, **LOSS}
        loss_id = (await client.result(await client.ok("create_custom_loss", upload)))["loss_id"]
        self.custom = {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}, "data": DATA}
        self.first = await client.train(self.run_id, 1, **self.custom)
        assert self.first.loss == pytest.approx((await client.train(self.twin, 1, data=DATA)).loss, rel=1e-6)
        for each in (self.run_id, self.twin):
            await client.step(each, 2)

    async def after_the_engine(self) -> None:
        """The new engine is told of the loss, repeats the first operation with it, and goes on."""
        client = self.client
        self.second = await client.train(self.run_id, 3, **self.custom)
        assert self.second.loss == pytest.approx((await client.train(self.twin, 3, data=DATA)).loss, rel=1e-5)
        assert self.second.loss != pytest.approx(self.first.loss, rel=1e-3), "the step before the kill counts"

    async def after_the_server(self, client: Client) -> None:
        """The new server has stored the loss, and the gradient from before; number 4 was refused and used up."""
        assert (await client.step(self.run_id, 5))["metrics"]["optimizer_step"] == 2
        assert (await client.step(self.twin, 4))["metrics"]["optimizer_step"] == 2
        np.testing.assert_allclose(
            await client.logprobs(self.run_id, 6), await client.logprobs(self.twin, 5), atol=1e-5
        )
        third = await client.train(self.run_id, 7, **self.custom)
        assert third.loss < self.second.loss
        assert third.metrics["custom/likelihood:sum"] == pytest.approx(-third.loss, rel=1e-6)


class Poller:
    """A client that asks for all its samples together, and keeps its cursor; what it has not fetched is named to it."""

    def __init__(self, client: Client) -> None:
        self.client, self.cursor = client, 0

    async def completions(self, **fields: object) -> dict[str, str]:
        target = {"type": "sampling_session", "sampling_session_id": self.sampler_id, "cloned_sampler_id": 0}
        body = {"target": target, "prev_cursor": self.cursor, **fields}
        answer = await self.client.ok("retrieve_futures", body)
        assert answer["cursor"] >= self.cursor
        self.cursor = answer["cursor"]
        return {one["request_id"]: one["state"] for one in answer["completions"]}

    async def submit(self, number: int, **fields: object) -> dict:
        return await self.client.ok("asample", sample_body(self.sampler_id, number, **fields))

    async def before(self) -> None:
        self.sampler_id = await self.client.sampler(await self.client.session())
        self.seen = [await self.submit(number) for number in range(3)]
        named: dict[str, str] = {}
        while len(named) < 3:
            named |= await self.completions()
        self.fetched = await self.client.result(self.seen[0])
        self.unseen = await self.submit(3)
        await self.client.result(self.unseen)
        self.running = await self.submit(4, **LONG)

    async def after(self, client: Client) -> None:
        self.client = client
        named: dict[str, str] = {}
        later = await self.submit(5)
        while not {promise["request_id"] for promise in (self.running, later)} <= named.keys():
            found = await self.completions()
            assert found, "held until there was something to say"
            named |= found
        assert set(named.values()) == {"finished"}
        assert len((await client.result(self.running))["sequences"]) == 8
        assert await client.result(self.seen[0]) == self.fetched, "what was fetched can be fetched again"
        assert (await client.result(self.seen[1]))["sequences"]
        again = await self.submit(4, **LONG)
        assert again["request_id"] == self.running["request_id"], "a retry after the restart finds the first"
        ids = [promise["request_id"] for promise in (*self.seen, self.unseen, self.running, later)]
        assert await self.completions(timeout=0, retrieved_request_ids=ids) == {}
        assert [(await client.poll(request_id)).status_code for request_id in ids] == [410] * 6, "all freed"
