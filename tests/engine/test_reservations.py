"""Memory that engines reserve: nobody counts on it twice, and it is free again when its process ends, however."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lorimer.engine import reservations
from lorimer.engine.reservations import reserve, reserved_bytes
from lorimer.errors import EngineError, TooLarge

GIB = 2**30
HOLDER = """
import sys, time
from lorimer.engine.reservations import reserve
kept = reserve("gpu", outstanding=int(sys.argv[1]))
block = reserve("cpu", loading=1 << 30)
taken = bytearray(b"x") * (256 << 20)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_what_another_process_reserves_is_not_free_until_it_dies(place):
    command = [sys.executable, "-c", HOLDER, str(5 * GIB)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            with pytest.raises(TooLarge, match=r"^a run needs 5\.2 GiB, 3\.1 GiB free$"):
                reserve("gpu", outstanding=int(5.2 * GIB), what="a run", free=lambda: int(8.1 * GIB))
            # What a loading process has taken shows as used, and is not subtracted again.
            assert 0.7 * GIB < reserved_bytes() < 0.76 * GIB
        finally:
            process.send_signal(signal.SIGKILL)
    assert (reserved_bytes("gpu"), reserved_bytes()) == (0, 0)
    assert [path.name for path in next(place.glob("lorimer-memory-*")).iterdir()] == ["lock"]


def test_of_those_that_ask_together_as_many_get_it_as_fit():
    found, refused, start = [], [], threading.Barrier(12)

    def ask():
        start.wait()
        try:
            found.append(reserve("gpu", outstanding=3, what="one", free=lambda: 11))
        except TooLarge as error:
            refused.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(refused)) == (3, 9)
    for one in found:
        one.close()
    assert reserved_bytes("gpu") == 0


def test_more_is_taken_only_beside_all_that_is_reserved():
    first, second = reserve("gpu", outstanding=6), reserve("gpu", outstanding=2)
    with pytest.raises(TooLarge, match="a copy needs"), second.taking("a copy", 3, lambda: 10):
        raise AssertionError("the block is not entered")
    with second.taking("a copy", 2, lambda: 10):
        assert reserved_bytes("gpu") == 10
    assert (reserved_bytes("gpu"), second.outstanding) == (8, 2)
    first.set_outstanding(0)
    assert reserved_bytes("gpu") == 2


def test_a_directory_of_somebody_else_is_refused(place):
    (place / f"lorimer-memory-{os.getuid()}").symlink_to(place)
    with pytest.raises(EngineError, match="that only this user can write"):
        reserved_bytes()


class Ledger(RuleBasedStateMachine):
    """Any order of reserving, taking and ending leaves exactly the sum of what is held."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.device = f"model-{os.urandom(8).hex()}"
        self.model = {}

    @rule(target=held, size=st.integers(0, 8), free=st.integers(0, 30))
    def reserve(self, size, free):
        before = sum(self.model.values())
        try:
            made = reserve(self.device, outstanding=size, what="it", free=lambda: free)
        except TooLarge:
            assert before + size > free
            made = reserve(self.device)
            size = 0
        else:
            assert before + size <= free
        self.model[made] = size
        return made

    @rule(one=held, size=st.integers(0, 8))
    def change(self, one, size):
        one.set_outstanding(size)
        self.model[one] = size

    @rule(one=consumes(held))
    def end(self, one):
        one.close()
        del self.model[one]

    @invariant()
    def adds_up(self):
        assert reservations.reserved_bytes(self.device) == sum(self.model.values())


Ledger.TestCase.settings = hypothesis_settings(max_examples=15, stateful_step_count=15, deadline=None)
TestLedger = Ledger.TestCase
