"""The benchmark runs, with a minuscule model, and both sides do the same work in it. Its figures are not looked at."""

import asyncio
import gc
import json
import math
import sys
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from bench import memory, quantization, workloads
from bench.__main__ import main, measure
from bench.contest import LossCheck, open_contest
from bench.limits import gemm_seconds
from bench.models import QUICK, SMALL, SMOL
from bench.ours import FullLorimer
from bench.peers import Plain
from bench.profiling import profile_ours
from bench.report import AIMS, Line
from bench.rows import FULL_LAYOUTS, ROWS
from bench.service import figures
from bench.service.client import ENGINE_DATUM
from bench.service.figures import Figure, percentile
from bench.service.http import HttpError, HttpPool
from bench.service.rows import ROWS as SERVICE_ROWS
from bench.service.rows import growth_figure
from bench.service.server import disk_bytes
from bench.service_times import ServiceTimes
from bench.simulate import Simulation, Step, Workload
from bench.simulated_engine import TIMES
from bench.simulation_report import Figures, check, figures_of, max_turns
from bench.timing import Contestant, compete
from lorimer.engine import messages
from lorimer.engine.config import EngineConfig
from lorimer.engine.launch import PROGRAM
from lorimer.engine.process import EngineProcess
from lorimer.store.manifests import is_whole
from tests.cluster.installation import missing_programs

SFT = workloads.sft_data(QUICK.sizes.sft_lengths, QUICK.vocab_size, seed=5)
RL = workloads.rl_data(4, 12, 4, QUICK.vocab_size, seed=5)


@pytest.fixture(scope="module")
def contest(tmp_path_factory):
    # Both dtypes, on machines without bfloat16 too.
    torch.set_num_threads(1)
    return open_contest(QUICK, ["float32", "bfloat16"], tmp_path_factory.mktemp("bench"), 2, 1, lambda text: None)


@pytest.fixture(scope="module")
def measured(contest):
    """Lines by row; later rows take the winners of earlier ones, so all are run, in their order."""
    return {row: measure_row(contest) for row, measure_row in ROWS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_row_is_measured(measured, row):
    assert measured[row]
    for line in measured[row]:
        assert math.isfinite(line.ratio)
        assert line.ratio > 0
        assert len(line.cells()) == 7


@pytest.mark.slow
def test_every_aim_belongs_to_a_line(measured):
    assert {line.aim for lines in measured.values() for line in lines} >= set(AIMS) - {"sample vLLM"}


@pytest.mark.parametrize(
    ("data", "loss_fn", "layout"),
    [
        (SFT, "cross_entropy", "padded"),
        (SFT, "cross_entropy", "packed"),
        (SFT, "cross_entropy", "micro-batch 1"),
        (RL, "importance_sampling", "padded"),
        (RL, "importance_sampling", "packed"),
        (RL, "importance_sampling", "micro-batch 1"),
        (RL, "importance_sampling", "completions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_both_sides_compute_the_same_loss(contest, data, loss_fn, layout):
    ours, peer = contest.ours["float32"], contest.peers["float32"]
    expected = pytest.approx(ours.train_one(data, loss_fn), rel=1e-5, abs=1e-3)
    # Twice: a step leaves the weights alone.
    assert [peer.train(data, loss_fn, layout) for _ in range(2)] == [expected, expected]
    assert ours.train_one(data, loss_fn) == expected


@pytest.fixture(scope="module")
def full_sides(contest):
    return FullLorimer(contest.directory, "float32", 1), Plain(contest.directory, "float32")


@pytest.mark.parametrize("layout", FULL_LAYOUTS)
def test_full_sides_compute_the_same_loss_and_gradient(full_sides, layout):
    """The gradient is read from the first moments, which a step leaves behind, of two steps each with the same data."""
    ours, plain = full_sides
    found, expected = ours.train(SFT, "cross_entropy"), plain.train(SFT, "cross_entropy", layout)
    assert found == pytest.approx(expected, rel=1e-5)
    moments, state = ours.engine._runs["run"].moments["exp_avg"], plain._optimizer.state
    theirs = {name: state[parameter]["exp_avg"] for name, parameter in plain.model.named_parameters()}
    assert moments.keys() == theirs.keys()
    for name, moment in moments.items():
        torch.testing.assert_close(moment, theirs[name], rtol=1e-4, atol=1e-5)


def test_the_adapter_takes_part(contest):
    peer = contest.peers["float32"]
    with_adapter = peer.train(SFT, "cross_entropy", "padded")
    with peer.model.disable_adapter():
        without = sum(
            torch.nn.functional.cross_entropy(
                peer.model(torch.from_numpy(datum.tokens)[None]).logits[0],
                torch.from_numpy(datum.loss_fn_inputs["target_tokens"]),
                reduction="sum",
            ).item()
            for datum in SFT
        )
    assert abs(with_adapter - without) > 1e-2


def test_runs_share_their_tokens(contest):
    ours = contest.ours["float32"]
    together = ours.train({ours.runs[0]: SFT[:2], ours.runs[1]: SFT[2:]}, "cross_entropy")
    assert together == pytest.approx(ours.train_one(SFT, "cross_entropy"), rel=1e-5)


@pytest.mark.parametrize("with_adapter", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize(("num_prompts", "num_samples"), [(1, 3), (4, 1)], ids=["1x3", "4x1"])
def test_both_sides_sample_as_many_tokens(contest, num_prompts, num_samples, with_adapter):
    asked = workloads.prompts(num_prompts, 6, QUICK.vocab_size, seed=9)
    groups = contest.ours["float32"].sample(asked, num_samples, 5, with_adapter)
    assert [[len(s.tokens) for s in group] for group in groups] == [[5] * num_samples] * num_prompts
    assert contest.peers["float32"].sample(asked, num_samples, 5, with_adapter).shape == (num_prompts * num_samples, 5)


@pytest.mark.parametrize("side", ["ours", "peers"])
def test_an_iteration_trains_on_what_it_sampled(contest, side):
    asked = workloads.prompts(2, 6, QUICK.vocab_size, seed=11)
    assert getattr(contest, side)["float32"].iterate(asked, 3, 4, seed=3) < 1e-4


@pytest.mark.parametrize("phase", memory.PHASES)
@pytest.mark.parametrize("team", ["ours", "peer"])
def test_every_phase_of_memory_runs(contest, phase, team):
    name = "ours float32" if team == "ours" else memory.PHASES[phase].likely
    settings = memory.Settings("quick", str(contest.directory), str(contest.adapter), phase, team, name, 1)
    found = memory.run_phase(settings)
    assert 0 <= found["added_bytes"] < found["peak_bytes"]


def test_different_losses_are_not_compared():
    check = LossCheck()
    check.add(1, "ours float32", 100.0, SFT)
    check.add(1, "padded float32", 100.01, SFT)
    check.add(2, "padded float32", 50.0, SFT)
    with pytest.raises(RuntimeError, match=r"packed float32 computed a loss of 101.0 where ours float32 .* 100.0"):
        check.add(1, "packed float32", 101.0, SFT)


def test_a_failing_row_does_not_stop_the_others(contest, capsys):
    text, has_succeeded = measure(replace(contest, peers={}), ["rl_batch", "runs"])
    assert not has_succeeded
    assert "Row `rl_batch` failed." in text
    assert "2 runs of 2 sequences" in text
    assert "Traceback" in capsys.readouterr().err


def test_profile_names_operations(contest):
    text = profile_ours(replace(contest, ours={"float32": contest.ours["float32"]}))
    assert "SFT step, float32" in text
    assert "Decoding 4 rows" in text
    assert "_LoraLinear" in text and "aten::" in text


def test_command_prints_and_writes_a_table(tmp_path, capsys):
    output = tmp_path / "table.md"
    assert main(["--quick", "--rows", "runs", "--threads", "1", "--repeats", "1", "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert output.read_text("utf-8") == printed.out
    assert "| 2 runs of 2 sequences, 48 tokens" in printed.out
    assert f"torch {torch.__version__}" in printed.out
    assert "bfloat16" in printed.out
    assert "quick runs: round 1" in printed.err


def test_command_refuses_an_unknown_row(capsys):
    with pytest.raises(SystemExit):
        main(["--rows", "sft,speed"])
    assert "there is no row 'speed'; there are sft, runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--service", "--rows", "latency,sft"], "there is no row 'sft'; there are start, latency, samples"),
        (["--rows", "latency"], "there is no row 'latency'; there are sft, runs"),
    ],
    ids=["service", "engine"],
)
def test_rows_belong_to_the_service_or_to_the_engine(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


# The official SDK leaves its first connection to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_a_server_loses_nothing_under_a_small_load(tmp_path):
    """Every row of the service, end to end; what it measures is not looked at, what it counts is."""
    if missing := missing_programs():
        pytest.skip(missing)
    output = tmp_path / "table.md"
    assert main(["--service", "--quick", "--threads", "1", "--output", str(output)]) == 0
    lines = [line.strip("| ").split(" | ") for line in output.read_text("utf-8").splitlines() if line.startswith("| ")]
    header, _, *rows = lines
    assert header == figures.HEADER
    assert {len(row) for row in rows} == {len(header)}
    assert {row[3] for row in rows} - {"-"} == {str(aim) for aim in figures.AIMS.values()}
    assert [row[1] for row in rows if row[0].endswith(": lost")] == ["0"] * 5
    assert len(rows) == 2 * len(SERVICE_ROWS) + 11
    gc.collect()


async def test_an_answer_that_is_an_error_is_not_taken_for_a_result():
    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\noops")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        pool = HttpPool(*server.sockets[0].getsockname())
        with pytest.raises(HttpError, match=r"/x was answered 500: b'oops'"):
            await pool.post("/x", b"")
        pool.close()


# ── what the harness is made of ───────────────────────────────────────────────────────────────────────


def test_models_are_of_their_sizes():
    assert [round(_num_parameters(shape) / 1e6, 1) for shape in (SMALL, SMOL)] == [52.2, 134.5]
    assert sum(SMALL.sizes.sft_lengths) == 2296
    assert sum(SMALL.sizes.sft_lengths) * SMALL.sizes.num_runs // 2 == 9184


def _num_parameters(shape):
    linear = sum(out_features * in_features for out_features, in_features in shape.linear_shapes())
    norms = (2 * shape.num_hidden_layers + 1) * shape.hidden_size
    return linear + norms + (0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size)


@pytest.mark.parametrize(
    ("aim", "ratio", "cells"),
    [
        ("sft", 1.35, ["1.35", "≥ 1.3", "yes"]),
        ("sft", 1.25, ["1.25", "≥ 1.3", "**no**"]),
        ("first_call", 1.1, ["1.10", "≤ 1.2", "yes"]),
        ("first_call", 1.3, ["1.30", "≤ 1.2", "**no**"]),
        ("", 9.0, ["9.00", "-", "-"]),
    ],
    ids=["met", "missed", "met-most", "missed-most", "none"],
)
def test_verdict(aim, ratio, cells):
    assert Line(text="", ours="", other="", which="", ratio=ratio, aim=aim).cells()[-3:] == cells


def test_contestants_take_turns_and_the_slow_are_left_out():
    seen = []

    def contestant(name, team, seconds, is_kept=False):
        def run(number):
            seen.append((number, name))
            time.sleep(seconds)

        return Contestant(name=name, team=team, run=run, warm_up=lambda: seen.append((0, name)), is_kept=is_kept)

    field = [
        contestant("a", "ours", 0.01),
        contestant("b", "peer", 0.01),
        contestant("slow", "peer", 0.2),
        contestant("kept", "peer", 0.2, is_kept=True),
    ]
    timings = compete(field, num_rounds=3, max_seconds=10, progress=lambda text: None)
    rounds = [[name for number, name in seen if number == k] for k in range(4)]
    assert rounds == [["a", "b", "slow", "kept"]] * 2 + [["a", "b", "kept"]] * 2
    assert timings.best("peer").name == "b"
    assert len(timings.best("peer", "slow").seconds) == 1
    assert "n=3" in timings.best("ours").rate(100)


def test_a_row_ends_when_its_time_is_up():
    slow = Contestant(name="a", team="a", run=lambda number: time.sleep(0.05), warm_up=lambda: None)
    timings = compete([slow], num_rounds=9, max_seconds=0.12, progress=lambda text: None)
    assert 1 <= len(timings.best("a").seconds) <= 2


def test_limit_grows_with_the_work():
    one, three = (gemm_seconds([(256, 256)] * count, 64, torch.float32) for count in (1, 30))
    assert 0 < one < three


def test_prompts_are_distinct_and_new_each_time():
    found = [p for seed in range(3) for count in (1, 4) for p in workloads.prompts(count, 6, QUICK.vocab_size, seed)]
    assert len({tuple(p) for p in found}) == len(found) == 15
    assert np.array_equal(workloads.prompts(2, 6, 384, 1), workloads.prompts(2, 6, 384, 1))


# ── figures of the service ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("aim", "value", "cells"),
    [
        ("heartbeat", 49.5, ["49.50 ms", "-", "≤ 50", "yes"]),
        ("heartbeat", 50.5, ["50.50 ms", "-", "≤ 50", "**no**"]),
        ("", 1234.5, ["1234 ms", "-", "-", "-"]),
    ],
    ids=["met", "missed", "none"],
)
def test_figure(aim, value, cells):
    assert Figure(text="x", value=value, unit="ms", aim=aim).cells() == ["x", *cells]


def test_one_lost_request_misses_the_aim():
    assert [Figure(text="x", value=value, aim="lost").cells()[-1] for value in (0, 1)] == ["yes", "**no**"]


def test_percentile_is_a_value_that_occurred():
    assert [percentile(range(1, 201), percent) for percent in (0, 50, 99, 100)] == [1, 100, 198, 200]
    assert percentile([3.0], 99) == 3.0


def test_growth_compares_the_last_quarter_with_the_second():
    assert growth_figure("x", [1, 50, 100, 100, 100, 100, 110, 110], 1.0).value == 1.1


def test_disk_bytes_counts_what_files_occupy(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"x" * 100_000)
    assert 100_000 <= disk_bytes(tmp_path) < 200_000


TIMES_OF_ENGINE = ServiceTimes(
    batch=0.01, token=2e-4, adapter=1e-3, step=0.01, create=0.02, save=0.05, load=0.03, decode=0.01, decode_more=0.001
)


def calls_per_event(num_tenants: int, num_steps: int) -> float:
    """Simulate tenants and count the calls of functions in the scheduler's core, for each event it handles."""
    simulation = Simulation(Workload(num_tenants=num_tenants, num_steps=num_steps, deaths=1), TIMES_OF_ENGINE)
    [replica] = simulation.replicas.values()
    handle, num_calls, num_events = replica.core.handle, 0, 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event == "call"

    def counted(happened, now):
        nonlocal num_events
        num_events += len(happened)
        sys.setprofile(count)
        try:
            return handle(happened, now)
        finally:
            sys.setprofile(None)

    replica.core.handle = counted
    found = simulation.run()
    assert len(found.steps) == num_steps
    assert found.num_replayed > 0
    assert simulation.check_weights() > 0
    return num_calls / num_events


@pytest.mark.service
def test_the_cost_of_an_event_does_not_grow_with_the_number_of_tenants():
    few, many = calls_per_event(128, 768), calls_per_event(1024, 2048)
    assert many < 1.25 * few


def simulate_replicas(num_replicas: int, deaths: int) -> Figures:
    load = Workload(
        num_tenants=160, num_steps=400, num_replicas=num_replicas, load=None, deaths=deaths, runs_per_user=1
    )
    simulation = Simulation(load, TIMES_OF_ENGINE)
    record = simulation.run()
    assert simulation.check_weights() > 0
    return figures_of(record)


@pytest.mark.service
def test_replicas_share_the_work_evenly_and_a_death_delays_only_its_own_runs():
    found = [simulate_replicas(replicas, deaths) for replicas in (1, 2) for deaths in (0, 1)]
    assert [(text, value) for text, value, _, holds in check(found) if not holds] == []
    assert all(one.num_loads for one in found)  # more runs than fit into the engines
    assert all(bool(one.replayed) is bool(one.workload.deaths) for one in found)


def test_turns_count_what_one_tenant_finishes_while_another_waits():
    def step(tenant: int, began: float, ended: float, place: str = "m#0") -> Step:
        return Step(tenant, (place, ""), began, began, ended)

    waiting = step(0, 0.5, 3.5)
    others = [step(1, number, number + 1) for number in range(5)]
    assert max_turns([waiting, *others]) == 3  # those that end at 1, 2 and 3
    assert max_turns([waiting, *[step(number, number, number + 1) for number in range(1, 5)]]) == 1
    assert max_turns([waiting, *[step(1, number, number + 1, "m#1") for number in range(5)]]) == 0


def test_the_simulated_engine_speaks_the_protocol(monkeypatch, tmp_path):
    monkeypatch.setenv(PROGRAM, "bench.simulated_engine")
    monkeypatch.setenv(TIMES, msgspec.json.encode(TIMES_OF_ENGINE).decode())
    commands = [
        messages.CreateRun(request_id="create", model_id="m", lora=messages.LoraConfig()),
        messages.OptimStep(request_id="step", model_id="m"),
        messages.SaveState(request_id="save", model_id="m", directory=str(tmp_path / "saved")),
        messages.LoadState(request_id="load", model_id="m", directory=str(tmp_path / "saved")),
        messages.SampleRequest(
            request_id="sample", prompt=np.arange(3), num_samples=2, params=messages.SamplingParams(max_tokens=4)
        ),
        messages.GetStatus(request_id="status"),
    ]
    training = messages.ForwardBackward(request_id="train", model_id="m", data=[ENGINE_DATUM], loss_fn="cross_entropy")
    with EngineProcess(EngineConfig()) as engine:
        began = time.perf_counter()
        found = [engine.submit(command).result(60) for command in commands]
        [trained] = engine.train(messages.TrainBatch(operations=[training]))
        assert len(trained.result(60).logprobs[0]) == len(ENGINE_DATUM.tokens)
        assert time.perf_counter() - began > 0.1  # it takes its time
    assert [len(sequence.tokens) for sequence in found[4].sequences] == [4, 4]
    assert is_whole(tmp_path / "saved")


def test_formats_of_the_base_are_measured(tmp_path, capsys):
    text, found = tmp_path / "text.jsonl", []
    text.write_text('a line of plain text\n{"question": "how many", "answer": "seven", "number": 7}\n')
    for kind in ("none", "nf4"):
        quantization.main(["lorimer/debug", str(text), "--kind", kind, "--rounds", "1"])
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found[0]["tokens"] == found[1]["tokens"] > 20
    assert 0 < abs(found[0]["nll"] - found[1]["nll"]) < 1
    lines = quantization.table(found).splitlines()
    assert [line.split(" | ")[0] for line in lines[:4]] == ["| weights", "|" + "---|" * 8, "| float32", "| nf4"]
