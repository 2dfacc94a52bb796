"""Sums of two numbers below 100, as questions with answers, and a tenth of them to measure with.

That tenth is the one that ``lorimer/tiny`` has not seen in pretraining either; docs/tiny.md tells of it.
"""

import hashlib
import random

Sum = tuple[int, int]

NUM_TEST = 200


def is_held_out(a: int, b: int) -> bool:
    """Return whether a pair is in the tenth that lorimer/tiny has not seen in pretraining."""
    digest = hashlib.sha256(f"{min(a, b)} {max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < 10


def split_sums() -> tuple[list[Sum], list[Sum]]:
    """Return the sums to train on, and ``NUM_TEST`` of the others."""
    sums = [(a, b) for a in range(100) for b in range(100)]
    held_out = [pair for pair in sums if is_held_out(*pair)]
    return [pair for pair in sums if not is_held_out(*pair)], random.Random(0).sample(held_out, NUM_TEST)


def sum_rows(sums: list[Sum]) -> list[dict[str, str]]:
    """Return a question and its answer for each sum."""
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in sums]
