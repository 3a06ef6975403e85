"""Exercises of notebook 05: other right answers, and agreement with the library."""

import math

import pytest
import torch

from labkit.config import PRESETS
from labkit.precision import QuantSpec, plan, quantize
from labkit.precision.quantize import tile_scales
from labkit.workbook.exercises import grade
from labkit.workbook.exercises.catalogue import find
from labkit.workbook.exercises.narrow_numbers import (
    PARTS,
    TO_STAY,
    fp8_share,
    project,
    quantize_row,
    scale_of,
)


def scale_by_bits(largest):
    mantissa, exponent = math.frexp(largest / 448)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def test_a_scale_found_from_the_exponents_bits_passes():
    assert grade(find("scale_of_a_tile"), scale_by_bits).mark == "✓"


@pytest.mark.parametrize("largest", [1e-9, 0.3, 447.9, 448.0, 448.1, 7e5])
def test_the_scale_of_a_tile_is_the_librarys(largest):
    (expected,) = tile_scales(torch.tensor([largest]), QuantSpec()).float().tolist()

    assert scale_of(largest) == expected


def test_a_row_is_quantized_as_the_library_does():
    row = torch.randn(128, generator=torch.Generator().manual_seed(0))
    values, scale = quantize_row(row)
    kept = quantize(row.unsqueeze(0), QuantSpec())

    assert torch.equal(values, kept.data[0].float())
    assert scale == kept.scale.float()


def test_the_same_copy_named_three_times_is_kept_once():
    def three_names(x, weights):
        outputs, (rows,) = project(x, weights)
        return outputs, [rows, rows, rows]

    assert grade(find("kept_once"), three_names).mark == "✓"


def test_what_is_not_high_is_as_much_as_deepseeks_plan_has_in_fp8():
    expected = 100 * plan(PRESETS["v3-671b"], "deepseek-v3", "h800").fp8_flop_share

    assert fp8_share(TO_STAY) == pytest.approx(expected)


@pytest.mark.parametrize("kind", [set, list])
def test_words_may_be_given_in_any_collection(kind):
    assert grade(find("what_stays_high"), kind(TO_STAY)).mark == "✓"


def test_a_word_that_is_none_is_named():
    line = grade(find("what_stays_high"), (*TO_STAY, "attention")).line

    assert line.startswith("✗ for words that name no part: you gave 'attention'")


@pytest.mark.parametrize("word", sorted({*PARTS} - {*TO_STAY, "wo", "w1", "w2", "w3"}))
def test_nothing_more_needs_to_stay_high(word):
    assert grade(find("what_stays_high"), (*TO_STAY, word)).mark == "✗"
