"""Exercises of notebook 09 that look at how an answer gets its value."""

import pytest
import torch

from labkit.model import Transformer
from labkit.parallel import balance_experts
from labkit.workbook.exercises import grade
from labkit.workbook.exercises.catalogue import find
from labkit.workbook.exercises.n09_expert_balance import (
    SMALL_LOAD,
    balanced_model,
    busiest_of,
    next_bias,
    slowest,
)


def test_the_solution_is_the_rule_of_the_model():
    model = balanced_model()
    before = model.layers[1].ffn.gate.bias.clone()
    load = torch.randint(0, 50, (1, 16))
    try:
        Transformer.update_router_bias(model, load, 0.25)
        expected = model.layers[1].ffn.gate.bias.clone()
    finally:
        model.layers[1].ffn.gate.bias.copy_(before)

    torch.testing.assert_close(next_bias(before, load[0], 0.25), expected)


def test_the_published_steps_give_what_the_task_says():
    placed = balance_experts(SMALL_LOAD, n_replicas=6, n_gpus=3)

    assert placed.gpu_load(SMALL_LOAD).max().item() == 125
    assert "125 tokens" in find("beat_the_balancer").task


def test_no_placement_by_node_reaches_the_goal():
    assert min(slowest((256 + 64 * n, 8)) for n in range(8)) > 2


def test_one_slot_per_gpu_less_misses_the_goal():
    assert slowest((384, 1)) > 1.1 >= slowest((448, 1))


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ([[0, 1], [2, 3], [3, 1]], "every expert must have a slot in every layer"),
        ([[0, 1], [2, 3]], "shape (2,), expected shape (3,)"),
    ],
)
def test_what_is_no_placement_is_told_why(gpus, told):
    assert told in grade(find("beat_the_balancer"), gpus).line


def test_mixed_bytes_are_spread_as_the_task_says():
    mixed = "".join(chr(32 + 37 * n % 95) for n in range(256))

    assert busiest_of(mixed) == pytest.approx(1.5, abs=0.3)


@pytest.mark.parametrize("text", ["a" * 64, "7" * 100, " " * 64])
def test_any_letter_repeated_collapses_the_router(text):
    assert grade(find("a_text_that_collapses"), text).mark == "✓"
