"""What `/metrics` says of requests that are not answered yet."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lorimer import types
from tests.server.routes.conftest import TOKENS, datum

pytestmark = pytest.mark.asyncio(loop_scope="session")

NOTHING: dict[str, dict[str, float]] = {"requests": {}, "tokens": {}}


async def queued(client, user):
    """Requests and tokens of a user by kind."""
    text = (await client.http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {
        what: {
            sample.labels["kind"]: sample.value
            for sample in families[f"lorimer_queued_{what}"].samples
            if sample.labels["user"] == user
        }
        for what in ("requests", "tokens")
    }


async def until_nothing_waits(client, user):
    """Earlier tests of the same server may have left samples to be drawn."""
    async with asyncio.timeout(60):
        while await queued(client, user) != NOTHING:
            await asyncio.sleep(0.05)


async def test_requests_and_tokens_are_shown_by_user_and_kind(server):
    ada, bob = server.ada, server.bob
    model_id = await ada.run()
    requests = [
        types.TrainingRequest(model_id, seq_id, [datum(), datum()], "cross_entropy", {}, seq_id == 3)
        for seq_id in (1, 2, 3)
    ]
    body = {"model_id": model_id, "seq_id": 4, "adam_params": {"learning_rate": 0.01}}
    await until_nothing_waits(ada, "ada")
    await until_nothing_waits(bob, "bob")
    promises = [await ada.submit(request) for request in requests[1:]] + [await ada.ok("optim_step", body)]
    # They wait for number 1.
    found = await queued(ada, "ada")
    for kind, tokens in {"forward_backward": 2 * len(TOKENS), "forward": 2 * len(TOKENS), "optim_step": 0}.items():
        assert found["requests"][kind] == 1
        assert found["tokens"][kind] == tokens
    assert await queued(bob, "bob") == NOTHING
    assert model_id not in (await ada.http.get("/metrics")).text
    for promise in [await ada.submit(requests[0]), *promises]:
        await ada.result(promise)
    assert await queued(ada, "ada") == NOTHING
