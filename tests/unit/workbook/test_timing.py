"""Timing: runs take turns, the shortest counts, threads are put back."""

import time

import pytest
import torch

from labkit.workbook.timing import fastest


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


def test_threads_are_set_for_the_runs_and_put_back_even_after_an_error():
    before = torch.get_num_threads()
    seen = []
    fastest({"count": lambda: seen.append(torch.get_num_threads())}, n_threads=1)
    with pytest.raises(ZeroDivisionError):
        fastest({"fail": lambda: 1 / 0}, n_threads=before + 1)

    assert set(seen) == {1}
    assert torch.get_num_threads() == before
