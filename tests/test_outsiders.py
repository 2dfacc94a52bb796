"""Peers in environments of their own: the processes, what failures cost, and that they compute what our engine does.

Those that need a peer are skipped where its environment was not made; ``make bench-peers`` makes them.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from bench import environments, workloads
from bench.__main__ import DOCUMENT, main, measure
from bench.contest import TOLERANCE, open_contest
from bench.driver_process import DriverProcess, shorten
from bench.environments import ENVIRONMENTS, Environment
from bench.models import QUICK
from bench.outside_rows import outside_samplers
from bench.outsiders import OUTSIDERS, Skyrl, Trl
from bench.report import HEADER, Line, replace_part
from bench.timing import Contestant, PeerFailed, compete
from lorimer.engine.messages import SampledSequence

SIZES, VOCAB_SIZE = QUICK.sizes, QUICK.vocab_size
PROGRAM = """
import os, subprocess, sys
from bench.drivers.lines import serve

class Peer:
    def __init__(self, num_threads, start):
        print("a library that prints")
        self.total = start

    def add(self, number):
        print(f"adding {number}")
        self.total += number
        return self.total

    def fail(self):
        print("worker: MemoryError: no room in /some/folder/of/mine/file.bin", file=sys.stderr, flush=True)
        raise RuntimeError("a worker failed")

    def die(self):
        os._exit(7)

    def hang(self):
        subprocess.run(["sleep", "600"])

serve(Peer)
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "summing_peer.py").write_text(PROGRAM)
    started = []

    def start(**settings):
        variables = {"PYTHONPATH": str(tmp_path)}
        started.append(DriverProcess(sys.executable, "summing_peer", tmp_path / "log", variables, settings))
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_a_process_answers_calls_whatever_libraries_print(start, tmp_path):
    process = start(num_threads=1, start=5)
    assert [process.ask("add", number=number) for number in (1, 2)] == [6, 8]
    assert "adding 2" in (tmp_path / "log").read_text()


def test_a_failed_call_gives_the_first_logged_reason_and_the_next_one_works(start):
    process = start(num_threads=1, start=5)
    with pytest.raises(PeerFailed, match=r"^MemoryError: no room in file.bin$"):
        process.ask("fail")
    with pytest.raises(PeerFailed, match=r"^AttributeError: 'Peer' object has no attribute 'subtract'"):
        process.ask("subtract", number=1)
    assert process.ask("add", number=1) == 6


def test_a_process_that_ends_has_failed(start):
    process = start(num_threads=1, start=5)
    for _ in range(2):
        with pytest.raises(PeerFailed, match="its process ended with 7"):
            process.ask("die")


def test_a_call_under_way_ends_with_the_process_that_asked(start):
    process = start(num_threads=1, start=5)
    program = psutil.Process(process.pid)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(process.ask, "hang")
        while not (sleeping := program.children()):
            time.sleep(0.05)
        process.close()
        with pytest.raises(PeerFailed, match="its process ended with -9"):
            asked.result(60)
    _, alive = psutil.wait_procs([program, *sleeping], 60)
    assert not alive


def test_a_peer_that_does_not_open_has_failed(start):
    with pytest.raises(PeerFailed, match=r"TypeError: .*unexpected keyword argument 'speed'"):
        start(num_threads=1, speed=2)


def test_a_reason_fits_into_a_table():
    assert shorten("a\n  b | c") == "a b / c"
    assert len(shorten("x" * 1000)) < 300


def test_an_environment_that_cannot_be_made_gives_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    environment = Environment(packages=("lorimer-absent[extra]==1.0",))
    for _ in range(2):
        with pytest.raises(PeerFailed, match=r"pip install: No matching distribution found for lorimer-absent.*==1.0"):
            environment.make()
    assert environment.directory == tmp_path / ".venvs" / "lorimer-absent-1.0"
    assert environment.python() is None


def test_a_peer_that_fails_costs_only_its_own_figures():
    seen = []

    def contestant(name, team, fails_in=()):
        def run(number):
            seen.append((name, number))
            if number in fails_in:
                raise PeerFailed(f"{name} {number}")

        return Contestant(name=name, team=team, run=run, warm_up=lambda: run(0))

    field = [
        contestant("a", "ours"),
        contestant("b", "first", fails_in=(0,)),
        contestant("c", "second", fails_in=(2,)),
        contestant("d", "third", fails_in=(1,)),
        contestant("e", "third"),
    ]
    said = []
    timings = compete(field, num_rounds=3, max_seconds=10, progress=said.append)
    assert timings.failures == {"first": "b 0", "second": "c 2"}
    assert [number for name, number in seen if name == "b"] == [0]
    assert len(timings.best("ours").seconds) == 3
    assert timings.best("third").name == "e"
    assert not timings.has("second")
    assert "round 2: c failed: c 2" in said


def test_a_contestant_that_takes_much_of_the_budget_is_timed_once():
    field = [
        Contestant(name=name, team=name, run=lambda number, s=seconds: time.sleep(s), warm_up=lambda: None)
        for name, seconds in (("quick", 0.001), ("slow", 0.3))
    ]
    timings = compete(field, num_rounds=3, max_seconds=1.0, progress=lambda text: None)
    assert [len(timings.best(name).seconds) for name in ("quick", "slow")] == [3, 1]


def test_a_line_without_a_figure_says_why():
    line = Line(text="t", ours="1", other="failed: it is absent", which="x 1.0", ratio=None, aim="sft")
    assert line.cells() == ["t", "1", "failed: it is absent", "x 1.0", "-", "-", "-"]
    assert len(line.cells()) == len(HEADER)


def test_the_part_of_a_document_is_replaced():
    document = "before\n<!-- begin x -->\n\nold\n\n<!-- end x -->\nafter\n"
    once = replace_part(document, "x", "new")
    assert once == "before\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nafter\n"
    assert replace_part(once, "x", "new") == once
    with pytest.raises(ValueError, match="no '<!-- begin y -->' before"):
        replace_part(document, "y", "new")
    assert "| new |" in replace_part(DOCUMENT.read_text("utf-8"), "peers", "| new |")


# ── with a model ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def contest(tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("outsiders")
    with closing(open_contest(QUICK, ["float32"], root, 1, 1, lambda text: None, has_outsiders=True)) as contest:
        yield contest


@pytest.fixture
def outsider(request, contest):
    environment = request.param.environment
    if environment.python() is None:
        pytest.skip(f"there is no environment with {environment.release}; make bench-peers makes it")
    (found,) = (one for one in contest.outsiders if type(one) is request.param)
    return found


def prompts(count, seed):
    return workloads.prompts(count, SIZES.sample_prompt, VOCAB_SIZE, seed)


def test_our_engine_and_peft_sample_with_several_adapters_in_one_batch(contest):
    asked, paths = prompts(4, 1), [contest.adapters[i % 2] for i in range(4)]
    ours = contest.ours["float32"]
    samples = ours.sample_with(asked, 5, paths)
    scored = ours.score(asked, [sample.tokens for sample in samples], paths)
    for sample, logprobs in zip(samples, scored, strict=True):
        np.testing.assert_allclose(sample.logprobs, logprobs, atol=1e-4)
    others = ours.score(asked, [sample.tokens for sample in samples], [*paths[1:], paths[0]])
    assert all(np.abs(a - b).mean() > 5 * TOLERANCE["float32"] for a, b in zip(scored, others, strict=True))
    assert contest.peers["float32"].sample_with(asked, 5, paths).shape == (4, 5)


@pytest.mark.parametrize(
    ("adapter", "added", "length", "reason"),
    [
        (0, 0.0, SIZES.sample_new, ""),
        (1, 0.0, SIZES.sample_new, "logprobs of samples of adapters differ by"),
        (0, 0.01, SIZES.sample_new, "logprobs of samples of adapters differ by 0.01 a token"),
        (0, 0.0, 2, "returned 2 tokens instead of 4"),
    ],
    ids=["same", "other adapter", "other logprobs", "too short"],
)
def test_samples_are_checked_against_our_engine(contest, adapter, added, length, reason):
    class Answering(Skyrl):
        """Answers with samples of our engine, changed."""

        def sample(self, prompts, num_samples, num_new, adapters):
            found = contest.ours["float32"].sample_with(prompts, length, [contest.adapters[adapter]] * len(prompts))
            return [
                [SampledSequence(tokens=one.tokens, logprobs=one.logprobs + added, stop_reason="length")]
                for one in found
            ]

    changed = replace(contest, outsiders=[Answering(contest.outsiders[0].setting)], mismatches=[])
    (contestant,) = outside_samplers(changed, lambda number: prompts(2, number), 1, [0, 0])
    if reason:
        with pytest.raises(PeerFailed, match=reason):
            contestant.warm_up()
    else:
        contestant.warm_up()
    assert len(changed.mismatches) == bool(reason)


def test_a_wrong_loss_is_shown_and_fails_the_run(contest):
    class Wrong(Skyrl):
        def train(self, data, loss_fn, layout):
            return contest.ours["float32"].train_one(data, loss_fn) + 1

    changed = replace(contest, outsiders=[Wrong(contest.outsiders[0].setting)], mismatches=[])
    text, has_succeeded = measure(changed, ["rl_batch"])
    assert not has_succeeded
    assert "times SkyRL tx" in text
    assert "failed: skyrl 0.3.0 float32, padded computed a loss of" in text
    assert "A peer computed something else: skyrl 0.3.0 float32, padded computed a loss of" in text
    assert "times the best loop" in text


def test_a_peer_that_is_absent_is_shown_and_does_not_fail_the_run(contest, monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    changed = replace(contest, outsiders=[Trl(contest.outsiders[0].setting)], mismatches=[])
    text, has_succeeded = measure(changed, ["rl_batch"])
    assert has_succeeded
    assert "| failed: pip install: No matching distribution found for trl==1.16.0 | trl 1.16.0 | - | - | - |" in text


@pytest.mark.slow
@pytest.mark.parametrize("outsider", [one for one in OUTSIDERS if one.layouts], indirect=True, ids=lambda one: one.name)
def test_an_outsider_computes_our_losses(contest, outsider):
    for data, loss_fn in (
        (workloads.sft_data(SIZES.sft_lengths, VOCAB_SIZE, seed=5), "cross_entropy"),
        (workloads.rl_data(4, 12, 4, VOCAB_SIZE, seed=5), "importance_sampling"),
    ):
        expected = pytest.approx(contest.ours["float32"].train_one(data, loss_fn), rel=1e-5, abs=1e-3)
        for layout in outsider.layouts:
            # Twice: a step leaves the weights alone.
            assert [outsider.train(data, loss_fn, layout) for _ in range(2)] == [expected, expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    "outsider", [one for one in OUTSIDERS if one.can_sample], indirect=True, ids=lambda one: one.name
)
@pytest.mark.parametrize("adapters", [None, [0, 0, 0, 0], [0, 1, 0, 1]], ids=["base", "one adapter", "two adapters"])
def test_an_outsider_samples_with_our_logprobs(contest, outsider, adapters):
    changed = replace(contest, outsiders=[outsider], mismatches=[])
    (contestant,) = outside_samplers(changed, lambda number: prompts(4, number), 3, adapters)
    contestant.warm_up()
    contestant.run(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "outsider", [one for one in OUTSIDERS if one.can_iterate], indirect=True, ids=lambda one: one.name
)
def test_an_outsider_trains_on_what_it_sampled(outsider):
    assert outsider.iterate(prompts(2, 11), 2, 4, seed=3) < 1e-4


@pytest.mark.slow
def test_command_measures_all_peers(capsys):
    if absent := [one.release for one in ENVIRONMENTS.values() if one.python() is None]:
        pytest.skip(f"there are no environments with {', '.join(absent)}; make bench-peers makes them")
    assert main(["--quick", "--peers", "--threads", "1", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "failed" not in printed
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    named = {name: sum(f"times {name} |" in line for line in lines) for name in ("vLLM", "TRL", "SkyRL tx")}
    assert named == {"vLLM": 5, "TRL": 3, "SkyRL tx": 8}
