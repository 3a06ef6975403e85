"""Orders that cannot end, or lack something, are refused with who waits for whom."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.parallel.pipeline import SCHEDULES, orders, parse, timeline_of


def test_ranks_that_wait_in_a_circle_are_named_with_what_they_wait_for():
    rows = parse(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    with pytest.raises(ValueError) as caught:
        timeline_of(rows)

    assert str(caught.value) == (
        "ranks must not wait for each other in a circle; rank 0 stops at 0B0, which "
        "needs 1B0 of rank 1, listed behind 1F1; rank 1 stops at 1F1, which needs 0F1 "
        "of rank 0, listed behind 0B0. Move an action forward, such as 1B0."
    )
    mended = parse(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"])
    assert timeline_of(mended).busy == (6, 6)


def test_a_circle_can_pass_a_rank_that_is_where_it_should_be():
    # Rank 1 stands at what rank 2 needs; to mend, only the others need another order.
    rows = parse(
        [
            "0F0 3F0 0F1 3F1 3B0 3B1 0B0 0B1",
            "1F0 1F1 4F0 4F1 4B0 4B1 1B0 1B1",
            "2F1 2F0 5F0 5F1 5B0 5B1 2B0 2B1",
        ]
    )
    with pytest.raises(ValueError) as caught:
        timeline_of(rows)

    assert str(caught.value) == (
        "ranks must not wait for each other in a circle; rank 0 stops at 3F0, which "
        "needs 2F0 of rank 2, listed behind 2F1; rank 2 stops at 2F1, which needs 1F1 "
        "of rank 1; rank 1 stops at 1F1, which needs 0F1 of rank 0, listed behind 3F0. "
        "Move an action forward, such as 2F0."
    )


def test_a_pair_whose_halves_need_each_other_is_refused():
    with pytest.raises(ValueError) as caught:
        timeline_of(parse(["0F0+0B0", "1F0 1B0"]))

    assert str(caught.value) == (
        "ranks must not wait for each other in a circle; rank 0 stops at 0F0+0B0, "
        "which needs 1B0 of rank 1, listed behind 1F0; rank 1 stops at 1F0, which "
        "needs 0F0 of rank 0. Move an action forward, such as 1B0, or part a pair."
    )
    with pytest.raises(ValueError, match="which needs 0F0 of rank 0. Part a pair."):
        timeline_of(parse(["0F0+0B0", "1F0+1B0"]))


def test_a_rank_can_wait_for_itself():
    with pytest.raises(ValueError) as caught:
        timeline_of(parse(["0B0 0F0"]))

    assert str(caught.value) == (
        "ranks must not wait for each other in a circle; rank 0 stops at 0B0, which "
        "needs 0F0, listed behind 0B0. Move an action forward, such as 0F0."
    )


@settings(max_examples=40)
@given(
    schedule=st.sampled_from(SCHEDULES),
    swaps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 11)), max_size=4),
)
def test_a_shuffled_order_runs_or_is_refused_and_never_hangs(schedule, swaps):
    rows = [list(order) for order in orders(schedule, 2, 4)]
    for rank, index in swaps:
        index %= len(rows[rank]) - 1
        rows[rank][index : index + 2] = reversed(rows[rank][index : index + 2])
    rows = tuple(map(tuple, rows))
    try:
        timeline = timeline_of(rows)
    except ValueError as error:
        assert "in a circle; rank" in str(error)
    else:
        ran = tuple(tuple(s.step for s in spans) for spans in timeline.spans)
        assert ran == rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["0F0 0B0 0B0"],
            "every action must be done once; got 0B0 on rank 0 and again on rank 0. "
            "Leave one out.",
        ),
        (
            ["0F0 0B0", "1F0"],
            "a stage must run F and then B, or I and W, for each micro-batch; stage 1 "
            "runs F for micro-batch 0. Add what is missing, or take out what is double",
        ),
        (
            ["0F0 0I0"],
            "stage 0 runs F and I for micro-batch 0. Add what is missing",
        ),
        (["0F0 0B0 2F0 2B0"], "stage 1 runs nothing for micro-batch 0. Add"),
        (
            ["0F0", "0B0"],
            "the rank that ran a forward pass must run its backward pass, because it "
            "keeps the activations; stage 0 runs micro-batch 0 on ranks 0 and 1. Move",
        ),
        (["0F0 0B0", ""], "every rank must have something to do; got an empty order."),
        ([], "every rank must have something to do; got an empty order."),
    ],
)
def test_incomplete_orders_are_refused(rows, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        timeline_of(parse(rows))
