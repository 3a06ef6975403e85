"""Columns of memory: what they say, and where a limit or a mark stands."""

import matplotlib as mpl
import pytest
from matplotlib.patches import PathPatch

from labkit.memory.report import PARTS
from labkit.workbook.figures.export import MAX_PNG_BYTES, png
from labkit.workbook.figures.memory import LOOKS, Limit, columns_figure

COLUMNS = {
    "forward": {"weights": 2e9, "activations": 3e9},
    "optimizer": {"weights": 2e9, "moments": 4e9},
}


def texts(fig):
    fig.draw_without_rendering()
    return [text.get_text() for text in fig.findobj(mpl.text.Text) if text.get_text()]


def columns(**more):
    return columns_figure(COLUMNS, title="A finding", x="instant", **more)


def test_every_part_has_a_look_of_its_own():
    assert {*LOOKS} == {*PARTS}
    assert len(set(LOOKS.values())) == len(PARTS)


def test_each_column_has_its_name_and_its_total():
    shown = texts(columns())

    assert {"forward", "optimizer", "5", "6", "memory (GB)", "A finding"} <= set(shown)


def test_the_key_names_the_parts_that_are_there():
    fig = columns()

    key = [text.get_text() for text in fig.legends[0].get_texts()]
    assert key == ["weights", "moments", "activations"]


def test_parts_lie_on_each_other_in_order():
    patches = [p for p in columns().axes[0].get_children() if type(p) is PathPatch]
    tops = [patch.get_path().vertices[:, 1].max() for patch in patches]

    assert tops == [2.0, 6.0, 5.0]


def test_a_limit_is_drawn_with_its_name():
    fig = columns(limit=Limit(n_bytes=8e9, name="card"))

    assert "card, 8 GB" in texts(fig)
    assert fig.axes[0].get_ylim()[1] > 8


@pytest.mark.parametrize(
    ("n_bytes", "note"),
    [(80e9, "instant; far above: card, 80 GB"), (1e8, "instant; near 0: card, 0.1 GB")],
)
def test_a_limit_that_cannot_be_drawn_is_written(n_bytes, note):
    fig = columns(limit=Limit(n_bytes=n_bytes, name="card"))

    assert note in texts(fig)
    assert fig.axes[0].get_ylim()[1] == pytest.approx(1.12 * 6)


def test_a_mark_lies_across_its_column():
    fig = columns(marks={"optimizer": 5.5e9})
    (mark,) = fig.axes[0].lines

    assert list(mark.get_xdata()) == [0.52, 1.48]
    assert list(mark.get_ydata()) == [5.5, 5.5]
    assert "predicted" in texts(fig)


@pytest.mark.parametrize(
    ("n_bytes", "unit", "total"),
    [(3e8, "MB", "300"), (3e9, "GB", "3"), (9e12, "GB", "9,000"), (42e12, "TB", "42")],
)
def test_the_unit_follows_the_highest_column(n_bytes, unit, total):
    fig = columns_figure({"0": {"weights": n_bytes}}, title="t", x="stage")

    assert {f"memory ({unit})", total} <= set(texts(fig))


def test_of_many_columns_only_the_highest_carries_its_total():
    many = {str(n): {"weights": 1e9 * (1 + n % 7)} for n in range(40)}
    fig = columns_figure(many, title="t", x="stage")

    assert [text.get_text() for text in fig.axes[0].texts] == ["7"]
    assert [label.get_text() for label in fig.axes[0].get_xticklabels()][:2] == [
        "0",
        "2",
    ]


def test_no_word_is_cut_off_and_the_file_is_small():
    everything = {name: dict.fromkeys(PARTS, 9.99e9) for name in map(str, range(16))}
    fig = columns_figure(
        everything,
        title="t",
        x="stage",
        limit=Limit(n_bytes=85.5e9, name="H800"),
        marks={"0": 8e10},
    )
    fig.draw_without_rendering()
    boxes = [text.get_window_extent() for text in fig.findobj(mpl.text.Text)]

    assert min(box.x0 for box in boxes) >= 0
    assert max(box.x1 for box in boxes) <= fig.bbox.width
    assert max(box.y1 for box in boxes) <= fig.bbox.height
    assert len(png(fig)) < MAX_PNG_BYTES
