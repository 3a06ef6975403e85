"""Exercises of notebook 10 that other answers than the solution can pass."""

import pytest

from labkit.config import PRESETS, Layout
from labkit.parallel.pipeline import orders, written
from labkit.parallel.stages import cut_layers, layer_flops, output_flops
from labkit.workbook.exercises import grade
from labkit.workbook.exercises.catalogue import find
from labkit.workbook.exercises.n10_parallel_layouts import (
    V3_IN_TENTHS,
    cut,
    fullest,
    seconds,
)

V3 = PRESETS["v3-671b"]


def by_limits(costs, n_stages):
    """Cut by the lowest limit that enough stages can keep."""

    def fill(limit):
        sizes, work = [0], 0
        for cost in costs:
            if work + cost > limit:
                sizes.append(0)
                work = 0
            sizes[-1] += 1
            work += cost
        return sizes

    sums = {
        sum(costs[a:b]) for a in range(len(costs)) for b in range(a, len(costs) + 1)
    }
    limits = (x for x in sorted(sums) if x >= max(costs))
    sizes = next(fill(limit) for limit in limits if len(fill(limit)) <= n_stages)
    while len(sizes) < n_stages:
        index = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[index : index + 1] = [sizes[index] - 1, 1]
    return sizes


def test_a_cut_by_limits_passes_whichever_it_is():
    assert grade(find("cut_stages"), by_limits).mark == "✓"


def test_tenths_are_the_work_of_deepseek_v3_and_the_library_cuts_it_as_well():
    layer = layer_flops(V3)[-1]
    sizes = cut_layers(V3, 16)

    assert round(10 * output_flops(V3) / layer) == V3_IN_TENTHS[-1]
    assert (
        fullest(V3_IN_TENTHS, 16)(lambda costs, n: [*sizes[:-1], sizes[-1] + 1]) == 49
    )
    assert fullest(V3_IN_TENTHS, 16)(cut) == 49


def test_a_cut_that_loses_layers_is_told_so():
    line = grade(find("cut_stages"), lambda costs, n: [1] * n).line

    assert "3 whole numbers of at least 1 must sum to 9; got [1, 1, 1]." in line


def test_the_order_that_the_library_makes_passes():
    rows = [written(order) for order in orders("1f1b", 3, 4)]

    assert grade(find("break_the_circle"), lambda: rows).mark == "✓"


def test_a_circle_is_told_by_who_waits_for_whom():
    rows = ["0F0 0B0 0F1 0B1 0F2 0F3 0B2 0B3"]
    rows += [written(order) for order in orders("1f1b", 3, 4)[1:]]
    line = grade(find("break_the_circle"), lambda: rows).line

    assert "rank 0 stops at 0B0, which needs 1B0 of rank 1, listed behind 1F1" in line


@pytest.mark.parametrize(
    ("layout", "mark"),
    [
        (Layout(pp=16, dp=64, ep=16), "✓"),
        (Layout(pp=32, dp=16, tp=2, ep=8), "✓"),
        (Layout(pp=32, dp=32, ep=32), "✗"),
        (Layout(pp=16, dp=128, ep=64), "✗"),
    ],
)
def test_other_layouts_pass_where_they_fit_and_are_quick(layout, mark):
    assert grade(find("fit_671b"), layout).mark == mark


def test_the_solution_is_quicker_than_every_other_answer_above():
    best = seconds(find("fit_671b").solution)

    assert best < seconds(Layout(pp=16, dp=64, ep=16)) < 36
