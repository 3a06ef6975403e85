"""Exercises of notebook 11: the arithmetic behind them, and other right answers."""

import pytest
import torch

from labkit.workbook.exercises import grade
from labkit.workbook.exercises.catalogue import find
from labkit.workbook.exercises.n11_communication import STEADY, after_steps, compress


def test_the_share_that_falls_is_computed_from_a_step_of_100_units():
    computing, before = 60, 100
    after = computing / (1 - 0.15)

    assert find("share_falls").cases[0].expected == pytest.approx(
        before / after, abs=1e-3
    )


def test_what_is_sent_and_kept_is_all_that_came_in():
    total, kept = after_steps(compress, 13)

    torch.testing.assert_close(total + kept, 13 * torch.tensor(STEADY))


def test_the_bug_loses_what_piles_up_and_is_told_how_much():
    def buggy(gradient, kept, k):
        wanted = gradient + kept
        sent = torch.zeros_like(gradient)
        places = wanted.abs().topk(k).indices
        sent[places] = wanted[places]
        return sent, gradient * (sent == 0)

    line = grade(find("kept_back"), buggy).line

    assert line.startswith("✗ for what is neither sent nor kept after 20 steps")


def test_feedback_in_place_passes():
    def in_place(gradient, kept, k):
        kept += gradient
        sent = torch.where(kept.abs() >= kept.abs().topk(k).values[-1], kept, 0.0)
        return sent, kept - sent

    assert grade(find("kept_back"), in_place).mark == "✓"


def test_ranks_that_wait_for_one_are_not_blamed_on_messages():
    answer = find("imbalance_or_communication").solution

    assert answer([1.0] * 7 + [2.0], [1.5] * 7 + [0.5]) == "imbalance"
    assert answer([1.0] * 7 + [2.0], [1.9] * 7 + [0.9]) == "communication"
