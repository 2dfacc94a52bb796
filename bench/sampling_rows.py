"""Defines the rows that sample: numbers of tokens of the base, of one adapter and of several, and RL iterations."""

from functools import partial
from pathlib import Path

from bench import workloads
from bench.contest import TOLERANCE, Contest
from bench.ours import Lorimer
from bench.outside_rows import outside_iterators, outside_lines, outside_samplers
from bench.peers import Peft
from bench.report import Line, compare
from bench.timing import Contestant, Timing, Timings


def measure_sampling(contest: Contest, row: str, num_prompts: int, num_samples: int) -> list[Line]:
    """Sample a fixed number of new tokens from distinct prompts, with the base and with an adapter."""
    sizes = contest.shape.sizes
    make = partial(workloads.prompts, num_prompts, sizes.sample_prompt, contest.shape.vocab_size)

    def run(number: int, side: Lorimer | Peft, with_adapter: bool) -> None:
        side.sample(make(number), num_samples, sizes.sample_new, with_adapter)

    contestants = [
        Contestant(
            name=f"{label} {dtype}, {weights}",
            team=f"{team} {weights}",
            run=partial(run, side=side, with_adapter=weights == "adapter"),
            warm_up=partial(run, 0, side=side, with_adapter=weights == "adapter"),
        )
        for weights in ("base", "adapter")
        for team, label, dtype, side in _sides(contest, "generate")
    ]
    contestants += outside_samplers(contest, make, num_samples, None, "base")
    contestants += outside_samplers(contest, make, num_samples, [0] * num_prompts, "adapter")
    timings = contest.compete(row, contestants)
    count, what = num_prompts * num_samples * sizes.sample_new, f"{num_prompts}x{num_samples}x{sizes.sample_new}"
    lines = []
    for weights in ("base", "adapter"):
        ours, text = timings.best(f"ours {weights}"), f"Sampling {what}, {weights}"
        lines.append(compare(f"{text}: times the best generate()", ours, timings.best(f"peer {weights}"), count, row))
        lines += outside_lines(contest, timings, text, ours, partial(Timing.rate, count=count), weights, "sample")
    return [*lines, _adapter_line(timings, count, what)]


def measure_adapters(contest: Contest) -> list[Line]:
    """Sample prompts with several adapters, all in one batch."""
    sizes = contest.shape.sizes
    make = partial(workloads.prompts, sizes.sample_prompts, sizes.sample_prompt, contest.shape.vocab_size)
    numbers = [i % len(contest.adapters) for i in range(sizes.sample_prompts)]
    paths = [contest.adapters[number] for number in numbers]

    one = [contest.adapters[0]] * len(paths)

    def run(number: int, side: Lorimer | Peft, paths: list[Path]) -> None:
        side.sample_with(make(number), sizes.sample_new, paths)

    def contestant(name: str, team: str, side: Lorimer | Peft, paths: list[Path]) -> Contestant:
        work = partial(run, side=side, paths=paths)
        return Contestant(name=name, team=team, run=work, warm_up=partial(work, 0))

    contestants = [
        contestant(f"{label} {dtype}", team, side, paths) for team, label, dtype, side in _sides(contest, "generate")
    ]
    contestants += [
        contestant(f"ours {dtype}, one adapter", "ours one", side, one) for dtype, side in contest.ours.items()
    ]
    contestants += outside_samplers(contest, make, 1, numbers)
    timings = contest.compete("sample_adapters", contestants)
    ours, count = timings.best("ours"), sizes.sample_prompts * sizes.sample_new
    text = f"Sampling {sizes.sample_prompts}x1x{sizes.sample_new}, {len(contest.adapters)} adapters"
    lines = outside_lines(contest, timings, text, ours, partial(Timing.rate, count=count), aim="sample")
    alone = timings.best("ours one", ours.name)
    cost = Line(
        text=f"{text}: time over that with one adapter",
        ours=ours.rate(count),
        other=alone.rate(count),
        which=alone.name,
        ratio=ours.median / alone.median,
        aim="several adapters",
    )
    return [compare(f"{text}: times generate()", ours, timings.best("peer"), count), *lines, cost]


def _adapter_line(timings: Timings, count: int, what: str) -> Line:
    adapter, base = timings.best("ours adapter"), timings.best("ours base")
    return Line(
        text=f"Sampling {what}: time with an adapter over time without",
        ours=adapter.rate(count),
        other=base.rate(count),
        which=base.name,
        ratio=adapter.median / base.median,
        aim="adapter cost",
    )


def measure_iteration(contest: Contest, row: str, prompt: int) -> list[Line]:
    """Sample, train on the samples, publish."""
    sizes = contest.shape.sizes

    def run(number: int, side: Lorimer | Peft, dtype: str) -> None:
        asked = workloads.prompts(sizes.iteration_prompts, prompt, contest.shape.vocab_size, number)
        error = side.iterate(asked, sizes.iteration_samples, sizes.iteration_new, number)
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"{type(side).__name__} {dtype}: loss is off by {error:.2g}; it samples other weights")

    contestants = [
        Contestant(
            name=f"{label} {dtype}",
            team=team,
            run=partial(run, side=side, dtype=dtype),
            warm_up=partial(run, 0, side=side, dtype=dtype),
        )
        for team, label, dtype, side in _sides(contest, "generate and PEFT")
    ]
    timings = contest.compete(row, contestants + outside_iterators(contest, prompt))
    ours, other = timings.best("ours"), timings.best("peer")
    what = f"{sizes.iteration_prompts}x{sizes.iteration_samples}x{sizes.iteration_new}"
    text = f"RL iteration {what}, prompts of {prompt}"
    line = Line(
        text=f"{text}: times as fast",
        ours=ours.duration(),
        other=other.duration(),
        which=other.name,
        ratio=other.median / ours.median,
    )
    return [line, *outside_lines(contest, timings, text, ours, Timing.duration)]


def _sides(contest: Contest, peer_label: str) -> list[tuple[str, str, str, Lorimer | Peft]]:
    """Return team, label, dtype and side of every contestant."""
    ours = [("ours", "ours", dtype, side) for dtype, side in contest.ours.items()]
    return [*ours, *(("peer", peer_label, dtype, side) for dtype, side in contest.peers.items())]
