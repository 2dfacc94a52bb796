"""Answers to grade-school word problems: the number that a text gives, and the score of many texts.

GSM8K ends a solution with ``#### n``. The number after the last such mark counts, with or without a sign, a currency,
thousands or decimals; numbers are compared as numbers. Sampling is left to the recipes.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lorimer.cookbook.evaluation import pass_at_k
from lorimer.errors import InvalidInput

_NUMBER = re.compile(
    r"""(?:(?P<sign>[-+\u2212\u2013])\s?)?
    (?:\\?[$€£¥]\s?(?P<inner>[-\u2212])?)?             # $5, \$5, $-5
    (?=\.?\d)
    (?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d*)            # 1,234 or 1234, or nothing before a point
    (?P<decimals>\.\d+)?
    (?:/(?P<below>\d+))?                               # 3/4""",
    re.VERBOSE,
)
_MARK = re.compile(r"####[ \t]*(?P<rest>[^\n]*)")
_BEFORE_A_NUMBER = re.compile(r"^[\s*_`(\[{:=~]*(?:\\boxed\{)?\s*")


def extract_answer(text: str, *, fallback: bool = False) -> Fraction | None:
    """The number after ``####``; with ``fallback``, where there is no mark, the last number of the text."""
    for mark in reversed(list(_MARK.finditer(text))):
        found = _NUMBER.match(_BEFORE_A_NUMBER.sub("", mark["rest"]))
        if found and (number := _value(found)) is not None:
            return number
    if not fallback or "####" in text:
        return None
    numbers = [number for found in _NUMBER.finditer(text) if (number := _value(found, within=text)) is not None]
    return numbers[-1] if numbers else None


def _value(found: re.Match[str], within: str = "") -> Fraction | None:
    """The number of a match. In a text "5 - 3", "10-12" and the dash of a list are no signs."""
    value = Fraction(f"{found['whole'].replace(',', '') or 0}{found['decimals'] or ''}")
    below = int(found["below"] or 1)
    if below == 0:
        return None
    has_sign = found["sign"] not in (None, "+")
    if within and has_sign:
        before = within[: found.start()]
        is_minus = before[-1:].isalnum() or before.rstrip()[-1:].isdigit()
        has_sign = not is_minus and not found[0][1:2].isspace()
    is_negative = has_sign or bool(found["inner"])
    return (-value if is_negative else value) / below


def is_correct(reply: str, answer: str, *, fallback: bool = False) -> bool:
    """Whether a reply gives the number of a worked answer, or of a bare one such as ``1,200``."""
    right = reference_number(answer)
    return extract_answer(reply, fallback=fallback) == right


def reference_number(answer: str) -> Fraction:
    """The number of a problem's own answer, which must have one."""
    right = extract_answer(answer, fallback=True)
    if right is None:
        raise InvalidInput(f"the answer {answer!r} has no number; a text that ends in '#### n' is accepted")
    return right


@dataclass(frozen=True, kw_only=True)
class Score:
    num_questions: int
    num_answers: int
    """More than there are questions where several were sampled for each."""
    accuracy: float
    """Share of the answers that are right."""
    answered: float
    """Share of the answers in which a number was found."""
    pass_at: dict[int, float]
    """By k, the chance that one of k answers to a question is right; where several were sampled."""

    def as_dict(self) -> dict[str, Any]:
        named = {f"pass@{k}": value for k, value in self.pass_at.items()}
        return {name: value for name, value in vars(self).items() if name != "pass_at"} | named


def score(rows: Iterable[Mapping[str, Any]], *, fallback: bool = False) -> Score:
    """The score of rows with ``question``, ``answer`` (what a model wrote) and ``reference`` (what is right)."""
    results: dict[str, list[bool]] = defaultdict(list)
    found = 0
    for row in rows:
        said = extract_answer(str(row["answer"]), fallback=fallback)
        found += said is not None
        results[str(row["question"])].append(said is not None and said == reference_number(str(row["reference"])))
    if not results:
        raise InvalidInput("there are no answers to score; at least one is needed")
    total = sum(map(len, results.values()))
    return Score(
        num_questions=len(results),
        num_answers=total,
        accuracy=sum(map(sum, results.values())) / total,
        answered=found / total,
        pass_at=_pass_at(list(results.values())),
    )


def _pass_at(results: Sequence[Sequence[bool]]) -> dict[int, float]:
    """For 1, 2, 4, ... up to the number of answers that every question has; nothing where that is 1."""
    most = min(map(len, results))
    powers = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    if most == 1:
        return {}
    return {k: sum(pass_at_k(len(each), sum(each), k) for each in results) / len(results) for k in powers}
