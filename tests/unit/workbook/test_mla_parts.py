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


def test_a_count_that_multiplies_by_no_rank_is_told_both_of_its_faults():
    def naive(a, dim):
        query = a.q_lora_rank * (dim + a.n_heads * a.qk_head_dim) + a.q_lora_rank
        latent = dim * (a.kv_lora_rank + a.qk_rope_head_dim) + a.kv_lora_rank
        return query + latent + a.n_heads * a.v_head_dim * dim

    assert grade(find("mla_params"), naive).line.endswith(
        "(wkv_b is missing, which takes keys and values up: kv_lora_rank × n_heads × "
        "(qk_nope_head_dim + v_head_dim); q_lora_rank is None in V2-Lite: queries come "
        "from one matrix, wq)"
    )
