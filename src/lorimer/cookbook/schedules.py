"""Learning rates over the steps of a run."""

import math
from typing import Literal, get_args

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(schedule: Schedule, step: int, total: int, base: float, warmup: int = 0) -> float:
    """The rate of step number ``step`` of ``total``: it rises to ``base`` in ``warmup`` steps, then falls to 0.

    ``constant`` does not fall. The first step after the warm-up has the rate ``base``.
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"the schedule is {schedule!r}; accepted are {', '.join(get_args(Schedule))}")
    if step < warmup:
        return base * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total - warmup, 1)
    match schedule:
        case "linear":
            return base * (1 - progress)
        case "cosine":
            return base * (1 + math.cos(math.pi * progress)) / 2
    return base
