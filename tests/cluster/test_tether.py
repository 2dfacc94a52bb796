"""A tethered command ends with the process that started it, and is not started after that process has ended."""

import subprocess
import sys

import psutil

from lorimer.cluster import tether
from tests.faults.supervisor import eventually

PARENT = """
import os, subprocess, sys, time
command = [sys.executable, "-P", sys.argv[1], str(os.getpid()), sys.executable, "-c", sys.argv[2]]
print(subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True).pid, flush=True)
time.sleep(3600)
"""
CHILD = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(3600)"


def test_a_command_is_killed_with_the_process_that_started_it():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tether.__file__, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    eventually(lambda: CHILD in child.cmdline() and tether.__file__ not in child.cmdline(), "it became the command")
    assert child.is_running()
    parent.kill()
    parent.communicate()
    eventually(lambda: not child.is_running() or child.status() == "zombie", "it was killed", 30)


def test_a_command_of_a_process_that_has_ended_is_not_started():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-P", tether.__file__, str(gone.pid), sys.executable, "-c", "print('started')"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"process {gone.pid} has ended" in done.stderr
