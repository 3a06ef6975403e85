"""Widgets without a browser: what a moved control changes, and what is stored."""

import time

import pytest
from ipywidgets import HTML, IntSlider

from labkit.workbook import widgets
from labkit.workbook.display import Shown
from labkit.workbook.figures import Part, bars


def draw(rank):
    return bars([Part(name="cache", amount=float(rank))], title="t", x="values")


def describe(rank):
    if rank > 1000:
        raise ValueError("rank must be at most 1000; got 1024.")
    return f"a rank of {rank} keeps {rank + 64} values"


@pytest.fixture
def shown(monkeypatch):
    """Show an explorer and return its control, status, image and stored output."""
    outputs = []
    monkeypatch.setattr("labkit.workbook.widgets.bundle.show", outputs.append)
    rank = widgets.slider("latent rank", (64, 1024), value=512, step=64, unit="values")
    widgets.explore(draw, describe, caption="What a token keeps.", rank=rank)
    (output,) = outputs
    status, image, _ = (box for box in output.live.children if isinstance(box, HTML))
    return rank, status, image, output


def test_the_stored_output_is_a_figure_and_one_line(shown):
    *_, output = shown

    assert isinstance(output, Shown)
    assert output.text == "a rank of 512 keeps 576 values"
    assert 'alt="a rank of 512 keeps 576 values"' in output.html
    assert "What a token keeps. Static view: run the cell" in output.html


def test_moving_a_control_changes_status_and_alt_text(shown):
    rank, status, image, _ = shown
    rank.value = 256

    assert "a rank of 256 keeps 320 values" in status.value
    assert 'role="status"' in status.value
    assert 'alt="a rank of 256 keeps 320 values"' in image.value


def test_an_error_is_told_and_the_figure_stays(shown):
    rank, status, image, _ = shown
    before = image.value
    rank.value = 1024

    assert "✗ rank must be at most 1000; got 1024." in status.value
    assert image.value == before
    rank.value = 64
    assert "✗" not in status.value


def test_an_error_at_the_start_fails_the_cell():
    rank = IntSlider(1024, 0, 2000)
    with pytest.raises(ValueError, match="at most 1000"):
        widgets.explore(draw, describe, caption="", rank=rank)


def test_a_move_takes_less_than_a_blink(shown):
    rank, *_ = shown
    seconds = []
    for value in (128, 192, 256, 320, 384):
        start = time.perf_counter()
        rank.value = value
        seconds.append(time.perf_counter() - start)

    assert min(seconds) < 0.2


def test_controls_are_labelled_with_units_and_speak_once():
    slider = widgets.slider("rank", (0, 8), value=2, unit="values")
    steps = widgets.steps("context", [1024, 2048], value=1024, unit="tokens")
    choice = widgets.choice("model", ["tiny", "small"])
    switch = widgets.switch("causal", value=True)

    assert slider.description == "rank (values)"
    assert steps.description == "context (tokens)"
    assert steps.options == (("1,024", 1024), ("2,048", 2048))
    assert not slider.continuous_update
    assert not steps.continuous_update
    assert (choice.value, switch.value) == ("tiny", True)
