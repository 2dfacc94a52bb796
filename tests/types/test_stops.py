"""Stop strings in text that comes piece by piece: what a look at the whole text finds, without its cost."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from lorimer.types.stops import StopMatcher

STOPS = st.lists(st.text("ab", max_size=6) | st.text("abc\n", max_size=3), max_size=6)


@settings(max_examples=500, deadline=None)
@given(STOPS, st.lists(st.text("abc\n", max_size=30), min_size=1, max_size=3))
def test_every_state_is_what_a_look_at_the_whole_text_finds(stops, texts):
    """One matcher for several texts, as for the choices of a request."""
    matcher = StopMatcher(stops)
    for text in texts:
        state = matcher.start
        for end in range(1, len(text) + 1):
            state = matcher.step(state, text[end - 1])
            seen = text[:end]
            found = max((stop for stop in stops if stop and seen.endswith(stop)), key=len, default=None)
            assert state.found == found
            begun = [n for n in range(end + 1) if any(stop.startswith(seen[end - n :]) for stop in stops)]
            assert state.depth == max(begun, default=0)


def test_hostile_stops_cost_a_few_microseconds_a_character():
    """Strings that almost match, over and over, and strings whose ends begin all others."""
    long = "a" * 1000
    families = {
        "almost": [f"{long}{chr(0x100 + i)}bc" for i in range(64)],
        "ends": [(long + "b")[i:] + "c" for i in range(64)],
    }
    for stops in families.values():
        start = time.process_time()
        matcher = StopMatcher(stops)
        state = matcher.start
        for char in (long + "b") * 20:
            state = matcher.step(state, char)
            assert state.found is None
        assert time.process_time() - start < 2.0


def test_stops_that_never_begin_make_no_states():
    matcher = StopMatcher([chr(0x4E00 + i) * 4096 for i in range(256)])
    state = matcher.start
    for char in "plain text" * 100:
        state = matcher.step(state, char)
    assert state is matcher.start and not state._children
