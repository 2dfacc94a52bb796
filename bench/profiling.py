"""Profiles our SFT step and decoding with torch's profiler."""

from collections.abc import Callable
from functools import partial

from torch.profiler import ProfilerActivity, profile

from bench import workloads
from bench.contest import Contest

NUM_OPERATIONS = 25


def profile_ours(contest: Contest) -> str:
    """Return tables of the most expensive operations, for each dtype."""
    sizes, vocab_size = contest.shape.sizes, contest.shape.vocab_size
    parts = []
    for dtype, side in contest.ours.items():
        data = workloads.sft_data(sizes.sft_lengths, vocab_size, 0)
        side.train_one(data[:2], "cross_entropy")
        parts += [f"SFT step, {dtype}:", _top(partial(side.train_one, data, "cross_entropy"))]
        # Short prompts, so that decoding dominates the profile.
        warm, asked = (workloads.prompts(sizes.sample_prompts, 4, vocab_size, seed) for seed in (0, 1))
        side.sample(warm, 1, 2, with_adapter=True)
        text = f"Decoding {sizes.sample_prompts} rows with an adapter, {dtype}:"
        parts += [text, _top(partial(side.sample, asked, 1, sizes.sample_new, with_adapter=True))]
    return "\n\n".join(parts)


def _top(run: Callable[[], object]) -> str:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return f"```\n{profiler.key_averages().table(sort_by='self_cpu_time_total', row_limit=NUM_OPERATIONS)}\n```"
