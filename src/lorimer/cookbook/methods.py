"""Methods of fine-tuning to compare: their names, the fields of their steps, and the search of their learning rates.

A name is ``lora-RANK``, ``loraplus-RANK`` or ``full``, then ``-OPTIMIZER`` if it is not AdamW, then ``@RATE`` where the
search is to begin. ``recipes/methods.py`` trains them. Schedule-free AdamW is not among them: a training client
measures it at other weights than it samples with.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from lorimer.cookbook.checkpoints import Method
from lorimer.errors import InvalidInput

LORA_PLUS_RATIO = 16.0
RATE_STEP = 3.0
"""Between two learning rates of a search."""
START_FACTORS = {"adamw": 1.0, "adam": 1.0, "adamw8bit": 1.0, "muon": 1.0, "lion": 0.2, "adafactor": 30.0}
"""Where a search begins, relative to AdamW's rule; Muon's update is scaled to the size of AdamW's."""
FIELDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam": {"beta2": 0.95},
    "adamw8bit": {"beta2": 0.95, "weight_decay": 0.0},
    "muon": {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
    "lion": {"weight_decay": 0.0},
    "adafactor": {"weight_decay": 0.0},
    "sgd": {"momentum": 0.9},
}
"""The fields of every step besides the learning rate: no weight decay, and AdamW's betas where there are any."""


@dataclass(frozen=True)
class Contender:
    """A method to compare."""

    name: str
    method: Method
    rank: int
    optimizer: str
    is_plus: bool
    start_rate: float

    def fields(self, rate: float) -> dict[str, Any]:
        """Return the fields of a step besides its learning rate."""
        fields = dict(FIELDS[self.optimizer])
        if self.optimizer == "muon":
            fields["adamw_learning_rate"] = rate
        return fields | ({"lr_multipliers": {"lora_B": LORA_PLUS_RATIO}} if self.is_plus else {})


def parse(text: str, lora_rate: float, full_rate: float) -> Contender:
    """Return the method that a part of ``--methods`` names."""
    name, _, given = text.strip().partition("@")
    kind, *rest = name.split("-")
    try:
        rank = int(rest.pop(0)) if kind in ("lora", "loraplus") else 0
        start = float(given) if given else None
    except (ValueError, IndexError):
        rank, start = -1, None
    optimizer = rest.pop(0) if rest else "adamw"
    is_rank_right = rank == 0 if kind == "full" else rank >= 1
    if rest or kind not in ("lora", "loraplus", "full") or not is_rank_right or optimizer not in FIELDS:
        raise InvalidInput(
            f"{text!r} is not a method; accepted are lora-RANK, loraplus-RANK and full, followed by -OPTIMIZER"
            f" ({', '.join(FIELDS)}) and @RATE if wanted"
        )
    if start is None and optimizer not in START_FACTORS:
        raise InvalidInput(f"{text!r}: {optimizer} has no rule for its learning rate; give one, as in {name}@0.1")
    rule = {"lora": lora_rate, "loraplus": lora_rate / math.sqrt(LORA_PLUS_RATIO), "full": full_rate}[kind]
    rate = start if start is not None else rule * START_FACTORS[optimizer]
    if not (math.isfinite(rate) and rate > 0):
        raise InvalidInput(f"{text!r}: the learning rate is {rate}; a number above 0 is accepted")
    return Contender(name, "full" if kind == "full" else "lora", rank or 1, optimizer, kind == "loraplus", rate)


async def search(measure: Callable[[float], Awaitable[float]], start: float, max_rates: int) -> dict[float, float]:
    """Return the nll of each rate that was tried: three, and more while the best of them is the first or the last.

    With fewer than three allowed, it begins with one.
    """
    found: dict[float, float] = {}
    exponents = [-1, 0, 1] if max_rates >= 3 else [0]
    while exponents:
        for exponent in exponents:
            rate = start * RATE_STEP**exponent
            found[rate] = await measure(rate)
        rates = sorted(found)
        best = min(rates, key=lambda rate: found[rate])
        edge = {rates[0]: -1, rates[-1]: 1}.get(best, 0)
        is_done = not edge or len(found) >= max_rates
        exponents = [] if is_done else [round(math.log(best / start, RATE_STEP)) + edge]
    return dict(sorted(found.items()))
