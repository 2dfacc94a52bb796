"""Word problems in the manner of GSM8K, generated from a seed: for when the real ones cannot be had.

Numbers are small, wordings few, steps one or two; an answer has its equations and a last line ``#### n``. They exercise
the whole path of a GSM8K recipe and are learned by a small model, but say nothing about GSM8K itself. Replies to them
are graded as those to GSM8K: ``gsm8k.is_correct``.
"""

import random

NAMES = "Ada Bruno Clara David Elsa Felix Greta Henri Iris Jonas Klara Louis Marta Nils Olga Peter".split()
THINGS = "apples pens books coins stones cards balls cups eggs stamps shells keys plums hats".split()
PLACES = ["park", "garden", "market", "school", "kitchen", "old house"]

ONE_STEP = {
    "+": [
        "{n} has {a} {t} and buys {b} more. How many {t} does {n} have?",
        "{n} finds {a} {t} in the {p} and {b} {t} at home. How many {t} are there?",
        "There are {a} {t} on the table. {n} brings {b} more. How many {t} are there now?",
    ],
    "-": [
        "{n} has {a} {t} and gives away {b}. How many {t} are left?",
        "There are {a} {t} in a box. {n} takes {b}. How many {t} stay in the box?",
    ],
    "*": ["{n} has {a} boxes with {b} {t} in each. How many {t} does {n} have?"],
}
TWO_STEPS = [
    "{n} has {a} {t}, buys {b} more and then gives away {c}. How many {t} are left?",
    "{n} finds {a} {t} in the {p} and {b} {t} at home, and loses {c} of them. How many {t} does {n} still have?",
]


def generate_problems(number: int, seed: int = 0, share_of_two_steps: float = 0.2) -> list[dict[str, str]]:
    """Rows with ``question`` and ``answer``, as GSM8K has them. A longer list begins with a shorter one."""
    rng = random.Random(seed)
    return [_two_steps(rng) if rng.random() < share_of_two_steps else _one_step(rng) for _ in range(number)]


def _one_step(rng: random.Random) -> dict[str, str]:
    sign = rng.choices(list(ONE_STEP), weights=[6, 3, 1])[0]
    a, b = (rng.randint(2, 10), rng.randint(2, 10)) if sign == "*" else (rng.randint(1, 99), rng.randint(1, 99))
    if sign == "-":
        a, b = max(a, b), min(a, b)
    result = a * b if sign == "*" else a + b if sign == "+" else a - b
    question = _worded(rng, rng.choice(ONE_STEP[sign]), a=a, b=b)
    return {"question": question, "answer": f"{a} {sign} {b} = {result}\n#### {result}"}


def _two_steps(rng: random.Random) -> dict[str, str]:
    a, b = rng.randint(1, 60), rng.randint(1, 39)
    c = rng.randint(1, a + b - 1)
    question = _worded(rng, rng.choice(TWO_STEPS), a=a, b=b, c=c)
    return {"question": question, "answer": f"{a} + {b} = {a + b}\n{a + b} - {c} = {a + b - c}\n#### {a + b - c}"}


def _worded(rng: random.Random, text: str, **numbers: int) -> str:
    return text.format(n=rng.choice(NAMES), t=rng.choice(THINGS), p=rng.choice(PLACES), **numbers)
