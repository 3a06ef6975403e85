"""Counts of one MLA layer that leave a part out, and what they are told."""

import pytest

from labkit.config import PRESETS
from labkit.config.counts import attention_params
from labkit.workbook.exercises import find, grade
from labkit.workbook.exercises.mla_parts import parts


@pytest.mark.parametrize("name", ["v3-671b", "v2-236b", "v2-lite-16b"])
def test_the_parts_are_the_whole_layer(name):
    cfg = PRESETS[name]

    assert sum(parts(cfg.attention, cfg.dim).values()) == attention_params(
        cfg.attention, cfg.dim
    )


def test_a_count_without_the_output_matrix_is_told_its_name():
    def without_output(attention, dim):
        output = attention.n_heads * attention.v_head_dim * dim
        return attention_params(attention, dim) - output

    assert grade(find("mla_params"), without_output).line == (
        "✗ for DeepSeek-V3: you gave 69,666,816, expected 187,107,328 (wo is missing, "
        "the output matrix: n_heads × v_head_dim × dim)"
    )
