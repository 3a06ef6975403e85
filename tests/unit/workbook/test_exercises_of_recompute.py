"""Exercises of notebook 07 that look at how an answer gets its value."""

import pytest
import torch

from labkit.memory.budget import budget
from labkit.memory.recompute import block_policies
from labkit.workbook.exercises import grade
from labkit.workbook.exercises.catalogue import find
from labkit.workbook.exercises.n07_recompute import RECIPE, SMALL, extra_time, peak


def with_forked_randomness(block, x):
    with torch.random.fork_rng(devices=()), torch.no_grad():
        out = block(x)
    x = x.detach().requires_grad_()
    block(x).sum().backward()
    return out, x.grad


def with_checkpoint(block, x):
    x = x.detach().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    out.sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("run", [with_forked_randomness, with_checkpoint])
def test_any_way_that_repeats_the_first_run_passes(run):
    assert grade(find("the_same_again"), run).mark == "✓"


def test_randomness_of_the_kernel_is_left_alone_by_a_check():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    grade(find("the_same_again"), with_checkpoint)

    assert torch.equal(torch.rand(3), expected)


def test_a_cheaper_answer_is_told_that_it_beats_the_solution_and_a_dearer_one_not():
    dearer = ("full", "full", "attention", *("selective",) * 4)
    verdict = grade(find("fit_the_budget"), dearer)

    assert extra_time(dearer) > extra_time(find("fit_the_budget").solution)
    assert verdict.mark == "✓"
    assert "; the solution reaches" in verdict.line


def test_the_solution_is_as_cheap_as_the_search_of_the_library():
    found = budget(420 * 10**6, SMALL, RECIPE)

    assert extra_time(find("fit_the_budget").solution) == extra_time(found)


@pytest.mark.parametrize("policy", ["none", "moe", "attention", "every_k"])
def test_no_policy_of_the_whole_model_is_an_answer(policy):
    assert grade(find("fit_the_budget"), block_policies(policy, 7)).mark == "✗"


def test_a_policy_that_is_none_is_told_by_the_predictor():
    line = grade(find("fit_the_budget"), ("everything",) * 7).line

    assert line.startswith("✗ for the peak: ValueError: recompute[0] must be")


def test_without_a_policy_the_peak_is_the_one_that_the_task_names():
    assert round(peak("none")) == 746
    assert "746 MB" in find("fit_the_budget").task
