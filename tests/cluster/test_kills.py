"""Tenants train over several processes while API replicas, workers and engines are killed or stopped at random.

Neither of them can tell: weights equal those of an undisturbed run, nothing is lost or doubled.
"""

import json
import logging
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
import psycopg
import pytest

from lorimer.engine.reservations import reserve
from tests.cluster.installation import Installation, Member, missing_programs
from tests.faults.programs import Expected, RunningProgram, assert_same, expectation, finish_all
from tests.faults.supervisor import eventually
from tests.faults.tenant import MODEL, Plan
from tests.faults.test_kills import done

NUM_KILLS = int(os.environ.get("LORIMER_CLUSTER_KILLS", "8"))
pytestmark = pytest.mark.timeout(3000 + 60 * NUM_KILLS)
log = logging.getLogger(__name__)

STEPS = 12
SETTINGS = {"snapshot_seconds": 0.2, "full_idle_seconds": 15.0}


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    if missing := missing_programs():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("cluster") / "installation"
    with Installation(folder, {MODEL: MODEL}, num_replicas=1, users=["alice", "bob"], **SETTINGS) as opened:
        try:
            yield opened
        except BaseException:
            log.error("%s", opened.logged())
            raise


@pytest.fixture(scope="module")
def keys(installation: Installation) -> list[str]:
    return list(installation.keys.values())


def start(installation: Installation, keys: Sequence[str], plans: Sequence[Plan], folder: Path) -> list[RunningProgram]:
    return [
        RunningProgram(installation.url, key, plan, folder / f"tenant-{plan.seed}")
        for key, plan in zip(keys, plans, strict=True)
    ]


def expected(installation: Installation, keys: Sequence[str], plans: Sequence[Plan], folder: Path) -> list[Expected]:
    programs = start(installation, keys, plans, folder / "undisturbed")
    finish_all(programs)
    return [expectation(program) for program in programs]


def test_random_kills_lose_and_double_nothing(installation, keys, tmp_path):
    chance = random.Random(os.environ.get("LORIMER_CLUSTER_SEED", "1"))
    steps = max(STEPS, 2 * NUM_KILLS)
    plans = [Plan(seed=number, steps=steps) for number in range(2)]
    known = expected(installation, keys, plans, tmp_path)
    programs = start(installation, keys, plans, tmp_path / "disturbed")
    kills: dict[str, int] = {}
    try:
        for number in range(NUM_KILLS):
            due = 2 * steps * (number + 0.5) / (NUM_KILLS + 1)
            eventually(lambda due=due: done(programs) >= due, f"{due:g} steps", 900)
            kind = chance.choice(["api", "worker", "engine", "engine"])
            member = chance.choice(installation.apis if kind == "api" else installation.workers)
            log.info("kill %d: %s of %s", number, kind, member.name)
            if kind == "engine":
                member.kill_engine()
            else:
                member.kill()
            kills[kind] = kills.get(kind, 0) + 1
            time.sleep(chance.uniform(0, 1.0))
    finally:
        finish_all(programs)
    differences = [assert_same(program, one) for program, one in zip(programs, known, strict=True)]
    rows = installation.postgres.execute("select state, count(*) from futures group by state")
    report = {
        "kills": kills,
        "largest difference of a weight": max(differences),
        "longest pause of a client": round(max(program.longest_pause for program in programs), 1),
        "requests": dict(rows),
    }
    log.info("%s", json.dumps(report))
    assert max(differences) <= 1e-6
    assert {state for state, _ in rows} <= {"done", "cancelled"}


def worker_of(installation: Installation, place: str) -> Member:
    (door,) = installation.postgres.execute(
        f"select o.door from replicas r join owners o using (owner_id) where r.name = '{place}'"
    )[0]
    for member in installation.workers:
        for connection in psutil.Process(member.pid).net_connections("tcp"):
            if connection.status == "LISTEN" and f"{connection.laddr.ip}:{connection.laddr.port}" == door:
                return member
    raise AssertionError(f"no worker listens at {door}")


def test_a_stopped_worker_that_comes_back_has_changed_nothing(installation, keys, tmp_path):
    """It is stopped until another worker, or another replica, has its runs; then it notices, and ends."""
    plans = [Plan(seed=5, steps=STEPS)]
    known = expected(installation, keys[:1], plans, tmp_path)
    (program,) = start(installation, keys[:1], plans, tmp_path / "disturbed")
    eventually(lambda: done([program]) >= 3, "three steps", 300)
    model_id = program.lines[0]["run"]
    (place,) = installation.postgres.execute(f"select replica from runs where model_id = '{model_id}'")[0]
    victim = worker_of(installation, place)
    ended = len(victim.exit_codes)
    pid = victim.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        finish_all([program])
        assert_same(program, known[0])
        before = installation.postgres.execute("select max(finished_no), count(*) from futures")
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: len(victim.exit_codes) > ended, "the stopped worker ended", 60)
    assert victim.exit_codes[ended] == 75
    assert installation.postgres.execute("select max(finished_no), count(*) from futures") == before
    log.info("the worker was stopped for %.1f s of the program's time", program.longest_pause)


def place_of(installation: Installation, program: RunningProgram) -> str | None:
    return installation.postgres.execute(f"select replica from runs where model_id = '{program.model_id}'")[0][0]


def test_a_full_run_is_taken_over_by_another_worker(installation, keys, tmp_path):
    plans = [Plan(seed=6, steps=2 * STEPS, full=True)]
    known = expected(installation, keys[:1], plans, tmp_path)
    (program,) = start(installation, keys[:1], plans, tmp_path / "disturbed")
    victims: list[Member] = []
    for due in (STEPS // 2, STEPS):
        eventually(lambda due=due: done([program]) >= due, f"{due} steps", 600)
        place = place_of(installation, program)
        assert place is not None and "#full-" in place
        victims.append(worker_of(installation, place))
        os.kill(victims[-1].pid, signal.SIGSTOP if due == STEPS else signal.SIGKILL)
    try:
        finish_all([program])
    finally:
        victims[-1].send(signal.SIGCONT)
    assert assert_same(program, known[0]) <= 1e-6
    log.info("the longest pause was %.1f s", program.longest_pause)


@contextmanager
def without_memory(installation: Installation, *numbers: int) -> Iterator[None]:
    """Let all memory of workers be reserved by somebody else."""
    held = []
    with pytest.MonkeyPatch.context() as patch:
        for number in numbers:
            patch.setenv("TMPDIR", str(installation.memory_of(number)))
            held.append(reserve("cpu", outstanding=1 << 50))
    try:
        yield
    finally:
        for one in held:
            one.close()


def nobody_has_full_replicas(installation: Installation) -> None:
    query = "select name from replicas where name like '%#full-%' and owner_id is not null"
    eventually(lambda: not installation.postgres.execute(query), "nobody owns them", 300)


@pytest.mark.parametrize("poor", [0, 1])
def test_a_full_run_is_placed_on_a_worker_with_enough_memory(installation, keys, tmp_path, poor):
    nobody_has_full_replicas(installation)
    with without_memory(installation, poor):
        (program,) = start(installation, keys[:1], [Plan(seed=9, steps=4, full=True)], tmp_path)
        eventually(lambda: done([program]) >= 1, "a step", 300)
        place = place_of(installation, program)
        assert place is not None
        assert worker_of(installation, place) is installation.workers[1 - poor]
        finish_all([program])


def test_a_full_run_that_no_worker_has_the_memory_for_is_refused_with_the_numbers(installation, keys, tmp_path):
    nobody_has_full_replicas(installation)
    with without_memory(installation, 0, 1):
        (program,) = start(installation, keys[:1], [Plan(seed=9, steps=4, full=True)], tmp_path)
        program.process.wait(300)
        program.stop()
    assert re.search(r"needs \d+\.\d MiB, 0\.0 MiB free", program.stderr()), program.stderr()[-2000:]


def test_a_sample_that_is_not_journaled_finds_a_worker_for_full_weights(installation, keys, tmp_path):
    (program,) = start(installation, keys[:1], [Plan(seed=10, steps=2, sample_every=0, full=True)], tmp_path)
    finish_all([program])
    nobody_has_full_replicas(installation)
    body = {"model": program.of("end")[0]["path"], "prompt": "a", "max_tokens": 3}
    given = {"json": body, "headers": {"Authorization": f"Bearer {keys[0]}"}, "timeout": 300}
    url = f"{installation.url}/v1/completions"
    first = httpx2.post(url, **given)
    assert first.status_code == 429 and "a worker with enough free memory" in first.text, first.text
    eventually(lambda: httpx2.post(url, **given).status_code == 200, "a worker has loaded the weights", 300)


def test_replicas_of_full_runs_are_owned_only_while_they_have_work(installation, keys, tmp_path):
    """Their workers leave them when the engine has ended, and the next run finds one again."""
    plans = [Plan(seed=7 + number, steps=3, sample_every=2, full=True) for number in range(2)]
    programs = start(installation, keys, plans, tmp_path)
    eventually(lambda: all("run" in line for one in programs for line in one.lines[:1]), "runs", 300)
    finish_all(programs)
    query = "select name from replicas where name like '%#full-%' and owner_id is not null"
    assert len(installation.postgres.execute(query)) > 0
    nobody_has_full_replicas(installation)
    (again,) = start(installation, keys[:1], [Plan(seed=9, steps=2, full=True)], tmp_path / "again")
    finish_all([again])


def test_a_worker_shows_its_metrics(installation):
    wait_for_owners(installation)
    ready = f'lorimer_engine_state{{model="{MODEL}",state="ready"}} 1.0'
    owners = [worker_of(installation, f"{MODEL}#{number}") for number in range(2)]
    for worker, port in zip(installation.workers, installation.metrics_ports, strict=True):
        found = httpx2.get(f"http://127.0.0.1:{port}/metrics").raise_for_status()
        assert ready in found.text and "process_resident_memory_bytes" in found.text
        assert (f'lorimer_engine_resident_bytes{{model="{MODEL}"}}' in found.text) == (worker in owners)
        assert httpx2.get(f"http://127.0.0.1:{port}/api/v1/healthz").json() == {"status": "ok"}
        assert [httpx2.request(method, f"http://127.0.0.1:{port}/x").status_code for method in ("GET", "POST")] == [
            404,
            405,
        ]


def wait_for_owners(installation: Installation) -> None:
    query = "select count(*) from replicas where owner_id is not null and state = 'ready'"
    eventually(lambda: installation.postgres.execute(query) == [(2,)], "both replicas have owners")


def test_an_owner_without_its_row_cannot_commit(installation):
    """Delete the row of a worker that is at work: its next transaction fails, and it ends and comes back."""
    wait_for_owners(installation)
    victim = worker_of(installation, f"{MODEL}#0")
    ended = len(victim.exit_codes)
    with psycopg.connect(installation.postgres.url()) as connection:
        connection.execute(
            "delete from owners where owner_id = (select owner_id from replicas where name = %s)", (f"{MODEL}#0",)
        )
    eventually(lambda: len(victim.exit_codes) > ended, "the worker ended", 60)
    assert victim.exit_codes[ended] == 75
    wait_for_owners(installation)


def test_a_restart_of_the_database_only_pauses(installation, keys, tmp_path):
    plans = [Plan(seed=7, steps=STEPS)]
    known = expected(installation, keys[:1], plans, tmp_path)
    (program,) = start(installation, keys[:1], plans, tmp_path / "disturbed")
    eventually(lambda: done([program]) >= 3, "three steps", 300)
    codes = [list(worker.exit_codes) for worker in installation.workers]
    installation.postgres.stop("immediate")
    time.sleep(2.0)
    installation.postgres.start()
    finish_all([program])
    assert_same(program, known[0])
    assert [list(worker.exit_codes) for worker in installation.workers] == codes, "the workers stayed"
