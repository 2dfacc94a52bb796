"""What is refused before it is on record."""

import pytest

from lorimer.engine import lora
from lorimer.errors import InvalidInput
from lorimer.scheduler import accepting


def test_the_largest_rank_is_that_of_the_engine():
    assert accepting.MAX_RANK == lora.MAX_RANK
    assert accepting.check_rank(lora.MAX_RANK) == lora.MAX_RANK


@pytest.mark.parametrize("rank", [0, -1, lora.MAX_RANK + 1])
def test_other_ranks_are_refused(rank):
    with pytest.raises(InvalidInput, match="1 to 512"):
        accepting.check_rank(rank)
