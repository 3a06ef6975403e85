"""Timing: runs take turns, the shortest counts, threads are put back."""

import time

import pytest
import torch

from labkit.hardware import GemmSample, Roofline
from labkit.workbook.timing import agreement, fastest


def test_runs_take_turns_after_a_round_to_warm_up():
    order = []
    fastest(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, n_rounds=2
    )

    assert order == ["a", "b"] * 3


def test_the_shortest_time_counts():
    waits = iter([0.2, 0.05, 0.001])
    seconds = fastest({"wait": lambda: time.sleep(next(waits))}, n_rounds=2)

    assert 0.001 <= seconds["wait"] < 0.05


def test_the_clock_may_be_another_than_the_wall_s():
    ticks = iter([0, 9, 10, 13])  # the warm-up is not timed
    seconds = fastest({"work": int}, n_rounds=2, clock=lambda: next(ticks))

    assert seconds == {"work": 3}


def test_threads_are_set_for_the_runs_and_put_back_even_after_an_error():
    before = torch.get_num_threads()
    seen = []
    fastest({"count": lambda: seen.append(torch.get_num_threads())}, n_threads=1)
    with pytest.raises(ZeroDivisionError):
        fastest({"fail": lambda: 1 / 0}, n_threads=before + 1)

    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def roofline(flops):
    sample = GemmSample(dtype="float32", size=1024, flops=flops, n_runs=3)
    return Roofline(
        device="cpu",
        n_threads=1,
        samples=(sample,),
        copy_bytes_per_second=1e9,
        fp8_cast_elements_per_second=1e9,
    )


def test_one_core_that_beats_all_was_measured_in_a_quieter_moment():
    assert agreement(roofline(20e9), roofline(40e9)) == (
        "40 GFLOP/s on one, 20 GFLOP/s on all: something else is running; "
        "measure both again"
    )


def test_one_core_below_all_or_equal_is_as_it_must_be():
    said = agreement(roofline(40e9), roofline(20e9))

    assert said == "20 GFLOP/s on one, 40 GFLOP/s on all"
    assert "again" not in agreement(roofline(40e9), roofline(41e9))


def test_runs_that_are_warm_are_not_run_once_more():
    calls = []
    fastest({"a": lambda: calls.append("a")}, n_rounds=2, warms_up=False)
    assert calls == ["a", "a"]
