"""A process killed with SIGKILL while it writes: what it was told is stored is there, and nothing half."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from lorimer.store import DataDirectory, Store, futures
from lorimer.store.retention import known_names

WRITE_FOR_EVER = """
import asyncio, sys
from lorimer.store import Store, futures

async def main(url, directory):
    store = Store.open(url or None, directory)
    async def accept(seq_id):
        payload = seq_id.to_bytes(8, "big") * (40_000 if seq_id % 7 == 0 else 1)
        row, _ = await store.write(futures.accept, user_id="u", session_id=None, kind="sample", lane="lane",
                                   seq_id=seq_id, payload=payload, tokens=1)
        if seq_id % 2:
            await store.write(futures.finish, row.request_id, result=payload, result_format="json")
        print(seq_id, flush=True)
    for start in range(0, 10**9, 16):
        await asyncio.gather(*map(accept, range(start, start + 16)))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("num_acknowledged", [1, 40, 300])
def test_what_was_acknowledged_before_a_kill_is_there(database, tmp_path, num_acknowledged):
    directory = tmp_path / "data"
    line = [sys.executable, "-c", WRITE_FOR_EVER, database or "", str(directory)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, env=dict(os.environ)) as writer:
        acknowledged = [int(writer.stdout.readline()) for _ in range(num_acknowledged)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout if line.endswith(b"\n")]

    store = Store.open(database, directory)
    DataDirectory(directory).sweep_orphans(store.read_now(known_names))
    rows: dict[Any, futures.FutureRow] = {row.seq_id: row for row in store.read_now(futures.journal, "lane", -1)}
    assert rows.keys() >= set(acknowledged)
    for seq_id, row in rows.items():
        payload = seq_id.to_bytes(8, "big") * (40_000 if seq_id % 7 == 0 else 1)
        assert store.read_now(futures.payload, row.request_id) == payload
        if seq_id % 2 and seq_id in acknowledged:
            assert row.state == "done"
        if row.state == "done":
            assert store.read_now(futures.result, row.request_id) == payload
    assert set(os.listdir(directory / "blobs")) == store.read_now(known_names)
    store.close()
