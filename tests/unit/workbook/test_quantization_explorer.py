"""The quantization explorer: what it says is what the tiles do."""

import pytest

from labkit.precision import QuantSpec, quantization_error, quantize
from labkit.workbook.quantization import N_CHANNELS, N_TOKENS, TILES, hard_tensor
from labkit.workbook.widgets.quantization import controls, describe, draw

TOKEN, CHANNEL, SQUARE, ROW, WHOLE = TILES


def settings(**changed):
    start = {name: control.value for name, control in controls().items()}
    return start | changed


def test_an_outlier_channel_asks_for_tiles_that_keep_it_to_itself():
    text = describe(**settings(outlier=10**6))

    assert "nothing with fewer would" not in text
    assert f"One for {CHANNEL} would" in text
    lost = hard_tensor(10**6, 0, "E4M3", "power of two").trials[TOKEN].report.underflow
    assert lost == pytest.approx(127 / N_CHANNELS, rel=0.2)  # its tile of each token


def test_tiny_tokens_ask_for_a_scale_of_their_own():
    text = describe(**settings(outlier=1, tiny=50))

    assert "a token loses more than half a step, 6.2 %" in text
    assert f"One for {ROW} would" in text


def test_both_at_once_ask_for_another_format():
    text = describe(**settings(outlier=10**6, tiny=50))

    assert f"None of the five would; one for {TOKEN} comes nearest" in text
    assert "E5M2 would" in text


def test_the_error_of_the_whole_hides_what_tokens_lose():
    report = hard_tensor(1, 50, "E4M3", "power of two").trials[WHOLE].report

    assert report.relative_error < 0.03
    assert report.worst_row > 0.8


def test_numbers_are_those_of_quantize():
    tensor = hard_tensor(1000, 25, "E5M2", "FP32")
    spec = QuantSpec(format="e5m2", tile=(128, 128), scale="fp32")
    report = quantization_error(tensor.x, quantize(tensor.x, spec))

    assert tensor.trials[SQUARE].report == report
    assert f"({report.sqnr_db:.1f} dB)" in describe(1000, 25, SQUARE, "FP32", "E5M2")


@pytest.mark.parametrize("outlier", [1, 10**6])
@pytest.mark.parametrize("tiny", [0, 99])
def test_extremes_are_drawn_with_all_values(outlier, tiny):
    fig = draw(**settings(outlier=outlier, tiny=tiny))
    shares = sum(bar.get_height() for bar in fig.axes[0].patches)

    assert 99.97 < shares < 100.01


def test_values_that_become_zero_are_drawn_as_such():
    chosen = settings(outlier=10**6, tile=SQUARE)
    fig = draw(**chosen)
    report = hard_tensor(10**6, 0, "E4M3", "power of two").trials[SQUARE].report
    bars = fig.axes[0].patches
    lost = sum(bar.get_height() for bar in bars[: len(bars) // 2])

    assert lost == pytest.approx(100 * report.underflow, abs=0.02)


def test_the_share_of_tiny_tokens_is_the_chosen_one():
    sizes = hard_tensor(1, 25, "E4M3", "power of two").x.norm(dim=-1)

    assert (sizes < 1).sum() == N_TOKENS // 4


def test_every_control_changes_what_is_said():
    start = settings()
    for name, control in controls().items():
        for option in control.options:
            value = option[1] if isinstance(option, tuple) else option
            if value != start[name]:
                assert describe(**start | {name: value}) != describe(**start)
