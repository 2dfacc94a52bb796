"""Which members of the official SDK each test exercises.

A test says so itself, with ``covers``; ``tools/compatibility.py`` reads that from the source, checks that the test
really uses each member, and makes ``docs/compatibility.md`` of it.
"""

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


def covers(*members: str) -> Callable[[Test], Test]:
    """Mark a test as one of ``members``: ``RestClient.whoami``, or ``tinker run list`` for a command."""

    def unchanged(test: Test) -> Test:
        return test

    return unchanged
