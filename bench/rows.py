"""Defines the rows: each is a function from a contest to lines of the table.

Only the fastest contestant of each side counts. Each round has new data, the same for both sides; if both compute a
loss, the losses must be equal.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch

from bench import memory, workloads
from bench.contest import Contest, LossCheck
from bench.limits import gemm_seconds
from bench.models import SHAPES
from bench.ours import FullLorimer
from bench.outside_rows import outside_lines, outside_trainers
from bench.peers import Layout, Plain
from bench.report import Line, compare
from bench.sampling_rows import measure_adapters, measure_iteration, measure_sampling
from bench.timing import Contestant, Timing, clock, little_garbage
from lorimer.engine.messages import Datum

_LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "prefix_groups": ("padded", "micro-batch 1", "completions"),
    "prefix_tree": ("padded", "packed", "micro-batch 1"),
    "prefix_sft": ("padded", "packed", "micro-batch 1"),
}
"""The peers of rows with common prefixes; ``completions`` needs completions that all end at the same position."""
FULL_LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "micro-batch 1")


def measure_sft(contest: Contest) -> list[Line]:
    """Measure forward, backward and step over mixed lengths, and the matrix products of that step alone."""
    shape, lengths = contest.shape, contest.shape.sizes.sft_lengths
    count = sum(lengths)
    layouts: tuple[Layout, ...] = ("padded", "packed", "micro-batch 1")
    make = partial(workloads.sft_data, lengths, shape.vocab_size)
    # Compare each of our dtypes with its own limit; the padded loop has a separate target.
    contestants = _training_contestants(
        contest, make, "cross_entropy", layouts, kept=("ours", "padded"), has_outsiders=True
    )
    limits: dict[str, list[float]] = {dtype: [] for dtype in contest.ours}

    def multiply(_: int, dtype: str) -> None:
        limits[dtype].append(gemm_seconds(shape.linear_shapes(), count, getattr(torch, dtype)))

    for dtype in limits:
        work = partial(multiply, dtype=dtype)
        name = f"matrix products {dtype}"
        contestants.append(Contestant(name=name, team="limit", run=work, warm_up=lambda: None, is_kept=True))
    timings = contest.compete("sft", contestants)
    ours, text = timings.best("ours"), f"SFT, {len(lengths)} sequences, {count} tokens"
    lines = [
        compare(f"{text}: times the best loop", ours, timings.best("peer"), count, "sft"),
        compare(f"{text}: times the padded loop", ours, timings.best("peer", "padded"), count, "sft padded"),
    ]
    lines += outside_lines(contest, timings, text, ours, partial(Timing.rate, count=count))
    return lines + [
        _limit_line(timings.best("ours", dtype), min(found), count, dtype) for dtype, found in limits.items()
    ]


def _limit_line(ours: Timing, limit_seconds: float, count: int, dtype: str) -> Line:
    return Line(
        text=f"SFT: fraction of the {dtype} GEMM limit",
        ours=ours.rate(count),
        other=f"{count / limit_seconds:.0f} tok/s",
        which=f"matrix products {dtype}",
        ratio=limit_seconds / ours.median,
        aim=f"limit {dtype}",
    )


def measure_runs(contest: Contest) -> list[Line]:
    """Measure several runs in one batch against the same tokens from one run."""
    shape, ours = contest.shape, contest.best_ours
    lengths = shape.sizes.sft_lengths * (shape.sizes.num_runs // 2)
    each, count = len(lengths) // shape.sizes.num_runs, sum(lengths)
    check = LossCheck()

    def run(number: int, num_runs: int) -> None:
        data = workloads.sft_data(lengths, shape.vocab_size, number)
        share = len(data) // num_runs
        batches = {name: data[i * share : (i + 1) * share] for i, name in enumerate(ours.runs[:num_runs])}
        check.add(number, ours.dtype, ours.train(batches, "cross_entropy"), data)

    contestants = [
        Contestant(name=name, team=name, run=partial(run, num_runs=num_runs), warm_up=partial(run, 0, num_runs))
        for name, num_runs in (("many", len(ours.runs)), ("ours, one run", 1))
    ]
    timings = contest.compete("runs", contestants)
    text = f"{len(ours.runs)} runs of {each} sequences, {count} tokens: fraction of one run's speed"
    return [compare(text, timings.best("many"), timings.best("ours, one run"), count, "runs")]


def measure_rl_batch(contest: Contest) -> list[Line]:
    """Measure a batch of long prompts without advantage and short completions."""
    shape, sizes = contest.shape, contest.shape.sizes
    make = partial(workloads.rl_data, sizes.rl_sequences, sizes.rl_prompt, sizes.rl_completion, shape.vocab_size)
    # All sequences have the same length, so packing would save nothing.
    layouts: tuple[Layout, ...] = ("padded", "micro-batch 1", "completions")
    contestants = _training_contestants(contest, make, "importance_sampling", layouts, has_outsiders=True)
    timings = contest.compete("rl_batch", contestants)
    count, ours = workloads.num_tokens(make(0)), timings.best("ours")
    text = f"RL batch, {sizes.rl_sequences} x ({sizes.rl_prompt} + {sizes.rl_completion}) tokens"
    lines = outside_lines(contest, timings, text, ours, partial(Timing.rate, count=count))
    return [compare(f"{text}: times the best loop", ours, timings.best("peer"), count, "rl_batch"), *lines]


def measure_prefixes(
    contest: Contest, row: str, what: str, make: Callable[[int], list[Datum]], loss_fn: str
) -> list[Line]:
    """Measure data that begin alike, against the same with every datum computed alone, and against the peers."""
    timings = contest.compete(row, _training_contestants(contest, make, loss_fn, _LAYOUTS[row], unshared=True))
    data = make(0)
    count = workloads.num_tokens(data)
    text = f"{what}, {count} tokens, {workloads.unique_fraction(data):.0%} unique"
    return [
        compare(f"{text}: times ours without sharing", timings.best("ours"), timings.best("unshared"), count, row),
        compare(f"{text}: times the best loop", timings.best("ours"), timings.best("peer"), count, f"{row} loop"),
    ]


def measure_groups(contest: Contest) -> list[Line]:
    """Measure the RL batch with several completions of each prompt."""
    sizes, vocab_size = contest.shape.sizes, contest.shape.vocab_size
    prompt, completion, size = sizes.rl_prompt, sizes.rl_completion, sizes.group_size

    def make(seed: int) -> list[Datum]:
        return workloads.rl_data(sizes.rl_sequences, prompt, completion, vocab_size, seed, size)

    what = f"RL batch, {sizes.rl_sequences} x ({prompt} + {completion}) in groups of {size}"
    return measure_prefixes(contest, "prefix_groups", what, make, "importance_sampling")


def measure_tree(contest: Contest) -> list[Line]:
    """Measure multi-turn episodes, each turn a datum of its own."""
    sizes, vocab_size = contest.shape.sizes, contest.shape.vocab_size
    turns, branches = sizes.tree_turns, sizes.tree_branches

    def make(seed: int) -> list[Datum]:
        return workloads.episode_data(sizes.sample_prompt, sizes.tree_turn, turns, branches, vocab_size, seed)

    what = f"{branches} episodes of {turns} turns"
    return measure_prefixes(contest, "prefix_tree", what, make, "importance_sampling")


def measure_system_prompt(contest: Contest) -> list[Line]:
    """Measure the SFT sequences, shortened by a common system prompt."""
    sizes, vocab_size = contest.shape.sizes, contest.shape.vocab_size
    system = sizes.system_prompt
    lengths = [max(8, length - system) for length in sizes.sft_lengths]

    def make(seed: int) -> list[Datum]:
        return workloads.sft_data(lengths, vocab_size, seed, system)

    return measure_prefixes(contest, "prefix_sft", f"SFT with a system prompt of {system}", make, "cross_entropy")


def measure_full(contest: Contest) -> list[Line]:
    """Measure the SFT step with all weights trained, then each loop's peak memory, in a process of its own."""
    shape, lengths = contest.shape, contest.shape.sizes.sft_lengths
    make, check = partial(workloads.sft_data, lengths, shape.vocab_size), LossCheck()

    def contestant(name: str, team: str, train: Callable[[list[Datum], str], float]) -> Contestant:
        def run(number: int) -> None:
            data = make(number)
            check.add(number, name, train(data, "cross_entropy"), data)

        return Contestant(name=name, team=team, run=run, warm_up=partial(run, 0))

    contestants = []
    for dtype in contest.ours:
        contestants.append(
            contestant(f"ours {dtype}", "ours", FullLorimer(contest.directory, dtype, contest.num_threads).train)
        )
        plain = Plain(contest.directory, dtype)
        contestants += [
            contestant(f"{layout} {dtype}", "peer", partial(plain.train, layout=layout)) for layout in FULL_LAYOUTS
        ]
    torch.set_num_threads(contest.num_threads)
    timings = contest.compete("full", contestants)
    names = [(one.team, one.name) for one in contestants]
    del contestants, plain
    count = sum(lengths)
    text = f"Full fine-tuning, {len(lengths)} sequences, {count} tokens"
    best = compare(f"{text}: times the best loop", timings.best("ours"), timings.best("peer"), count, "full")
    fastest = timings.best("ours").name
    peaks = [memory.measure_one(contest, "full", name) for team, name in names if team == "peer" or name == fastest]
    smallest = {
        team: min((peak for peak in peaks if (team, peak.name) in names), key=lambda peak: peak.peak_bytes)
        for team in ("ours", "peer")
    }
    line = Line(
        text="Peak memory, full fine-tuning, two steps: times less than the smallest loop",
        ours=str(smallest["ours"]),
        other=str(smallest["peer"]),
        which=smallest["peer"].name,
        ratio=smallest["peer"].peak_bytes / smallest["ours"].peak_bytes,
        aim="full memory",
    )
    return [best, line]


def measure_first_call(contest: Contest) -> list[Line]:
    """Compare the first call of a new shape with the second, for training and sampling."""
    ours, vocab_size = contest.best_ours, contest.shape.vocab_size
    longest, prompt = max(contest.shape.sizes.sft_lengths), contest.shape.sizes.sample_prompt

    def train(shape: int, seed: int) -> None:
        lengths = [longest // 8 + 3 * shape, longest // 4 + 5 * shape, longest // 2 + 7 * shape]
        ours.train_one(workloads.sft_data(lengths, vocab_size, seed), "cross_entropy")

    def sample(shape: int, seed: int) -> None:
        asked = workloads.prompts(9 + 2 * shape, prompt + 3 + 5 * shape, vocab_size, seed)
        ours.sample(asked, 1, 16, with_adapter=True)

    with little_garbage():
        return [_first_call_line(contest, "training", train), _first_call_line(contest, "sampling", sample)]


def _first_call_line(contest: Contest, name: str, work: Callable[[int, int], None]) -> Line:
    work(0, 0)
    first, warm = Timing("", ""), Timing("ours, second call", "")
    for shape in range(1, contest.shape.sizes.num_new_shapes + 1):
        for timing, seed in ((first, 2 * shape), (warm, 2 * shape + 1)):
            timing.seconds.append(clock(partial(work, shape, seed)))
        text = f"{contest.shape.name} first_call: {name} {first.seconds[-1]:.2f} s, then {warm.seconds[-1]:.2f} s"
        contest.progress(text)
    return Line(
        text=f"First call of a new shape over a warm one, {name}",
        ours=first.duration(),
        other=warm.duration(),
        which=warm.name,
        ratio=statistics.median(a / b for a, b in zip(first.seconds, warm.seconds, strict=True)),
        aim="first_call",
    )


def measure_memory(contest: Contest) -> list[Line]:
    """Measure the peak resident size of the fastest contestant of each side, in separate processes."""
    lines = []
    for phase in contest.shape.sizes.memory_phases:
        ours, peer = (memory.measure(contest, phase, team) for team in ("ours", "peer"))
        lines.append(
            Line(
                text=f"Peak memory, {phase}: times less",
                ours=str(ours),
                other=str(peer),
                which=peer.name,
                ratio=peer.peak_bytes / ours.peak_bytes,
            )
        )
    return lines


def measure_base(contest: Contest) -> list[Line]:
    """Measure what loading a base takes, in separate processes, over its weights."""
    lines = []
    for name in contest.shape.sizes.bases:
        for dtype in contest.ours:
            loaded = memory.measure_base(contest, SHAPES[name], dtype)
            weights = f"{loaded.weight_bytes / 2**20:.0f} MiB"
            sizes = {"base": loaded.resident_bytes, "base peak": loaded.peak_bytes}
            for aim, text in (("base", "resident memory"), ("base peak", "peak while it is loaded")):
                ours = f"{sizes[aim] / 2**20:.0f} MiB, ready after {loaded.processor_seconds:.1f} s of processor time"
                ratio = sizes[aim] / loaded.weight_bytes
                title = f"Base `{name}` in {dtype}: {text} over its weights"
                lines.append(Line(text=title, ours=ours, other=weights, which="weights", ratio=ratio, aim=aim))
    return lines


def _training_contestants(
    contest: Contest,
    make: Callable[[int], list[Datum]],
    loss_fn: str,
    layouts: tuple[Layout, ...],
    kept: tuple[str, ...] = (),
    unshared: bool = False,
    has_outsiders: bool = False,
) -> list[Contestant]:
    """Return ours in each dtype and the peers in each layout and dtype; ``make`` returns the data of a round.

    With ``unshared``, return ours without shared prefixes too, and with ``has_outsiders``, those of the contest.
    """
    check = LossCheck()

    def contestant(name: str, team: str, train: Callable[[list[Datum], str], float]) -> Contestant:
        def run(number: int) -> None:
            data = make(number)
            check.add(number, name, train(data, loss_fn), data)

        return Contestant(name=name, team=team, run=run, warm_up=partial(run, 0), is_kept=name.startswith(kept))

    ours = [contestant(f"ours {dtype}", "ours", side.train_one) for dtype, side in contest.ours.items()]
    if unshared:
        ours += [
            contestant(f"unshared {dtype}", "unshared", side.train_unshared) for dtype, side in contest.ours.items()
        ]
    peers = [
        contestant(f"{layout} {dtype}", "peer", partial(side.train, layout=layout))
        for dtype, side in contest.peers.items()
        for layout in layouts
    ]
    return ours + peers + (outside_trainers(contest, check, make, loss_fn) if has_outsiders else [])


ROWS: dict[str, Callable[[Contest], list[Line]]] = {
    "sft": measure_sft,
    "runs": measure_runs,
    "rl_batch": measure_rl_batch,
    "prefix_groups": measure_groups,
    "prefix_tree": measure_tree,
    "prefix_sft": measure_system_prompt,
    "sample_1x16": lambda c: measure_sampling(c, "sample_1x16", 1, c.shape.sizes.sample_many),
    "sample_32x1": lambda c: measure_sampling(c, "sample_32x1", c.shape.sizes.sample_prompts, 1),
    "sample_adapters": measure_adapters,
    "rl_iteration": lambda c: measure_iteration(c, "rl_iteration", c.shape.sizes.sample_prompt),
    "rl_iteration_long": lambda c: measure_iteration(c, "rl_iteration_long", c.shape.sizes.iteration_long_prompt),
    "full": measure_full,
    "first_call": measure_first_call,
    "memory": measure_memory,
    "base": measure_base,
}
"""In the order in which they run; later rows use the fastest contestants of earlier ones."""
OUTSIDE_ROWS = ("sft", "rl_batch", "sample_1x16", "sample_32x1", "sample_adapters", "rl_iteration")
"""The rows of ``--peers``, in which outsiders take part."""
