"""Figures of narrow numbers and of runs in them: values where they belong."""

from types import SimpleNamespace

import pytest

from labkit.precision import FORMATS, QuantizationReport
from labkit.workbook.figures.precision import (
    accumulation,
    errors_by_tile,
    number_formats,
)
from labkit.workbook.figures.precision_runs import (
    decided_at,
    paired_losses,
    scheduler_timeline,
)

ONES = [1.0, 1.0, 1.0]


def report(error, *, worst=None, underflow=0.0):
    return QuantizationReport(
        relative_error=error,
        underflow=underflow,
        saturated=0.0,
        worst_row=error if worst is None else worst,
        median_row=error,
        n_nonfinite_tiles=0,
    )


def test_each_format_has_a_mark_for_every_value_from_1_to_3():
    fig = number_formats(list(FORMATS.values()), title="t")
    counts = [len(marks.get_segments()) for marks in fig.axes[0].collections]

    assert counts == [2**bits + 2 ** (bits - 1) + 1 for bits in (3, 2, 6, 7)]


def test_errors_are_percentages_of_the_whole_the_worst_token_and_the_lost():
    curve = [(1.0, report(0.01)), (10.0, report(0.02, worst=1.0, underflow=0.25))]
    fig = errors_by_tile({"1×128": curve}, title="t")
    drawn = [list(axes.lines[0].get_ydata()) for axes in fig.axes]

    assert drawn == [[1, 2], [1, 100], [0, 25]]


def test_a_sum_is_named_where_its_curve_ends():
    fig = accumulation({"plain": [(128, 0.1), (4096, 5.0)]}, title="t")

    assert [text.get_text().strip() for text in fig.axes[0].texts] == ["plain"]


def test_the_gap_of_pairs_is_that_of_the_means_of_windows():
    runs = {"BF16": [[9.0, 2.0, 2.0], [9.0, 4.0, 4.0]]}
    runs["FP8"] = [[9.0, 2.2, 2.2], [9.0, 4.0, 4.0]]
    fig = paired_losses(runs, window=2, title="t")

    assert fig.axes[1].lines[-1].get_ydata() == pytest.approx([5])
    assert list(fig.axes[1].lines[-1].get_xdata()) == [3]
    assert [text.get_text() for text in fig.axes[1].texts][-1:] == [
        "+5.00 %\n(+0.00 to +10.00)"
    ]


def test_losses_may_be_means_of_windows_already():
    runs = {"BF16": [[4.0, 2.0]], "FP8": [[4.0, 2.2]]}
    fig = paired_losses(runs, window=50, per_value=50, title="t")
    line = fig.axes[1].lines[-1]

    assert list(line.get_xdata()) == [50, 100]
    assert line.get_ydata() == pytest.approx([0, 10])


def test_runs_that_are_no_pairs_are_refused():
    with pytest.raises(
        ValueError, match="got 2 kinds, seeds \\[1, 2\\], steps \\[3\\]"
    ):
        paired_losses({"a": [ONES], "b": [ONES, ONES]}, window=1, title="t")


def decision(step, module, after):
    return SimpleNamespace(step=step, module=module, after=after)


def test_a_decision_after_a_rollback_is_at_the_second_time_of_its_step():
    numbers = [1, 2, 3, 2, 3, 4]
    decisions = [decision(3, "a", "high"), decision(2, "a", "fp8")]

    assert decided_at(numbers, decisions) == [2, 3]
    assert decided_at(numbers, [*decisions, decision(9, "a", "high")]) == [2, 3, 3]


def test_modules_with_one_history_share_a_row_the_first_to_change_on_top():
    start = dict.fromkeys(("layers.0.wq", "layers.1.wq", "layers.1.wo"), "fp8")
    losses = [(step, 1.0) for step in range(5)]
    fig = scheduler_timeline(
        start, [decision(2, "layers.1.wo", "high")], losses, title="t"
    )

    names = [text.get_text() for text in fig.axes[0].texts]
    assert names == ["layers.1.wo", "layers 0-1: wq"]


def test_what_is_rolled_back_is_drawn_apart_and_does_not_dwarf_the_rest():
    losses = [(1, 2.0), (2, 1.5), (3, 1e9), (4, float("nan")), (3, 1.4), (4, 1.3)]
    fig = scheduler_timeline({"layers.0.wq": "fp8"}, [], losses, title="t")
    kept, lost, beyond, rollback = (
        list(line.get_xdata() if i > 1 else line.get_ydata())
        for i, line in enumerate(fig.axes[1].lines)
    )

    assert [value for value in kept if value == value] == [2.0, 1.5, 1.4, 1.3]
    assert [value for value in lost if value == value] == [1e9]
    assert beyond == [2, 3]
    assert rollback == [4, 4]
    assert fig.axes[1].get_ylim()[1] < 3


def test_a_run_without_one_finite_loss_is_drawn():
    losses = [(1, float("inf"))]
    fig = scheduler_timeline({"layers.0.wq": "fp8"}, [], losses, title="t")

    assert list(fig.axes[1].lines[2].get_xdata()) == [0]
