"""The lifeline of a vLLM server ends all of its processes, whoever of them dies first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import lorimer.engine.vllm

LIFELINE = Path(lorimer.engine.vllm.__file__).with_name("lifeline.py")
COMMAND = [sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"]
STUBBORN = [COMMAND[0], "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + COMMAND[2]]


@pytest.mark.parametrize(("command", "victim"), [(COMMAND, "pipe"), (COMMAND, "command"), (STUBBORN, "pipe")])
def test_the_whole_group_ends(tmp_path, command, victim):
    folder = tmp_path / "folder"
    folder.mkdir()
    started = [sys.executable, "-I", "-S", str(LIFELINE), str(folder), *command]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as leader:
        while len(group := psutil.Process(leader.pid).children(recursive=True)) < 2:
            time.sleep(0.02)
        if victim == "pipe":
            assert leader.stdin is not None
            leader.stdin.close()
        else:
            os.kill(group[0].pid, signal.SIGKILL)
        assert leader.wait(20) == -signal.SIGKILL
    assert not psutil.wait_procs(group, 5)[1]
    assert not folder.exists()
