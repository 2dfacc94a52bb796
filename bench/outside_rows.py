"""The part of outsiders in the rows: their contestants, the checks of what they compute, and their lines.

Every outsider is a team. The checks compare with our engine; an outsider that computes something else loses its
figures, and the report says so.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from bench import workloads
from bench.contest import TOLERANCE, Contest, LossCheck
from bench.outsiders import Outsider
from bench.report import Line
from bench.timing import Contestant, PeerFailed, Timing, Timings
from lorimer.engine.messages import Datum, SampledSequence

NUM_CHECKED = 8
"""Samples of an outsider that our engine scores."""


def outside_trainers(
    contest: Contest, check: LossCheck, make: Callable[[int], list[Datum]], loss_fn: str
) -> list[Contestant]:
    """Return the outsiders that train, in each layout; ``check`` has the losses of the others."""

    def contestant(outsider: Outsider, layout: str) -> Contestant:
        name = f"{outsider.label}, {layout}"

        def run(number: int) -> None:
            data = make(number)
            loss = outsider.train(data, loss_fn, layout)
            try:
                check.add(number, name, loss, data)
            except RuntimeError as error:
                raise _mismatch(contest, str(error)) from error

        return Contestant(name=name, team=outsider.name, run=run, warm_up=partial(run, 0))

    return [contestant(outsider, layout) for outsider in contest.outsiders for layout in outsider.layouts]


def outside_samplers(
    contest: Contest,
    make: Callable[[int], list[np.ndarray]],
    num_samples: int,
    adapters: list[int] | None,
    weights: str = "",
) -> list[Contestant]:
    """Return the outsiders that sample; ``adapters`` has the number of the adapter of each prompt.

    ``weights`` tells several teams of an outsider in one row apart.
    """
    num_new = contest.shape.sizes.sample_new

    def contestant(outsider: Outsider) -> Contestant:
        def warm_up() -> None:
            asked, count = make(0), outsider.warm_up_tokens(num_new)
            samples = outsider.sample(asked, num_samples, count, adapters)
            _check_samples(contest, outsider, asked, samples, count, adapters)

        def run(number: int) -> None:
            outsider.sample(make(number), num_samples, num_new, adapters)

        name = f"{outsider.label}, {weights}" if weights else outsider.label
        return Contestant(name=name, team=_team(outsider, weights), run=run, warm_up=warm_up)

    return [contestant(outsider) for outsider in contest.outsiders if outsider.can_sample]


def outside_iterators(contest: Contest, prompt: int) -> list[Contestant]:
    """Return the outsiders that sample, train on the samples and publish."""
    sizes = contest.shape.sizes

    def contestant(outsider: Outsider) -> Contestant:
        def run(number: int) -> None:
            asked = workloads.prompts(sizes.iteration_prompts, prompt, contest.shape.vocab_size, number)
            error = outsider.iterate(asked, sizes.iteration_samples, sizes.iteration_new, number)
            if not error <= TOLERANCE[outsider.setting.dtype]:
                raise _mismatch(contest, f"{outsider.label}: the loss of its own samples is off by {error:.2g}")

        return Contestant(name=outsider.label, team=outsider.name, run=run, warm_up=partial(run, 0))

    return [contestant(outsider) for outsider in contest.outsiders if outsider.can_iterate]


def outside_lines(
    contest: Contest,
    timings: Timings,
    text: str,
    ours: Timing,
    show: Callable[[Timing], str],
    weights: str = "",
    aim: str = "",
) -> list[Line]:
    """Return a line for each outsider that took part, with its figure or the reason why it has none.

    ``aim`` and the name of an outsider make the entry of ``AIMS`` that applies to it, if there is one.
    """
    lines = []
    for outsider in {outsider.name: outsider for outsider in contest.outsiders}.values():
        name = _team(outsider, weights)
        text_of = f"{text}: times {outsider.name}"
        if reason := timings.failures.get(name):
            release = outsider.environment.release
            lines.append(Line(text=text_of, ours=show(ours), other=f"failed: {reason}", which=release, ratio=None))
        elif timings.has(name):
            best = timings.best(name)
            ratio, key = best.median / ours.median, f"{aim} {outsider.name}"
            lines.append(Line(text=text_of, ours=show(ours), other=show(best), which=best.name, ratio=ratio, aim=key))
    return lines


def _check_samples(
    contest: Contest,
    outsider: Outsider,
    prompts: list[np.ndarray],
    samples: list[list[SampledSequence]],
    num_new: int,
    adapters: list[int] | None,
) -> None:
    """Raise ``PeerFailed`` unless our engine finds the logprobs that the outsider returned with its samples."""
    if wrong := [len(sample.tokens) for group in samples for sample in group if len(sample.tokens) != num_new]:
        raise _mismatch(contest, f"{outsider.label} returned {wrong[0]} tokens instead of {num_new}")
    numbers: Sequence[int | None] = [None] * len(prompts) if adapters is None else adapters
    rows = [
        (prompt, sample, None if number is None else contest.adapters[number])
        for prompt, group, number in zip(prompts, samples, numbers, strict=True)
        for sample in group
    ][:NUM_CHECKED]
    asked, returned, paths = (list(column) for column in zip(*rows, strict=True))
    dtype = outsider.setting.dtype
    scored = contest.ours[dtype].score(asked, [sample.tokens for sample in returned], paths)
    gaps = [np.abs(ours - sample.logprobs).mean() for ours, sample in zip(scored, returned, strict=True)]
    if not max(gaps) <= TOLERANCE[dtype]:
        weights = "the base" if adapters is None else "adapters"
        raise _mismatch(
            contest, f"{outsider.label}: logprobs of samples of {weights} differ by {max(gaps):.2g} a token"
        )


def _team(outsider: Outsider, weights: str) -> str:
    return f"{outsider.name} {weights}".rstrip()


def _mismatch(contest: Contest, text: str) -> PeerFailed:
    contest.mismatches.append(text)
    return PeerFailed(text)
