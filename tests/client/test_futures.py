import asyncio
import gc
from concurrent.futures import Future

import pytest

from lorimer.client.futures import AwaitableConcurrentFuture


async def test_a_failure_after_its_waiter_gave_up_is_not_reported_as_never_retrieved(caplog):
    work: Future[int] = Future()
    waiter = asyncio.create_task(AwaitableConcurrentFuture(work).result_async())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    work.set_exception(ConnectionError("the server went away"))
    await asyncio.sleep(0.01)  # the failure reaches the loop by a callback
    del work, waiter
    gc.collect()
    # Sessions of other tests may log failed heartbeats meanwhile.
    assert not [record for record in caplog.records if not record.name.startswith("tinker")]


async def test_who_waits_for_a_failure_gets_it():
    work: Future[int] = Future()
    asyncio.get_running_loop().call_later(0.01, work.set_exception, ConnectionError("the server went away"))
    with pytest.raises(ConnectionError, match="went away"):
        await AwaitableConcurrentFuture(work)
