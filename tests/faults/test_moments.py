"""A process of the server is killed at a chosen moment of a program's life; the program only pauses."""

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.conformance.servers import create_key
from tests.faults.moments import FULL_SNAPSHOTS, SAVES_AND_LOADS, SNAPSHOTS, STARTS, Fuse, Moment
from tests.faults.programs import Expected, RunningProgram, assert_same, expectation
from tests.faults.proxy import BreakingWire
from tests.faults.supervisor import Supervisor, eventually
from tests.faults.tenant import Plan

PLAN = Plan(seed=3, steps=24, load_at=20)
FULL_PLAN = Plan(seed=4, steps=24, load_at=20, full=True)
OFTEN, SELDOM = 0.01, 600.0
"""Engine time between snapshots: after every step or so, and only where a load makes one."""


class Place:
    """A server with a fuse, and a user of it."""

    def __init__(self, server: Supervisor, fuse: Fuse, key: str, folder) -> None:
        self.server, self.fuse, self._key, self._folder = server, fuse, key, folder
        self._count = 0

    def program(self, url: str = "", plan: Plan = PLAN) -> RunningProgram:
        self._count += 1
        return RunningProgram(url or self.server.url, self._key, plan, self._folder / f"program-{self._count}")


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Iterator[dict[float, Place]]:
    """Servers by the time between snapshots, started when they are first asked for."""
    opened: dict[float, Place] = {}

    class Opening(dict):
        def __missing__(self, seconds: float) -> Place:
            folder = tmp_path_factory.mktemp("moments")
            fuse = Fuse(folder)
            key = create_key(folder / "data", "alice")
            server = Supervisor(folder / "data", extra=fuse.variables, snapshot_seconds=seconds)
            opened[seconds] = self[seconds] = Place(server.__enter__(), fuse, key, folder)
            return opened[seconds]

    yield Opening()
    for place in opened.values():
        place.server.__exit__()


@pytest.fixture(scope="module")
def expected(places) -> Expected:
    return expectation(places[SELDOM].program().finish())


@pytest.fixture(scope="module")
def expected_full(places) -> Expected:
    return expectation(places[SELDOM].program(plan=FULL_PLAN).finish())


def chosen(moments: dict[str, Moment]) -> list:
    return [pytest.param(moment, id=name) for name, moment in moments.items()]


@pytest.mark.slow
@pytest.mark.parametrize("moment", chosen(SNAPSHOTS))
def test_killed_while_a_snapshot_is_made(places, expected, moment):
    strike(places[OFTEN], expected, moment, after_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("moment", chosen(SNAPSHOTS | FULL_SNAPSHOTS))
def test_killed_while_a_snapshot_of_a_full_run_is_made(places, expected_full, moment):
    strike(places[OFTEN], expected_full, moment, after_steps=2, plan=FULL_PLAN)


@pytest.mark.slow
@pytest.mark.parametrize("moment", chosen(SAVES_AND_LOADS))
def test_killed_while_weights_are_saved_or_loaded(places, expected, moment):
    strike(places[SELDOM], expected, moment, after_steps=1)


def strike(place: Place, expected: Expected, moment: Moment, after_steps: int, plan: Plan = PLAN) -> None:
    program = place.program(plan=plan)
    eventually(lambda: program.num_steps >= after_steps or not program.is_running, "some steps")
    place.fuse.arm(moment)
    finish_struck(place, program, expected)


def finish_struck(place: Place, program: RunningProgram, expected: Expected) -> None:
    """The armed moment has come by the end, and the program noticed no more than a pause."""
    try:
        program.finish()
        assert place.fuse.has_blown, "the moment did not come"
    finally:
        place.fuse.disarm()
    assert_same(program, expected)


@pytest.mark.slow
@pytest.mark.parametrize("moment", chosen(STARTS))
def test_killed_again_while_it_starts(places, expected, moment):
    place = places[OFTEN]
    program = place.program()
    eventually(lambda: program.num_steps >= 4 or not program.is_running, "some steps")
    place.fuse.arm(moment)
    place.server.kill("both")
    finish_struck(place, program, expected)


@pytest.mark.slow
def test_killed_again_while_it_replays(places, expected):
    """First the engine alone, then both, as soon as operations are being repeated."""
    place = places[SELDOM]
    program = place.program()
    eventually(lambda: program.num_steps >= 3 or not program.is_running, "some steps")
    for first, again in (("both", "engine"), ("engine", "both")):
        replays = place.server.logged().count("replaying")
        place.server.kill(first)
        eventually(lambda replays=replays: place.server.logged().count("replaying") > replays, "a replay")
        place.server.kill(again)
    assert_same(program.finish(), expected)


CUTS = [
    ("forward_backward", "answer"),
    ("optim_step", "request"),
    ("save_weights", "answer"),
    ("save_weights_for_sampler", "answer"),
    ("asample", "answer"),
    ("retrieve_future", "answer"),
]


@pytest.mark.parametrize(
    ("path", "cut"),
    [
        pytest.param(*cut, id="-".join(cut), marks=() if number < 1 else pytest.mark.slow)
        for number, cut in enumerate(CUTS)
    ],
)
def test_killed_between_a_request_and_its_answer(places, expected, path, cut):
    """The server has the request, committed or not yet; the client never hears of it and asks again."""
    place = places[SELDOM]
    with BreakingWire(place.server.port) as wire:
        program = place.program(wire.url)
        eventually(lambda: program.num_steps >= 1 or not program.is_running, "a step")
        wire.arm(f"/api/v1/{path}", cut, lambda: place.server.kill("api"))
        program.finish()
        assert wire.num_cuts == 1, "there was no such request"
    program.url = place.server.url
    assert_same(program, expected)


def test_asked_to_end_in_the_middle(places, expected):
    """SIGTERM: what is being computed is finished and secured, the exit code is 0, the next server goes on."""
    place = places[SELDOM]
    program = place.program()
    eventually(lambda: program.num_steps >= 3 or not program.is_running, "some steps")
    ended, replays = len(place.server.exit_codes), place.server.logged().count("replaying")
    place.server.send(signal.SIGTERM)
    assert place.server.wait_for_end(ended) == 0
    assert_same(program.finish(), expected)
    assert place.server.logged().count("replaying") == replays, "a run was not secured"


def test_nothing_is_left_of_what_killed_processes_wrote(places):
    """The next start removes it at the latest; what the record names is all there is."""
    server = places[SELDOM].server
    server.kill("both")
    server.wait_until_ready()
    with closing(sqlite3.connect(f"file:{server.data / 'lorimer.db'}?mode=ro", uri=True)) as database:
        for place, query in {
            "weights": "select name from weights",
            "snapshots": "select snapshot_name from runs where snapshot_name is not null"
            " union select newest_name from runs where newest_name is not null",
        }.items():
            assert {path.name for path in (server.data / place).iterdir()} == {
                name for (name,) in database.execute(query)
            }
