"""Graders that misbehave cost one grade each, and nothing else."""

import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lorimer.cookbook.rl.graders import GraderPool
from lorimer.errors import InvalidInput, Unsupported
from tests.cookbook.rl import grading

ROOT = Path(__file__).parents[3]
MISBEHAVE = "tests.cookbook.rl.grading:misbehave"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_grader_is_called_in_another_process_with_its_arguments():
    async with GraderPool(grading.length, num_workers=1) as pool:
        assert (await pool.grade("abc", "xyz")).value == 1.0
        assert (await pool.grade("abc", "x")).value == 0.0
        assert pool.counts == {"graded": 2}
    async with GraderPool(MISBEHAVE, num_workers=1) as pool:
        first, second = await pool.grade("pid"), await pool.grade("pid")
        assert first.value == second.value != os.getpid()


async def test_grader_may_return_metrics_and_may_be_a_coroutine():
    async with GraderPool(grading.with_metrics, num_workers=1) as pool:
        grade = await pool.grade("two words")
        assert (grade.value, grade.metrics, grade.error) == (0.5, {"words": 2.0}, None)
    async with GraderPool(grading.slowly, num_workers=1) as pool:
        assert (await pool.grade("four")).value == 4.0


@pytest.mark.parametrize(
    ("how", "error", "detail"),
    [
        ("memory", "memory", "memory"),
        ("eat", "memory", "memory"),
        ("raise", "raised", "ValueError: no such answer"),
        ("exit", "raised", "SystemExit: 3"),
        ("end", "died", "status 7"),
        ("kill", "died", "status -9"),
        ("nan", "raised", "a finite number"),
        ("text", "raised", "could not convert"),
    ],
)
async def test_misbehaviour_is_an_error_value_and_the_next_call_is_graded(how, error, detail):
    async with GraderPool(MISBEHAVE, num_workers=1, memory_mb=256) as pool:
        grade = await pool.grade(how)
        assert (grade.value, grade.error) == (0.0, error)
        assert detail in grade.detail
        assert (await pool.grade("fine")).value == 1.0
        assert pool.counts == {error: 1, "graded": 1}


async def test_prints_and_reads_do_not_reach_the_pipes():
    async with GraderPool(MISBEHAVE, num_workers=1) as pool:
        assert (await pool.grade("print")).value == 1.0
        assert (await pool.grade("read")).value == 0.0


async def test_forged_reply_is_data_and_never_code(tmp_path):
    async with GraderPool(MISBEHAVE, num_workers=1) as pool:
        grade = await pool.grade("forge", str(tmp_path / "made"))
        assert (grade.error, (tmp_path / "made").exists()) == ("died", False)
        assert "no reply" in grade.detail
        assert (await pool.grade("fine")).value == 1.0


async def test_sleeping_grader_stalls_nobody(tmp_path):
    async with GraderPool(MISBEHAVE, num_workers=2, timeout_seconds=1.5) as pool:
        await pool.grade("fine")
        begun = time.monotonic()
        sleeping = asyncio.create_task(pool.grade("child", str(tmp_path / "pid")))
        await asyncio.sleep(0)
        others = await asyncio.gather(*(pool.grade("fine") for _ in range(20)))
        assert not sleeping.done()
        assert [grade.value for grade in others] == [1.0] * 20
        grade = await sleeping
        assert grade.error == "timeout"
        assert "1.5 seconds" in grade.detail
        assert time.monotonic() - begun < 10
        child = int((tmp_path / "pid").read_text())
        async with asyncio.timeout(10):  # what a grader started is killed with it; the kernel takes a moment
            while is_running(child):
                await asyncio.sleep(0.01)


async def test_metrics_count_what_is_new():
    async with GraderPool(MISBEHAVE, num_workers=1) as pool:
        await pool.grade("fine")
        await pool.grade("raise")
        assert pool.take_metrics() == {"grader/graded": 1, "grader/errors": 1, "grader/errors_raised": 1}
        await pool.grade("fine")
        assert pool.take_metrics() == {"grader/graded": 1, "grader/errors": 0}


async def test_cancelled_grade_frees_its_worker():
    async with GraderPool(MISBEHAVE, num_workers=1, timeout_seconds=60) as pool:
        task = asyncio.create_task(pool.grade("sleep"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await pool.grade("fine")).value == 1.0


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ("no_colon", "module:function"),
        (lambda reply: 1.0, "top of a module"),
    ],
)
def test_grader_without_a_name_is_refused(grader, message):
    with pytest.raises(InvalidInput, match=message):
        GraderPool(grader)


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ("no_such_module:grade", "No module named 'no_such_module'"),
        ("tests.cookbook.rl.grading:no_such_grader", "no attribute 'no_such_grader'"),
        ("tests.cookbook.rl.grading:not_a_function", "a function is accepted"),
    ],
)
async def test_grader_that_cannot_be_found_is_refused_at_the_start(grader, message):
    with pytest.raises(InvalidInput, match=message):
        async with GraderPool(grader):
            pytest.fail("it was found")


SCRIPT = """
import asyncio, sys
from lorimer.cookbook.rl.graders import GraderPool

def grade(reply):
    if reply == "hang":
        import os, time
        open(sys.argv[1] if len(sys.argv) > 1 else PATH, "w").write(str(os.getpid()))
        time.sleep(3600)
    return len(reply)

async def main():
    async with GraderPool(grade, num_workers=1, timeout_seconds=TIMEOUT) as pool:
        print((await pool.grade("12345")).value, flush=True)
        if HANG:
            await pool.grade("hang")

if __name__ == "__main__":
    asyncio.run(main())
"""


def start_script(tmp_path: Path, **values: object) -> "subprocess.Popen[str]":
    script = tmp_path / "script.py"
    script.write_text("\n".join(f"{name} = {value!r}" for name, value in values.items()) + SCRIPT)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )


def test_grader_of_a_script_is_found(tmp_path):
    process = start_script(tmp_path, HANG=False, TIMEOUT=10, PATH="")
    assert process.communicate(timeout=60)[0] == "5.0\n"
    assert process.returncode == 0


def test_grader_of_a_killed_program_ends_by_itself(tmp_path):
    path = tmp_path / "pid"
    process = start_script(tmp_path, HANG=True, TIMEOUT=1, PATH=str(path))
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    worker = int(path.read_text())
    while is_running(worker):
        assert time.monotonic() < deadline, "the grader outlived its program"
        time.sleep(0.1)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_ray_is_refused_by_name_where_it_is_not_installed():
    with pytest.raises(Unsupported, match="needs the package ray"):
        GraderPool(grading.length, backend="ray")


def test_unknown_backend_is_refused():
    with pytest.raises(InvalidInput, match="accepted are processes, ray"):
        GraderPool(grading.length, backend="threads")
