"""What goes wrong in a training, noticed from its metrics: each check looks at recent lines and says what to do.

A check is a pure function of lines, oldest first, as ``metrics.jsonl`` has them, so a resumed run is told the same.
``MetricLog`` asks ``Health`` at each step; docs/train.md lists the checks, docs/rl.md the metrics they look at.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lorimer.cookbook.hyperparams import lora_learning_rate
from lorimer.errors import InvalidInput

Lines = Sequence[Mapping[str, Any]]

WINDOW = 200
"""Lines that checks see."""
TELL_AGAIN = 20
"""Steps in a row after which what is still wrong is told again."""
PREFIX = "health/"


@dataclass(frozen=True)
class Concern:
    name: str
    text: str
    """What is seen."""
    advice: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.text} {self.advice}"


def series(lines: Lines, name: str) -> list[float]:
    """Return the values of a metric, in order; one that was not finite, which JSON has as null, is NaN."""
    return [math.nan if line[name] is None else float(line[name]) for line in lines if name in line]


def _recent(lines: Lines, name: str, num_last: int, num_before: int) -> tuple[list[float], list[float]] | None:
    """Return the last finite values of a metric and all before them; none if there are too few."""
    values = [value for value in series(lines, name) if math.isfinite(value)]
    if len(values) < num_last + num_before:
        return None
    return values[len(values) - num_last :], values[: len(values) - num_last]


# ── reinforcement learning ────────────────────────────────────────────────────────────────────────────


def no_signal(lines: Lines) -> Concern | None:
    """Notice steps without an update, because no group had different rewards."""
    updates = [line for line in lines if "optim/num_updates" in line]
    idle = next((place for place, line in enumerate(reversed(updates)) if line["optim/num_updates"]), len(updates))
    if idle < 3:
        return None
    last = updates[-1]
    is_constant = last.get("env/all/reward/std") == 0
    shown = f"all rewards are {last['env/all/reward/total']:g}" if is_constant else "rewards differ only between groups"
    advice = ["the grader and the form of answers that it accepts", "how hard the problems are"]
    if last.get("env/all/by_group/size", 2) < 2:
        advice = ["the size of the groups, which must be at least 2"]
    elif last.get("env/all/frac_truncated", 0) > 0.5:
        advice = [f"max_tokens: {last['env/all/frac_truncated']:.0%} of the answers are cut off", *advice]
    return Concern(
        "no_signal",
        f"nothing was learned in the last {idle} steps, because no group had answers with different rewards ({shown}).",
        f"Look at {', '.join(advice)}. The answers are in rollouts.jsonl of the log directory.",
    )


def few_mixed_groups(lines: Lines) -> Concern | None:
    """Notice that few groups have different rewards; the others have no gradient."""
    found = _recent(lines, "env/all/by_group/frac_mixed", 5, 0)
    if found is None or not 0 < fmean(found[0]) < 0.2:
        return None
    good, bad = (sum(series(lines, f"env/all/by_group/frac_all_{kind}")[-5:]) for kind in ("good", "bad"))
    advice = (
        "Most are all wrong: begin with SFT or easier questions" if bad > good else "Most are all right: it is solved"
    )
    return Concern(
        "few_mixed_groups",
        f"only {fmean(found[0]):.0%} of the groups of the last 5 steps had different rewards; others teach nothing.",
        f"{advice}; a larger group_size gives more mixed groups.",
    )


def entropy_collapse(lines: Lines) -> Concern | None:
    """Notice that samples have become nearly the same."""
    found = _recent(lines, "optim/entropy", 3, 5)
    if found is None or not fmean(found[0]) < 0.2 * median(found[1]):
        return None
    return Concern(
        "entropy_collapse",
        f"entropy fell to {fmean(found[0]):.2g} from {median(found[1]):.2g}: the samples of a group become the same.",
        "Lower the learning rate, go back to an earlier checkpoint, or set kl_penalty_coef.",
    )


def divergence(lines: Lines) -> Concern | None:
    """Notice that entropy rises while the reward falls."""
    entropy, reward = (_recent(lines, name, 3, 5) for name in ("optim/entropy", "env/all/reward/total"))
    if entropy is None or reward is None or not fmean(entropy[0]) > 2 * median(entropy[1]):
        return None
    before, now = median(reward[1]), fmean(reward[0])
    if not now < before - 0.2 * max(abs(before), 0.1):
        return None
    return Concern(
        "divergence",
        f"the reward fell from {before:.2g} to {now:.2g} while entropy rose to {fmean(entropy[0]):.2g}.",
        "The learning rate is too high: resume from an earlier checkpoint with a third of it, or with warmup_steps.",
    )


def policy_drift(lines: Lines) -> Concern | None:
    """Notice that what is trained is no longer what was sampled from."""
    found = _recent(lines, "optim/kl_sample_train_v2", 3, 0)
    ratio = _recent(lines, "optim/ratio", 3, 0)
    if found is not None and min(found[0]) > 0.01:
        seen = f"the KL divergence of sampler and trainer is {fmean(found[0]):.2g}, above 0.01,"
    elif ratio is not None and all(not 0.8 <= value <= 1.25 for value in ratio[0]):
        seen = f"the mean probability ratio of trainer and sampler is {fmean(ratio[0]):.2g}, away from 1,"
    else:
        return None
    return Concern(
        "policy_drift",
        f"{seen} in each of the last 3 steps: updates are too far off-policy.",
        "Use fewer num_substeps, a smaller max_steps_off_policy, or a lower learning rate.",
    )


def reference_drift(lines: Lines) -> Concern | None:
    """Notice a jump of the policy away from its reference."""
    found = _recent(lines, "kl_policy_reference", 1, 5)
    if found is None or not found[0][0] > max(5 * median(found[1]), 0.05):
        return None
    return Concern(
        "reference_drift",
        f"the KL divergence from the reference jumped to {found[0][0]:.2g} from {median(found[1]):.2g}.",
        "Lower the learning rate, or raise kl_penalty_coef; the reward often falls soon after.",
    )


def truncation(lines: Lines) -> Concern | None:
    """Notice that many answers are cut off."""
    found = _recent(lines, "env/all/frac_truncated", 3, 0)
    if found is None or not min(found[0]) > 0.2:
        return None
    return Concern(
        "truncation",
        f"{fmean(found[0]):.0%} of the answers of the last 3 steps were cut off by max_tokens: rewards are noise.",
        "Raise max_tokens, or reward brevity; if answers do not end at all, check the renderer.",
    )


def length_reward(lines: Lines) -> Concern | None:
    """Notice that answers grow longer without being better, or that the reward follows their length."""
    length, reward = (series(lines, f"env/all/{name}") for name in ("ac_tokens_per_turn", "reward/total"))
    if len(length) < 10 or len(length) != len(reward) or not fmean(length[-5:]) > 1.5 * fmean(length[:5]):
        return None
    grown = f"answers grew from {fmean(length[:5]):.3g} to {fmean(length[-5:]):.3g} tokens"
    together = _correlation(length, reward)
    if together > 0.9:
        seen = f"{grown}, and the reward follows their length (correlation {together:.2f})."
    elif fmean(reward[-5:]) <= fmean(reward[:5]) + 0.02:
        seen = f"{grown}, and the reward did not rise."
    else:
        return None
    advice = "Read long answers in rollouts.jsonl: if they are not better, the grader rewards length by accident."
    return Concern("length_reward", seen, advice)


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    means = fmean(first), fmean(second)
    products = fmean((a - means[0]) * (b - means[1]) for a, b in zip(first, second, strict=True))
    squares = fmean((a - means[0]) ** 2 for a in first) * fmean((b - means[1]) ** 2 for b in second)
    return products / math.sqrt(squares) if squares > 0 else 0.0


def grader_errors(lines: Lines) -> Concern | None:
    """Notice a grader that often fails."""
    errors, graded = (sum(series(lines, f"grader/{name}")[-3:]) for name in ("errors", "graded"))
    num_steps = min(3, len(series(lines, "grader/errors")))
    last_steps = "last step" if num_steps == 1 else f"last {num_steps} steps"
    if not errors > 0.1 * (errors + graded):
        return None
    return Concern(
        "grader_errors",
        f"the grader failed for {errors / (errors + graded):.0%} of the answers of the {last_steps}, each graded 0.",
        "grader_error in rollouts.jsonl has the reason; raise grader_seconds if it is a timeout.",
    )


def malformed(lines: Lines) -> Concern | None:
    """Notice that the model loses the form of answers."""
    found = _recent(lines, "env/all/malformed", 3, 0)
    if found is None or not min(found[0]) > 0.3:
        return None
    return Concern(
        "malformed",
        f"{fmean(found[0]):.0%} of the answers of the last 3 steps had no proper end.",
        "Check max_tokens, the stop sequences and the renderer first, then lower the learning rate.",
    )


# ── every training ────────────────────────────────────────────────────────────────────────────────────


def skipped_steps(lines: Lines) -> Concern | None:
    """Notice that a step was skipped, or a loss was not finite."""
    skipped = series(lines, "optim/skipped")
    losses = [value for name in _LOSSES for value in series(lines[-1:], f"train/{name}")]
    if not (skipped and skipped[-1] and "optim/skipped" in lines[-1]) and not any(map(math.isnan, losses)):
        return None
    return Concern(
        "skipped_steps",
        f"a gradient or loss was not finite, and the step was skipped ({sum(skipped):g} of the last {len(skipped)}).",
        "Lower the learning rate, set grad_clip_norm to 1, and look at the examples of the step.",
    )


_LOSSES = ("nll", "loss")


def loss_spike(lines: Lines) -> Concern | None:
    """Notice a loss far above those before it."""
    for name in _LOSSES:
        found = _recent(lines, f"train/{name}", 1, 5)
        if found is None or f"train/{name}" not in lines[-1]:
            continue
        (last,), before = found
        usual = median(before[-10:])
        spread = median(abs(value - usual) for value in before[-10:])
        if last > usual + max(8 * spread, 0.5 * abs(usual), 0.1):
            return Concern(
                "loss_spike",
                f"train/{name} jumped to {last:.3g} from {usual:.3g}.",
                "One spike may be odd examples in the batch; if more follow, lower the learning rate or set "
                "grad_clip_norm to 1.",
            )
    return None


def loss_above_start(lines: Lines) -> Concern | None:
    """Notice that the loss has become larger than it was in the first steps."""
    for name in _LOSSES:
        found = _recent(lines, f"train/{name}", 3, 2)
        if found is not None and min(found[0]) > 1.3 * max(found[1][:2]) + 0.1:
            return Concern(
                "loss_above_start",
                f"train/{name} is {fmean(found[0]):.3g}, above the {found[1][0]:.3g} it began with.",
                "The learning rate is too high: begin again with a tenth of it, in another log directory.",
            )
    return None


def overfitting(lines: Lines) -> Concern | None:
    """Notice that the held-out loss rises while the training loss falls."""
    for name in _LOSSES:
        tests = [(place, value) for place, value in _placed(lines, f"test/{name}") if math.isfinite(value)]
        if len(tests) < 3:
            continue
        best_place, best = min(tests[:-1], key=lambda pair: pair[1])
        later = [value for place, value in tests if place > best_place]
        trained = [value for place, value in _placed(lines, f"train/{name}") if place > best_place]
        before = [value for place, value in _placed(lines, f"train/{name}") if place <= best_place]
        is_worse = len(later) >= 2 and min(later[-2:]) > best * 1.05 + 0.005
        if is_worse and trained and before and fmean(trained[-3:]) < fmean(before[-3:]):
            return Concern(
                "overfitting",
                f"test/{name} rose to {later[-1]:.3g} from {best:.3g} while train/{name} fell: rows are memorised.",
                "Take the checkpoint of the best value (save_every, keep), train fewer epochs, or with more rows.",
            )
    return None


def _placed(lines: Lines, name: str) -> list[tuple[int, float]]:
    return [
        (place, math.nan if line[name] is None else float(line[name]))
        for place, line in enumerate(lines)
        if name in line
    ]


def learning_rate_far(rate: float, rule: float, model: str) -> Concern | None:
    """Notice a learning rate that is far from the rule of ``hyperparams.py``."""
    if rule / 500 <= rate <= rule * 10:
        return None
    side = "above" if rate > rule else "below"
    return Concern(
        "learning_rate",
        f"the learning rate {rate:g} is far {side} {rule:.2g}, which the rule gives for {model}.",
        "Unless you have measured that it fits, take the rule's; recipes/sweep.py compares some.",
    )


CHECKS: tuple[Callable[[Lines], Concern | None], ...] = (
    no_signal,
    few_mixed_groups,
    entropy_collapse,
    divergence,
    policy_drift,
    reference_drift,
    truncation,
    length_reward,
    grader_errors,
    malformed,
    skipped_steps,
    loss_spike,
    loss_above_start,
    overfitting,
)


class Health:
    """Looks at each line of a run's metrics, and decides what is told now."""

    def __init__(self, config: Mapping[str, Any], before: Lines = ()) -> None:
        """``before`` are the lines of a run that is resumed."""
        self._lines: deque[Mapping[str, Any]] = deque(before, maxlen=WINDOW)
        self._config = config

    def look(self, metrics: Mapping[str, Any]) -> tuple[dict[str, float], list[Concern]]:
        """Return metrics that mark what is wrong at this step, and those concerns that are to be told."""
        concerns = [] if self._lines else _of_config(self._config)
        recent = [*self._lines, metrics]
        concerns += [concern for check in CHECKS if (concern := check(recent)) is not None]
        told = [concern for concern in concerns if self._num_steps_of(concern.name) % TELL_AGAIN == 0]
        marks = {f"{PREFIX}{concern.name}": 1.0 for concern in concerns}
        self._lines.append({**metrics, **marks})
        return marks, told

    def _num_steps_of(self, name: str) -> int:
        """Return for how many lines in a row this has been wrong already."""
        count = 0
        for line in reversed(self._lines):
            if f"{PREFIX}{name}" not in line:
                break
            count += 1
        return count


def _of_config(config: Mapping[str, Any]) -> list[Concern]:
    model, rate = config.get("base_model"), config.get("learning_rate")
    if not isinstance(model, str) or not isinstance(rate, int | float):
        return []
    try:
        rule = lora_learning_rate(model, is_full=config.get("method") == "full").value
    except InvalidInput:
        return []  # no rule is known for it
    found = learning_rate_far(float(rate), rule, model)
    return [] if found is None else [found]
