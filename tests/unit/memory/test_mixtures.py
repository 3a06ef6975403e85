"""The search for mixtures, against all that there are."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.memory.mixtures import (
    MOST_KEPT,
    Choice,
    Chunk,
    Mixture,
    mixtures,
    piled,
    thinned,
    undominated,
)

SIZES = st.integers(0, 30)


@st.composite
def blocks(draw):
    after = draw(SIZES)
    return [
        Choice((str(name),), draw(SIZES), draw(SIZES), draw(SIZES), draw(SIZES), after)
        for name in range(draw(st.integers(1, 3)))
    ]


rows = st.lists(blocks(), min_size=1, max_size=4)


def fullest(choices):
    """Return the most bytes that live when the backward plays these choices."""
    most = 0
    for index, choice in enumerate(choices):
        before = sum(x.kept for x in choices[:index])
        later = sum(x.after for x in choices[index + 1 :])
        most = max(most, before + choice.fullest + later)
    return most


def cost(choices):
    return sum(choice.cost for choice in choices)


@given(row=rows, backward=st.integers(0, 100), forward=st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_the_cheapest_mixture_within_limits_is_found(row, backward, forward):
    best = min(
        (
            cost(choices)
            for choices in product(*row)
            if fullest(choices) <= backward and sum(x.held for x in choices) <= forward
        ),
        default=None,
    )
    found = (m.cost for m in mixtures(row, limit=backward) if m.other <= forward)

    assert next(found, None) == best


@given(
    row=rows,
    other=rows,
    n_kept=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    limit=st.integers(0, 250),
)
@settings(max_examples=40, deadline=None)
def test_the_cheapest_pile_of_micro_batches_is_found(row, other, n_kept, limit):
    waiting = 7, 3

    def peak(pair):
        kept = [sum(x.kept for x in choices) for choices in pair]
        return sum(n * x for n, x in zip(n_kept, kept, strict=True)) + max(
            fullest(choices) - own + more
            for choices, own, more in zip(pair, kept, waiting, strict=True)
        )

    pairs = product(product(*row), product(*other))
    best = min(
        (cost(a) + cost(b) for a, b in pairs if peak((a, b)) <= limit), default=None
    )
    chunks = [
        Chunk(each, n, more)
        for each, n, more in zip((row, other), n_kept, waiting, strict=True)
    ]
    found = (m.cost for m in piled(chunks) if m.kept + m.other <= limit)

    assert next(found, None) == best


def test_policies_are_those_of_the_choices_in_their_order():
    first = [Choice(("none",), 0, 9, 9, 9, 1), Choice(("full",), 4, 1, 1, 9, 1)]
    rest = [Choice(("none", "moe"), 1, 5, 5, 6, 2)]

    cheap, small = mixtures([first, rest])
    assert cheap.policies == ("none", "none", "moe")
    assert small == Mixture(5, 6, 11, ("full", "none", "moe"))


def test_what_is_worse_in_all_is_dropped_and_nothing_else():
    kept = [Mixture(1, 9, 9, ()), Mixture(2, 5, 10, ()), Mixture(3, 4, 4, ())]
    worse = [Mixture(2, 9, 9, ("a",)), Mixture(3, 5, 10, ()), Mixture(4, 4, 5, ())]

    assert undominated(worse + kept[::-1]) == kept


def test_of_too_many_the_ends_are_left():
    found = [Mixture(price, -price, 0, ()) for price in range(1000)]
    few = thinned(found)

    assert len(few) == MOST_KEPT
    assert few[0] == found[0]
    assert few[-1] == found[-1]
    assert thinned(found[:MOST_KEPT]) == found[:MOST_KEPT]
