"""A disk that answers with errors: writes are refused with a sentence, and what was acknowledged before stays.

The system's answers are replaced by strace; where that may not trace, this is skipped.
"""

import os
import shutil
import sqlite3
import subprocess
import sys

import pytest

from lorimer.store import Store, futures

WRITE_UNTIL_REFUSED = """
import sys
from lorimer.errors import StorageError
from lorimer.store import Store, futures

store = Store.open(None, sys.argv[1], durability="power")
refused = 0
for seq_id in range(400):
    try:
        store.write_now(futures.accept, user_id="u", session_id=None, kind="sample", lane="lane", seq_id=seq_id,
                        payload=bytes(2000), tokens=1)
    except StorageError as error:
        refused += 1
        print("refused", error, flush=True)
        if refused == 3:
            break
    else:
        print(seq_id, flush=True)
"""
FAULTS = {
    "the disk fails to sync": ("fdatasync,fsync", "EIO", 40),
    "the disk fails to write": ("pwrite64", "EIO", 800),
    "the disk is full": ("pwrite64", "ENOSPC", 800),
}
"""Which calls of the system are answered how, from which on."""


@pytest.mark.parametrize(("calls", "answer", "first"), FAULTS.values(), ids=FAULTS)
def test_writes_that_the_system_refuses_are_refused_and_the_others_stay(tmp_path, calls, answer, first):
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:error={answer}:when={first}+"]
    line = ["strace", "-f", "-qq", "-o", os.devnull, *inject, sys.executable, "-c", WRITE_UNTIL_REFUSED]
    done = subprocess.run([*line, str(tmp_path / "data")], capture_output=True, text=True, timeout=120)
    if "PTRACE" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("strace may not trace here")
    lines = done.stdout.splitlines()
    refused = [line for line in lines if line.startswith("refused")]
    acknowledged = {int(line) for line in lines if not line.startswith("refused")}
    assert len(refused) == 3, done.stderr
    assert acknowledged, "some were written before"
    assert all(len(line) > len("refused ") + 10 for line in refused), refused
    if answer == "ENOSPC":
        assert "full" in refused[0]
    store = Store.open(None, tmp_path / "data")
    rows = {row.seq_id for row in store.read_now(futures.journal, "lane", -1)}
    store.close()
    assert rows >= acknowledged, "nothing that was acknowledged is lost"
    with sqlite3.connect(tmp_path / "data" / "lorimer.db") as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    database.close()
