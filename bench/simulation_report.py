"""``python -m bench --simulate``: simulates loads, checks what must hold, and writes tables and a plot.

One table is of a server of one process at 80 % load, for latency and the cost of the scheduler. The other is of tenants
that never pause over 1 to 64 replicas, with and without deaths of their processes.
"""

import itertools
import math
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from bench.service.figures import percentile
from bench.service_times import ServiceTimes, fit
from bench.simulate import Record, Simulation, Step, Workload
from bench.timing import say

ONE_PROCESS = [(tenants, deaths) for tenants in (100, 1_000, 10_000) for deaths in (0, 5)]
ONE_PROCESS_STEPS = 6_000
NUM_TENANTS, NUM_REPLICAS = (1_000, 10_000), (1, 2, 4, 8, 16, 32, 64)
BATCH_TOKENS = 2048
STEPS_PER_TENANT, STEPS_PER_REPLICA = 1, 160
"""Steps of one simulation of several replicas: the larger of the two numbers counts. 160 steps take about a minute."""
REPLICAS_PER_DEATH = 8

MAX_TURNS = 8
MIN_PART = 0.9
MAX_DELAY = 1.25


@dataclass(frozen=True)
class Figures:
    workload: Workload
    num_steps: int
    seconds: float
    """Of virtual time."""
    p50: float
    p99: float
    fairness: float
    """Jain's fairness index of the tenants' mean training time, from submit to result: 1 if all wait equally."""
    fairness_by_chance: float
    """The same after the times of all steps were dealt to the tenants at random."""
    turns: int
    """Most steps that one tenant finished while another one of its replica waited for a single step."""
    replayed: float
    """Share of the computed operations that were replayed."""
    idle: float
    num_loads: int
    num_moves: int
    p99_elsewhere: float
    """Of steps that no replica which died had part in."""
    slowest: float
    event_seconds: float
    operation_seconds: float

    @property
    def throughput(self) -> float:
        return self.num_steps / self.seconds


def measure(workload: Workload, times: ServiceTimes) -> Figures:
    return figures_of(Simulation(workload, times).run())


def figures_of(record: Record) -> Figures:
    seconds = record.ended - record.began
    durations = [step.ended - step.began for step in record.steps]
    elsewhere = [step.ended - step.began for step in record.steps if not record.dead.intersection(step.places)]
    return Figures(
        workload=record.workload,
        num_steps=len(durations),
        seconds=seconds,
        p50=percentile(durations, 50),
        p99=percentile(durations, 99),
        fairness=fairness(record.steps),
        fairness_by_chance=fairness(record.steps, random.Random(0)),
        turns=max_turns([*record.steps, *record.unfinished]),
        replayed=record.num_replayed / max(1, record.num_computed),
        idle=max(0.0, 1 - record.busy_seconds / (seconds * record.workload.num_engines)),
        num_loads=record.num_loads,
        num_moves=record.num_moves,
        p99_elsewhere=percentile(elsewhere, 99) if elsewhere else math.nan,
        slowest=max(durations),
        event_seconds=record.core_seconds / record.num_events,
        operation_seconds=record.core_seconds / record.num_operations,
    )


def fairness(steps: Sequence[Step], chance: random.Random | None = None) -> float:
    """Return Jain's index of the tenants' mean training times; with ``chance`` the times are shuffled before."""
    durations = [step.ended - step.train_began for step in steps]
    if chance is not None:
        chance.shuffle(durations)
    by_tenant: defaultdict[int, list[float]] = defaultdict(list)
    for step, duration in zip(steps, durations, strict=True):
        by_tenant[step.tenant].append(duration)
    means = [sum(values) / len(values) for values in by_tenant.values()]
    return sum(means) ** 2 / (len(means) * sum(mean**2 for mean in means))


def max_turns(steps: Sequence[Step]) -> int:
    """Return the most steps that one tenant finished while another one of its replica waited for a single step.

    With unfinished steps among ``steps`` their end is the present; so they count as waiting, and never as finished
    within the time of another.
    """
    by_place: defaultdict[str, list[Step]] = defaultdict(list)
    for step in steps:
        by_place[step.places[0]].append(step)
    return max(_max_turns(of_place) for of_place in by_place.values())


def _max_turns(steps: Sequence[Step]) -> int:
    ends: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        ends[step.tenant].append(step.ended)
    began = np.array([step.train_began for step in steps])
    ended = np.array([step.ended for step in steps])
    for turns in itertools.count(1):
        # From the first to the last of so many successive steps of one tenant: does a wait of another contain that?
        windows = [
            (times[first], times[first + turns - 1])
            for times in map(sorted, ends.values())
            for first in range(len(times) - turns + 1)
        ]
        if not windows:
            return turns - 1
        starts, stops = np.array(sorted(windows)).T
        earliest = np.append(np.minimum.accumulate(stops[::-1])[::-1], np.inf)
        if not (earliest[np.searchsorted(starts, began, side="right")] < ended).any():
            return turns - 1
    raise AssertionError


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────


def simulate(num_threads: int, is_quick: bool, plot: Path | None) -> str:
    """Return the report: the times of a real engine, both tables, and what must hold."""
    say("measuring an engine that serves the bundled model")
    times = fit(num_threads)
    lines = [f"Service times, fitted to an engine with lorimer/tiny: {times.describe()}", ""]
    lines += one_process_table(times, ONE_PROCESS[:2] if is_quick else ONE_PROCESS)
    found = sweep(times, *(((100,), (1, 2)) if is_quick else (NUM_TENANTS, NUM_REPLICAS)))
    lines += ["", *replicas_table(found), "", *rules(found)]
    if plot is not None:
        draw(found, plot)
    return "\n".join(lines)


def one_process_table(times: ServiceTimes, sizes: Sequence[tuple[int, int]]) -> list[str]:
    lines = [
        "| tenants | engine deaths | step p50 | step p99 | Jain (by chance) | turns | replayed | idle | runs loaded "
        "| core, µs an event | µs an operation |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for num_tenants, deaths in sizes:
        say(f"simulating {num_tenants} tenants of one process, {deaths} engine deaths")
        found = measure(Workload(num_tenants=num_tenants, num_steps=ONE_PROCESS_STEPS, deaths=deaths), times)
        lines.append(
            f"| {num_tenants:,} | {deaths} | {found.p50:.3f} s | {found.p99:.3f} s "
            f"| {found.fairness:.3f} ({found.fairness_by_chance:.3f}) | {found.turns} | {found.replayed:.1%} "
            f"| {found.idle:.0%} | {found.num_loads:,} | {1e6 * found.event_seconds:.1f} "
            f"| {1e6 * found.operation_seconds:.1f} |"
        )
    return lines


def sweep(times: ServiceTimes, num_tenants: Sequence[int], num_replicas: Sequence[int]) -> list[Figures]:
    """Simulate every combination, without and with deaths, on all cores."""
    loads = [
        Workload(
            num_tenants=tenants,
            num_steps=round(max(STEPS_PER_TENANT * tenants, STEPS_PER_REPLICA * replicas)),
            num_replicas=replicas,
            load=None,
            batch_tokens=BATCH_TOKENS,
            runs_per_user=1,
            deaths=deaths,
        )
        for tenants, replicas in itertools.product(num_tenants, num_replicas)
        for deaths in (0, max(1, replicas // REPLICAS_PER_DEATH))
    ]
    say(f"simulating {len(loads)} loads of several replicas")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        found = []
        for load, one in zip(loads, pool.map(measure, loads, itertools.repeat(times)), strict=True):
            say(f"{load.num_tenants} tenants, {load.num_replicas} replicas, {load.deaths} deaths: done")
            found.append(one)
        return found


def replicas_table(found: Sequence[Figures]) -> list[str]:
    alone = {
        one.workload.num_tenants: one for one in found if one.workload.num_replicas == 1 and not one.workload.deaths
    }
    lines = [
        "| tenants | replicas | deaths | steps/s | of N times one | step p50 | step p99 | Jain | turns | replayed "
        "| idle | runs loaded | moved |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        load = one.workload
        part = one.throughput / (load.num_replicas * alone[load.num_tenants].throughput)
        lines.append(
            f"| {load.num_tenants:,} | {load.num_replicas} | {load.deaths} | {one.throughput:.1f} | {part:.2f} "
            f"| {one.p50:.1f} s | {one.p99:.1f} s | {one.fairness:.3f} | {one.turns} | {one.replayed:.1%} "
            f"| {one.idle:.1%} | {one.num_loads:,} | {one.num_moves:,} |"
        )
    return lines


def rules(found: Sequence[Figures]) -> list[str]:
    """Return what must hold, each with what it is checked against and whether it holds."""
    return [
        "| what must hold | measured | accepted | holds |",
        "|---|---|---|---|",
        *(
            f"| {text} | {value:.2f} | {bound} | {'yes' if holds else '**no**'} |"
            for text, value, bound, holds in check(found)
        ),
    ]


def check(found: Sequence[Figures]) -> list[tuple[str, float, str, bool]]:
    turns = max(one.turns for one in found)
    checked = [
        (
            "while a tenant waits for one step, no other tenant of its replica finishes more than k steps",
            float(turns), f"k ≤ {MAX_TURNS}", turns <= MAX_TURNS,
        )
    ]  # fmt: skip
    by_load = {(one.workload.num_tenants, one.workload.num_replicas, bool(one.workload.deaths)): one for one in found}
    delays = [
        by_load[tenants, replicas, True].p99_elsewhere / by_load[tenants, replicas, False].p99
        for tenants, replicas, has_deaths in by_load
        if has_deaths and replicas > 1
    ]
    if delays:
        checked.append((
            "a death delays only its replica's runs: p99 of steps elsewhere, over p99 without deaths",
            max(delays), f"≤ {MAX_DELAY}", max(delays) <= MAX_DELAY,
        ))  # fmt: skip
    alive = {(tenants, replicas): one for (tenants, replicas, deaths), one in by_load.items() if not deaths}
    more = {key: one for key, one in alive.items() if key[1] > 1}
    for text, values in (
        ("N replicas do N times the steps of one: smallest part",
         [one.throughput / alive[tenants, 1].throughput / replicas for (tenants, replicas), one in more.items()]),
        ("twice as many replicas add as many steps again: smallest part",
         [one.throughput / alive[tenants, replicas // 2].throughput - 1 for (tenants, replicas), one in more.items()]),
    ):  # fmt: skip
        if values:
            checked.append((text, min(values), f"≥ {MIN_PART}", min(values) >= MIN_PART))
    return checked


# ── plot ──────────────────────────────────────────────────────────────────────────────────────────────


def draw(found: Sequence[Figures], path: Path) -> None:
    """Draw throughput and step times over the number of replicas."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=120)
    for color, tenants in zip(("tab:blue", "tab:orange"), NUM_TENANTS, strict=True):
        for has_deaths in (False, True):
            line = [
                one for one in found if one.workload.num_tenants == tenants and bool(one.workload.deaths) is has_deaths
            ]
            replicas = [one.workload.num_replicas for one in line]
            style = {"color": color, "linestyle": "--" if has_deaths else "-", "markersize": 4}
            name = f"{tenants:,} tenants{', deaths' if has_deaths else ''}"
            left.plot(replicas, [one.throughput for one in line], marker="o", label=name, **style)
            right.plot(replicas, [one.p50 for one in line], marker="o", label=f"p50, {name}", **style)
            right.plot(replicas, [one.p99 for one in line], marker="^", label=f"p99, {name}", alpha=0.5, **style)
            if not has_deaths:
                ideal = [line[0].throughput * count for count in replicas]
                left.plot(replicas, ideal, color=color, alpha=0.3, linewidth=5, label=f"N times one, {tenants:,}")
    for axes, title, corner in ((left, "steps per second", "upper left"), (right, "seconds of a step", "upper right")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(NUM_REPLICAS, [str(count) for count in NUM_REPLICAS])
        axes.set_xlabel("replicas")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc=corner)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
