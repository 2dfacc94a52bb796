"""Engines that are forked: the same as those started alone, but for who their parent is."""

import os
import signal
import socket
import time

import psutil
import pytest

from lorimer.engine import fork_server
from lorimer.engine.fork_server import ForkServer
from lorimer.engine.launch import engine_environment
from lorimer.engine.messages import GetStatus
from lorimer.engine.process import EngineProcess
from tests.engine.operations import settings

pytestmark = pytest.mark.skipif(not fork_server.is_usable(), reason="engines are forked on Linux without a GPU only")
PATIENCE = 120


@pytest.fixture
def forks(monkeypatch):
    server = ForkServer(engine_environment())
    monkeypatch.setenv(fork_server.VARIABLE, server.address)
    yield server
    server.close()


def test_engines_are_forked_and_outlive_the_fork_server(forks, tmp_path):
    killed = EngineProcess(settings(tmp_path, model="lorimer/debug"))
    killed.kill()
    assert killed.pid is None, "the fork server imports the engine for the first time"
    first = EngineProcess(settings(tmp_path, model="lorimer/debug"))
    second = EngineProcess(settings(tmp_path, model="lorimer/debug"))
    for engine in (first, second):
        engine.ready.result(PATIENCE)
        process = psutil.Process(engine.pid)
        assert process.name() == fork_server.process_name(os.getpid())
        assert process.ppid() == forks.pid
        sockets = [link for link in os.scandir(f"/proc/{engine.pid}/fd") if "socket:" in os.readlink(link.path)]
        assert len(sockets) == 1, "a socket of another engine would keep that engine alive after its owner"
    assert killed.ended.result(PATIENCE).endswith("ended with code -9")
    killed.close()
    second.close()
    assert second.ended.result(PATIENCE).endswith("ended with code 0")

    os.kill(forks.pid, signal.SIGKILL)
    while not forks.has_ended:
        time.sleep(0.01)
    first.submit(GetStatus(request_id="status")).result(PATIENCE)
    assert fork_server.start(forks.address, ["0"], [], engine_environment()) is None, "so one is started alone"
    first.kill()
    assert first.ended.result(PATIENCE).endswith("ended with code -1")
    first.close()


def test_a_killed_engine_has_the_code_of_its_signal(tmp_path):
    engine = EngineProcess(settings(tmp_path, model="lorimer/debug"))
    engine.ready.result(PATIENCE)
    engine.kill()
    assert engine.ended.result(PATIENCE).endswith("ended with code -9")
    engine.close()


def test_other_variables_are_refused_unless_nothing_reads_them():
    address = os.environ[fork_server.VARIABLE]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = theirs.fileno()
        other = engine_environment() | {"HF_HOME": "/elsewhere"}
        assert fork_server.start(address, [str(number)], [number], other) is None
        unrelated = engine_environment() | {"LORIMER_DATA": "/elsewhere"}
        engine = fork_server.start(address, [str(number)], [number], unrelated)
    assert engine is not None
    assert engine.wait(PATIENCE) == 0, "it ends with its socket"
