"""Timelines equal what is published where that holds, and say where ranks are stuck."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import Layout
from labkit.memory.stages import in_flight, virtual_stages
from labkit.parallel.pipeline import (
    SCHEDULES,
    Span,
    Times,
    parse,
    pipeline_timeline,
    published_bubble,
    published_live,
    timeline_of,
)
from labkit.parallel.pipeline.actions import Action, actions_of
from labkit.parallel.pipeline.deadlock import gives, needs
from labkit.parallel.pipeline.orders import chunks_per_rank

quarters = st.integers(1, 12).map(lambda n: n / 4)
"""Times that floats add up exactly."""


def test_two_ranks_by_hand():
    # Rank 1 begins when the first forward has come, and its backward goes back at 4;
    # rank 0 fills the time with the second forward.
    timeline = pipeline_timeline("1f1b", 2, 2, Times(f=1, b=2))
    seen = [[(s.start, s.stop, str(s.step[0])) for s in r] for r in timeline.spans]

    assert seen == [
        [(0, 1, "0F0"), (1, 2, "0F1"), (4, 6, "0B0"), (7, 9, "0B1")],
        [(1, 2, "1F0"), (2, 4, "1B0"), (4, 5, "1F1"), (5, 7, "1B1")],
    ]
    assert timeline.seconds == 9
    assert timeline.busy == (6, 6)
    assert timeline.idle == (3, 3)
    assert timeline.gaps == (3, 0)
    assert (timeline.bubble, timeline.bubble_share) == (3, 1 / 3)
    assert timeline.written(1) == "1F0 1B0 1F1 1B1"
    assert repr(timeline) == (
        "Timeline(2 ranks in 9 s: bubble 3 s, 33.3%; 2 stages kept)"
    )


def test_sends_delay_what_comes_from_another_rank_only():
    alone = pipeline_timeline("zbv", 1, 2, Times(send=5))
    two = pipeline_timeline("1f1b", 2, 2, Times(f=1, b=2, send=0.5))

    assert alone.bubble == 0
    assert two.spans[1][0] == Span(1.5, 2.5, (Action(1, "F", 0),))
    # Two sends lie on the longest way: the first forward's and the last gradient's.
    assert two.seconds == 9 + 2 * 0.5


def test_a_pair_takes_less_by_what_it_hides():
    rows = parse(["0F0 0F1+0B0 0B1"])
    timeline = timeline_of(rows, Times(f=1, b=2, hidden=0.75))

    assert [s.stop - s.start for s in timeline.spans[0]] == [1, 2.25, 2]


def test_unequal_stages_wait_for_the_slowest():
    times = Times(f=(1.0, 3.0), b=(2.0, 6.0), w=1)
    timeline = pipeline_timeline("1f1b", 2, 10, times)

    assert timeline.busy == (30, 90)
    assert timeline.idle[1] == 1 + 2


@pytest.mark.parametrize(
    ("schedule", "vpp", "idle", "share"),
    [
        ("gpipe", 1, 9.0, 0.158),
        ("1f1b", 1, 9.0, 0.158),
        ("1f1b", 2, 4.5, 0.086),
        ("zero-bubble", 2, 1.5, 0.030),
        ("zbv", 2, 1.5, 0.030),
        ("dualpipev", 2, 3.0, 0.059),
    ],
)
def test_the_bubbles_of_one_model_under_all_schedules(schedule, vpp, idle, share):
    # Four ranks, 16 micro-batches; F, I and W of a rank take 1, shared by its chunks.
    # Figures of another simulator, which timed the listings of PyTorch.
    times = Times(f=1 / vpp, b=2 / vpp, w=1 / vpp)
    timeline = pipeline_timeline(schedule, 4, 16, times, vpp=vpp)

    assert timeline.bubble == pytest.approx(idle)
    assert timeline.bubble_share == pytest.approx(share, abs=5e-4)


@settings(max_examples=20)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    pp=st.integers(1, 6),
    spare=st.integers(0, 5),
    f=quarters,
    b=quarters,
)
def test_gpipe_and_1f1b_wait_as_published_whatever_passes_take(
    schedule, pp, spare, f, b
):
    times = Times(f=f, b=b, w=0)
    timeline = pipeline_timeline(schedule, pp, pp + spare, times)

    assert timeline.idle == pytest.approx([published_bubble(schedule, pp, times)] * pp)


@settings(max_examples=20)
@given(pp=st.integers(1, 6), rounds=st.integers(2, 3), w=quarters, data=st.data())
def test_zero_bubble_waits_as_published_where_weights_fit_in(pp, rounds, w, data):
    f, i = (w + data.draw(st.integers(0, 6)) / 4 for _ in range(2))
    times = Times(f=f, b=i + w, w=w)
    timeline = pipeline_timeline("zero-bubble", pp, pp * rounds, times)

    expected = published_bubble("zero-bubble", pp, times)
    assert timeline.idle == pytest.approx([expected] * pp)


@settings(max_examples=20)
@given(
    folded=st.booleans(),
    half=st.integers(1, 4),
    spare=st.integers(0, 4),
    w=quarters,
    data=st.data(),
)
def test_dualpipe_waits_as_published_where_forward_and_backward_match(
    folded, half, spare, w, data
):
    f = w + data.draw(st.integers(0, 6)) / 4
    hidden = data.draw(st.integers(0, 4)) / 4 * f
    times = Times(f=f, b=f + w, w=w, hidden=hidden)
    schedule, pp = ("dualpipev", half) if folded else ("dualpipe", 2 * half)
    n = (2 * half + spare) * (1 if folded else 2)
    timeline = pipeline_timeline(schedule, pp, n, times)

    assert timeline.bubble == pytest.approx(published_bubble(schedule, pp, times))


@settings(max_examples=25)
@given(
    schedule=st.sampled_from(["zero-bubble", "dualpipe"]),
    half=st.integers(1, 3),
    f=quarters,
    i=quarters,
    w=quarters,
)
def test_the_bubble_is_under_the_published_only_in_dualpipe_with_short_forwards(
    schedule, half, f, i, w
):
    times = Times(f=f, b=i + w, w=w)
    found = pipeline_timeline(schedule, 2 * half, 4 * half, times).bubble
    if not (schedule == "dualpipe" and f < i and w <= i):
        assert found >= published_bubble(schedule, 2 * half, times) - 1e-9


@pytest.mark.parametrize(
    ("schedule", "pp", "times", "sign"),
    [
        ("zero-bubble", 4, Times(f=1, b=2.5, w=1.5), 1),
        ("zero-bubble", 4, Times(f=0.5, b=2, w=1), 1),
        ("dualpipe", 8, Times(f=1, b=2.5, w=1), -1),
        ("dualpipe", 8, Times(f=1.5, b=2, w=1), 1),
        ("dualpipe", 8, Times(f=1, b=2.5, w=1.5), 1),
    ],
)
def test_elsewhere_the_published_bubbles_are_wrong(schedule, pp, times, sign):
    timeline = pipeline_timeline(schedule, pp, 4 * pp, times)

    assert (timeline.bubble - published_bubble(schedule, pp, times)) * sign > 0.4


@pytest.mark.parametrize("pp", [2, 4, 6])
def test_interleaving_divides_the_bubble_by_the_chunks(pp):
    for vpp in (1, 2, 3):
        times = Times(f=1 / vpp, b=2 / vpp, w=1 / vpp)
        timeline = pipeline_timeline("1f1b", pp, 4 * pp, times, vpp=vpp)
        assert timeline.bubble == pytest.approx((pp - 1) * 3 / vpp)


@pytest.mark.parametrize("pp", [1, 2, 4, 7])
def test_zbv_never_waits_between_its_first_step_and_its_last(pp):
    timeline = pipeline_timeline("zbv", pp, 3 * pp)

    assert timeline.gaps == (0,) * pp
    assert timeline.idle == (pp - 1,) * pp


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "dualpipe", "dualpipev"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_ranks_keep_as_much_as_published(schedule, pp):
    timeline = pipeline_timeline(schedule, pp, 6 * pp)
    kept = [sum(timeline.peak_live(rank).values()) for rank in range(pp)]

    assert max(kept) == published_live(schedule, pp)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("rounds", [2, 4])
def test_ranks_keep_what_memory_counts(schedule, vpp, pp, rounds):
    if chunks_per_rank(schedule, None) == 2 or schedule == "dualpipe":
        vpp = chunks_per_rank(schedule, None)
    layout, n = Layout(pp=pp, vpp=vpp), pp * rounds
    timeline = pipeline_timeline(schedule, pp, n, vpp=vpp)
    for rank in range(pp):
        kept = timeline.peak_live(rank)
        expected = in_flight(layout, rank, n, schedule=schedule)
        held = virtual_stages(layout, rank, schedule)
        assert tuple(kept.get(stage, 0) for stage in held) == expected


@settings(max_examples=25)
@given(
    schedule=st.sampled_from(SCHEDULES),
    half=st.integers(1, 3),
    rounds=st.integers(2, 3),
    f=quarters,
    i=quarters,
    w=quarters,
    send=quarters,
)
def test_nothing_starts_before_what_it_needs(schedule, half, rounds, f, i, w, send):
    pp = 2 * half
    times = Times(f=f, b=i + w, w=w, send=send)
    timeline = pipeline_timeline(schedule, pp, pp * rounds, times)
    n_stages = pp * chunks_per_rank(schedule, None)
    there = {
        gives(action): (span.stop, rank)
        for rank, spans in enumerate(timeline.spans)
        for span in spans
        for action in span.step
    }
    for rank, spans in enumerate(timeline.spans):
        assert all(a.stop <= b.start for a, b in pairwise(spans))
        for span in spans:
            for result in {r for a in span.step for r in needs(a, n_stages)}:
                stop, origin = there[result]
                assert stop + send * (origin != rank) <= span.start
    longest_way = n_stages * (f + i) + (pp - 1) * 2 * send
    assert timeline.seconds >= max(longest_way, *timeline.busy)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (
            {"b": 1.0, "w": 2.0},
            "w is a part of b and must be at most as long; got w=2.0 and b=1.0 for "
            "stage 0. Set b to the whole backward pass.",
        ),
        (
            {"hidden": 1.5},
            "hidden must leave an overlapped pair as long as the longer of the two, so "
            "be at most min(f, b)=1.0; got 1.5. Lower hidden.",
        ),
        (
            {"f": (1.0, 1.0, 1.0)},
            "f must be one number, or one for each of the 2 virtual stages; got 3 of "
            "them. Correct f.",
        ),
        ({"f": (1.0, -1.0)}, "f must be at least 0 and finite; got -1.0."),
        ({"send": float("nan")}, "send must be at least 0 and finite; got nan."),
    ],
)
def test_times_that_make_no_sense_are_refused(times, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline_timeline("1f1b", 2, 2, Times(**times))


def test_times_of_stages_are_a_tuple(unchecked):
    with pytest.raises(ValueError, match=re.escape("each virtual stage; got [1.0].")):
        Times(f=[1.0])


def test_published_figures_suppose_equal_stages():
    with pytest.raises(ValueError, match="suppose equal stages; got a time for each"):
        published_bubble("1f1b", 2, Times(f=(1.0, 2.0)))
    with pytest.raises(ValueError, match="schedule must be one of 'gpipe', '1f1b'"):
        published_bubble("zbv", 2)


def test_every_action_of_a_schedule_has_its_time():
    timeline = pipeline_timeline("dualpipev", 2, 4, Times(f=1, b=5, w=2, hidden=1))
    for spans in timeline.spans:
        for start, stop, step in spans:
            kinds = "".join(action.kind for action in actions_of([step]))
            assert stop - start == {"F": 1, "B": 5, "I": 3, "W": 2, "FB": 5}[kinds]
