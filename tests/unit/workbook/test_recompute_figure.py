"""Memory against time: names that can be read, and lines where they belong."""

import itertools

import matplotlib as mpl
import pytest

from labkit.workbook.figures.recompute import Level, Place, frontier


def figure(places, **more):
    fig = frontier(places, title="t", x="time (%)", y="memory (GB)", **more)
    fig.draw_without_rendering()
    return fig


def names(fig, wanted):
    found = {text.get_text(): text for text in fig.axes[0].texts}
    return [found[name].get_window_extent() for name in wanted]


CROWD = [
    Place(name="none", time=0, memory=133),
    Place(name="every 4th", time=6.9, memory=107),
    Place(name="experts", time=7.4, memory=108),
    Place(name="attention", time=7.0, memory=104),
    Place(name="full", time=17, memory=26),
    Place(name="your choice", time=6.8, memory=105, meaning="chosen"),
    Place(name="the article", time=25, memory=60, meaning="claim"),
]


def test_names_of_a_crowd_do_not_overlap_and_stay_inside():
    fig = figure(CROWD)
    boxes = names(fig, [place.name for place in CROWD])
    frame = fig.axes[0].get_window_extent()

    for left, right in itertools.combinations(boxes, 2):
        assert not left.overlaps(right)
    for box in boxes:
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1 + 1
        assert frame.y0 <= box.y0
        assert box.y1 <= frame.y1 + 1


def test_the_line_joins_the_best_in_order_of_time():
    best = [
        Place(name="full", time=20, memory=1, is_best=True),
        Place(name="none", time=0, memory=10, is_best=True),
        Place(name="cheap", time=2, memory=5, is_best=True),
    ]
    (line, *_) = figure([*best, Place(name="x", time=9, memory=9)]).axes[0].lines

    assert list(line.get_xdata()) == [0, 2, 20]
    assert list(line.get_ydata()) == [10, 5, 1]


@pytest.mark.parametrize(("height", "is_drawn"), [(85, True), (900, False)])
def test_a_limit_is_drawn_if_it_is_near(height, is_drawn):
    fig = figure(CROWD, levels=[Level(name="an H800", memory=height)])
    texts = {text.get_text() for text in fig.axes[0].texts}

    assert ("an H800" in texts) == is_drawn
    assert fig.axes[0].get_ylim()[0] == 0


def test_all_points_are_inside_and_memory_starts_at_zero():
    axes = figure(CROWD).axes[0]
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()

    assert y0 == 0
    for place in CROWD:
        assert x0 < place.time < x1
        assert 0 <= place.memory < y1


def test_a_single_policy_without_cost_is_no_error():
    fig = figure([Place(name="none", time=0, memory=0)])

    assert any(isinstance(text, mpl.text.Text) for text in fig.axes[0].texts)
