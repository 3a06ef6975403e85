"""The model of an allocator: holes, and what never fits into them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.memory import Event, first_fit_bytes


def test_a_freed_place_is_used_again():
    assert first_fit_bytes([Event(1, 10), Event(1, -10), Event(2, 8)], align=1) == 10


def test_a_hole_that_is_too_small_is_lost():
    events = [Event(1, 10), Event(2, 5), Event(1, -10), Event(3, 11)]

    assert first_fit_bytes(events, align=1) == 10 + 5 + 11


def test_neighbouring_holes_join():
    events = [
        *(Event(1, 10), Event(2, 10), Event(3, 5)),
        *(Event(1, -10), Event(2, -10), Event(4, 20)),
    ]

    assert first_fit_bytes(events, align=1) == 25


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("align", [0, -1, 1.5, True])
def test_sizes_are_rounded_to_whole_bytes(align):
    with pytest.raises(ValueError, match="align must be a whole number of at least 1"):
        first_fit_bytes([Event(1, 5)], align=align)


def test_sizes_are_rounded_up():
    assert first_fit_bytes([Event(1, 1), Event(2, 513)]) == 512 + 1024


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=40))
def test_the_space_holds_all_that_lives_at_once_and_no_more_than_was_asked_for(steps):
    events, live, peak = [], [], 0
    for number, (size, is_freed) in enumerate(steps, start=1):
        events.append(Event(number, size))
        live.append(Event(number, size))
        peak = max(peak, sum(event.n_bytes for event in live))
        if is_freed:
            oldest = live.pop(0)
            events.append(Event(oldest.number, -oldest.n_bytes))

    assert peak <= first_fit_bytes(events, align=1) <= sum(size for size, _ in steps)
