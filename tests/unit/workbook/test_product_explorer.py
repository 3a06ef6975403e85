"""The product explorer: its limits by hand, at every end of every control."""

import itertools
import time
from dataclasses import replace

import matplotlib as mpl
import pytest

from labkit.hardware import GemmSample, Roofline
from labkit.hardware.gemm import Gemm, TimedGemm
from labkit.workbook.figures.roofline import Ceiling, measured_roof
from labkit.workbook.widgets.roofline import ITEMSIZE, ROWS, WIDTHS, ProductExplorer

HERE = Roofline(
    device="cpu",
    n_threads=2,
    samples=tuple(
        GemmSample(dtype=dtype, size=1024, flops=flops, n_runs=3)
        for dtype, flops in (("float32", 200e9), ("bfloat16", 800e9))
    ),
    copy_bytes_per_second=20e9,
    fp8_cast_elements_per_second=1e9,
)
EXPLORER = ProductExplorer(HERE)


def texts(fig):
    fig.draw_without_rendering()
    return [text.get_text() for text in fig.findobj(mpl.text.Text) if text.get_text()]


def test_eight_tokens_in_an_expert_wait_for_its_weights():
    # 2·8·7168·2048 FLOPs at 990 TFLOP/s; (8·7168 + 7168·2048 + 8·2048)·2 bytes
    # at 3.35 TB/s.
    assert EXPLORER.describe("H800", "bfloat16", 8, 7168, 2048) == (
        "H800 in bfloat16: 7.96 FLOP per byte, below its ridge at 296: memory-bound. "
        "At least 8.81 µs, of which the arithmetic needs 237 ns: 2.7 % of the peak."
    )


def test_many_tokens_in_an_expert_keep_the_machine_busy():
    said = EXPLORER.describe("H800", "bfloat16", 4096, 7168, 2048)

    assert said == (
        "H800 in bfloat16: 1,147 FLOP per byte, above its ridge at 296: compute-bound. "
        "At least 121 µs, behind which the traffic's 31.3 µs can hide: up to 100 % of "
        "the peak."
    )


def test_a_machine_without_fp8_says_what_it_uses_instead():
    said = EXPLORER.describe("A100", "fp8", 1, 64, 64)

    assert said.startswith("No fp8 units, so products run in bfloat16. A100 in bfloat")


def test_this_machine_counts_with_what_was_measured():
    # 200 GFLOP/s over 20 GB/s
    assert "its ridge at 10" in EXPLORER.describe("this machine", "float32", 1, 64, 64)


@pytest.mark.parametrize("machine", EXPLORER.controls()["machine"].options)
def test_every_end_of_every_control_is_drawn_and_told(machine):
    ends = [(sizes[0], sizes[-1]) for sizes in (ROWS, WIDTHS, WIDTHS)]
    for m, k, n in itertools.product(*ends):
        for dtype in ITEMSIZE:
            assert "-bound" in EXPLORER.describe(machine, dtype, m, k, n)
    shown = texts(EXPLORER.draw(machine, "fp8", ROWS[-1], WIDTHS[0], WIDTHS[-1]))
    assert any(text.startswith("Compute-bound") for text in shown) or any(
        text.startswith("Memory-bound") for text in shown
    )
    assert f"{ROWS[-1]:,} × {WIDTHS[0]:,} × {WIDTHS[-1]:,}" in shown


def test_the_title_says_which_ceiling_and_by_how_much():
    shown = texts(EXPLORER.draw("H800", "bfloat16", 8, 7168, 2048))

    assert "Memory-bound: the traffic takes 37 times as long as the arithmetic" in shown


def test_what_is_stored_does_not_depend_on_this_machine():
    other = replace(HERE, copy_bytes_per_second=1e9)
    start = {name: control.value for name, control in EXPLORER.controls().items()}

    assert texts(EXPLORER.draw(**start)) == texts(ProductExplorer(other).draw(**start))
    assert " this machine 800 GFLOP/s" not in texts(EXPLORER.draw(**start))
    chosen = EXPLORER.draw(**start | {"machine": "this machine"})
    assert " this machine 800 GFLOP/s" in texts(chosen)


def test_names_of_roofs_that_are_close_are_drawn_apart():
    fig = EXPLORER.draw("H800", "float32", 8, 7168, 2048)
    names = [t for t in fig.findobj(mpl.text.Text) if t.get_text().endswith("FLOP/s")]
    names = [text for text in names if text.get_text().startswith(" ")]
    fig.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in names), key=lambda b: b.y0)

    assert len(names) == 4
    assert all(a.y1 <= b.y0 + 1 for a, b in itertools.pairwise(boxes))


def test_a_move_is_drawn_at_once():
    EXPLORER.draw("H800", "bfloat16", 8, 7168, 2048)  # fonts are loaded once
    start = time.process_time()
    EXPLORER.draw("H800", "bfloat16", 16, 7168, 2048).canvas.draw()

    assert time.process_time() - start < 0.2


def test_measured_products_are_named_by_rows_and_by_their_share():
    timed = [
        TimedGemm(gemm=Gemm(m=1, k=1000, n=1000, itemsize=4), seconds=2e6 / 10e9),
        TimedGemm(gemm=Gemm(m=512, k=1000, n=1000, itemsize=4), seconds=1.024e9 / 95e9),
    ]
    ceiling = Ceiling(name="float32", peak_flops=100e9, bytes_per_second=20e9)
    shown = texts(measured_roof(ceiling, timed))

    assert "1 row: 10 % of the peak. 512 rows: 95 %" in shown
    assert {"1 row", "512 rows", " float32 100 GFLOP/s"} <= set(shown)


def test_products_above_the_measured_peak_are_drawn_all_the_same(recwarn):
    timed = [
        TimedGemm(gemm=Gemm(m=m, k=1000, n=1000, itemsize=4), seconds=m * 2e6 / 90e9)
        for m in (1, 512)
    ]
    ceiling = Ceiling(name="float32", peak_flops=1e9, bytes_per_second=20e9)

    assert "1 row: 9000 % of the peak. 512 rows: 9000 %" in texts(
        measured_roof(ceiling, timed)
    )
    assert recwarn.list == []
