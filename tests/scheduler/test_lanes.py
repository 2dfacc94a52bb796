"""A lane gives every operation once, in order, whatever the order of arrivals, refusals and losses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorimer.scheduler.runs import Lane, Operation


def operation(seq_id: int) -> Operation:
    return Operation("", "", "", "", "run", seq_id, "optim_step", status="held")


@given(st.permutations(range(1, 13)), st.sets(st.integers(1, 12)))
def test_any_order_of_arrival(order, refused):
    lane, given_out = Lane(), []
    for seq_id in order:
        if seq_id in refused:
            lane.skip(seq_id)
        else:
            lane.add(operation(seq_id))
        with pytest.raises(ValueError, match="already arrived"):
            lane.add(operation(seq_id))  # a retry is told apart from what is missing
        lane.skip(seq_id)  # and a refused retry changes nothing
        while lane.ready:
            given_out.append(lane.ready.popleft().seq_id)
        arrived = set(order[: order.index(seq_id) + 1])
        first_missing = next(n for n in range(1, 14) if n not in arrived)
        assert lane.next_seq == first_missing
        held = sorted(n for n in arrived - refused if n > first_missing)
        assert [op.seq_id for op in lane.held()] == held
        assert lane.missing == (first_missing if held else None)
    assert given_out == sorted(set(order) - refused)


@given(st.sets(st.integers(1, 40), min_size=1), st.sets(st.integers(1, 40)), st.integers(0, 10))
def test_giving_up_closes_every_gap(arrived, refused, base):
    lane = Lane(base + 1)
    for seq_id in arrived:
        lane.skip(base + seq_id) if seq_id in refused else lane.add(operation(base + seq_id))
    for seq_id in refused - arrived:
        lane.skip(base + seq_id)
    waiting, gaps = lane.held(), lane.gaps()
    lost = {seq - base for first, last in gaps for seq in range(first, last + 1)}
    expected = set(range(1, waiting[-1].seq_id - base)) if waiting else set()
    assert lost == expected - arrived - refused
    lane.give_up(gaps, waiting)
    assert lane.missing is None and not lane.gaps()
    assert all(lane.has_passed(op.seq_id) for op in waiting)
    assert not set(waiting) & set(lane.ready)
    lane.skip(lane.next_seq)
    lane.add(operation(lane.next_seq))
    assert lane.missing is None


def test_a_number_far_away_costs_nothing():
    lane = Lane()
    far = operation(10**15)
    lane.add(far)
    assert lane.gaps() == [(1, 10**15 - 1)]
    lane.give_up(lane.gaps(), lane.held())
    assert lane.next_seq == 10**15 + 1
