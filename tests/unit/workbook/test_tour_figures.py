"""The figures of the model tour: marks and words where the numbers say."""

import matplotlib as mpl
import pytest

from labkit.workbook.figures.landscape import Landmark, landscape
from labkit.workbook.figures.parameters import shares
from labkit.workbook.figures.routing import CHOSEN, Choice, routing


def texts(fig):
    fig.draw_without_rendering()
    return [text.get_text() for text in fig.findobj(mpl.text.Text) if text.get_text()]


def model(name, size):
    return Landmark(
        name=name,
        total_billion=size,
        active_billion=size / 2,
        cache_bytes=size,
        train_gflop=size,
    )


def test_a_bar_of_shares_fills_the_scale_and_ends_with_its_sum():
    parts = {"routed experts": 6 * 10**9, "attention": 3 * 10**9, "norms": 10**9}
    fig = shares({"tiny": parts}, title="t")
    widths = [bar.get_width() for bar in fig.axes[0].patches]

    assert sum(widths) == pytest.approx(100)
    assert {"routed experts 60 %", "attention 30 %", "10.0 B"} <= set(texts(fig))


def test_embedding_and_head_are_drawn_as_one_part():
    fig = shares({"tiny": {"embedding": 10**9, "head": 3 * 10**9}}, title="t")

    assert "embedding, head 100 %" in texts(fig)


def test_the_chosen_are_diamonds_and_closed_groups_are_named():
    choice = Choice(
        scores=[0.1, 0.9, 0.3, 0.2], chosen=[1], open_groups=[0], n_groups=2
    )
    fig = routing(choice, title="t", watched=(2, 0.25))
    diamonds = [line for line in fig.axes[0].lines if line.get_marker() == "D"]

    assert [line.get_color() for line in diamonds] == [CHOSEN]
    assert list(diamonds[0].get_xdata()) == [1]
    assert list(diamonds[0].get_ydata()) == [0.9]
    assert {"group 0", "closed"} <= set(texts(fig))


def test_every_mark_of_the_router_is_whole_and_clear_of_the_groups_names():
    scores = [0.0, *[0.5] * 254, 1.0]
    choice = Choice(scores=scores, chosen=[255], open_groups=[3], n_groups=4)
    fig = routing(choice, title="t", watched=(0, 0.0))
    fig.draw_without_rendering()
    axes = fig.axes[0]
    frame = axes.get_window_extent()
    marks = [  # a marker of 7 points is 10 pixels wide
        axes.transData.transform(point) for point in ((0, 0.0), (255, 1.0))
    ]
    names = [text.get_window_extent() for text in axes.texts if text.get_text()]

    assert all(frame.x0 + 5 < x < frame.x1 - 5 for x, _ in marks)
    assert all(y > frame.y0 + 5 for _, y in marks)
    assert marks[1][1] + 5 < min(name.y0 for name in names)


def test_each_model_has_its_values_beside_its_marks():
    fig = landscape([model("yours", 4.0), model("V3", 671.0)], title="two models")
    shown = texts(fig)

    assert {"yours", "V3", "4 · 2", "671 · 336", "two models"} <= set(shown)
    assert shown.count("671") == 2


def test_a_larger_model_stands_further_right_in_every_panel():
    fig = landscape([model("yours", 4.0), model("V3", 671.0)], title="t")
    marks = {"D": [], "o": []}
    for line in fig.axes[0].lines:
        if line.get_marker() in marks and line.get_markerfacecolor() != "white":
            marks[line.get_marker()].append(line.get_xdata()[0])

    assert all(a < b for a, b in zip(marks["D"], marks["o"], strict=True))
    assert len(marks["D"]) == 3
