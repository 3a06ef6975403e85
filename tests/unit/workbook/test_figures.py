"""Figures: their words, their size on disk, and that drawing leaves no state."""

import io

import matplotlib as mpl
import pytest
from PIL import Image

from labkit.workbook.figures import (
    COLOURS,
    Part,
    bars,
    canvas,
    figure,
    figure_html,
    lines,
    png,
    stacks,
)
from labkit.workbook.figures.export import MAX_PNG_BYTES

PARTS = [Part(name="weights", amount=31.0), Part(name="Adam", amount=124.0)]


def texts(fig):
    fig.draw_without_rendering()
    return [text.get_text() for text in fig.findobj(mpl.text.Text) if text.get_text()]


def test_a_bar_carries_its_amount():
    shown = texts(bars(PARTS, title="Adam is larger", x="memory (GB)"))

    assert {"weights", "Adam", "31", "124", "memory (GB)", "Adam is larger"} <= set(
        shown
    )


def test_a_stack_names_its_parts_and_its_total():
    fig = stacks(
        {"16B": PARTS}, title="A sum", x="memory (GB)", limit=80, limit_name="one GPU"
    )
    shown = texts(fig)

    assert " 155" in shown
    assert {"weights", "Adam", "dashed: one GPU, 80"} <= set(shown)


def test_a_part_too_narrow_for_its_name_is_in_the_key():
    narrow = [Part(name="weights", amount=1.0), Part(name="Adam", amount=124.0)]
    fig = stacks({"16B": narrow}, title="A sum", x="memory (GB)")

    assert [text.get_text() for text in fig.legends[0].get_texts()] == [
        "weights",
        "Adam",
    ]


def test_curves_are_named_at_their_ends_without_overlap():
    fig = lines(
        {"MHA": [(1, 1), (2, 5.0)], "MLA": [(1, 1), (2, 5.01)]},
        title="Close together",
        x="context (tokens)",
        y="time (ms)",
    )
    fig.draw_without_rendering()
    ends = [text for text in fig.axes[0].texts if text.get_text() in (" MHA", " MLA")]
    boxes = [end.get_window_extent() for end in ends]

    assert len(ends) == 2
    assert all(0.8 < end.xy[1] < 1.1 for end in ends)
    assert not boxes[0].overlaps(boxes[1])


def test_a_log_axis_is_labelled_in_full_numbers():
    fig = lines({"a": [(128, 1.0), (1024, 1000.0)]}, title="t", x="x", y="y", log="xy")
    shown = texts(fig)

    assert {"128", "1,024", "1,000"} <= set(shown)


def test_more_curves_than_colours_are_refused():
    with pytest.raises(ValueError) as error:
        lines({str(n): [(0, 0)] for n in range(7)}, title="t", x="x", y="y")
    assert str(error.value) == (
        "a figure holds at most 6 curves, one per colour; got 7. Split it in two."
    )


def test_a_page_has_alt_text_and_caption_escaped():
    fig = bars(PARTS, title="t", x="x")
    page = figure_html(fig, alt='MLA "latent" <1>', caption="a < b", measured="3 ms")

    assert 'alt="MLA &quot;latent&quot; &lt;1&gt;"' in page
    assert '<figcaption>a &lt; b <data class="varies">3 ms</data></figcaption>' in page
    assert 'width="720"' in page


def test_a_figure_is_one_line_of_text(capsys):
    figure(bars(PARTS, title="t", x="x"), alt="two bars", caption="c")

    assert capsys.readouterr().out == "Figure: two bars\n"


def test_a_stored_figure_is_small_and_equal_each_time():
    first, again = (png(bars(PARTS, title="t", x="x")) for _ in range(2))

    assert first == again
    assert len(first) < MAX_PNG_BYTES / 4
    assert Image.open(io.BytesIO(first)).size[0] == 1440


def test_a_figure_too_large_to_store_is_refused(monkeypatch):
    monkeypatch.setattr("labkit.workbook.figures.export.MAX_PNG_BYTES", 100)

    with pytest.raises(ValueError, match="a stored figure may take 100 bytes; this"):
        png(bars(PARTS, title="t", x="x"))


def test_drawing_changes_no_setting_of_matplotlib():
    before = dict(mpl.rcParams)
    fig, _ = canvas("t", x="x")
    png(fig)

    assert dict(mpl.rcParams) == before


def test_every_meaning_has_its_own_colour():
    assert len(set(COLOURS.values())) == len(COLOURS)
