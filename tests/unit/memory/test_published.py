"""Formulas of papers against the numbers that those papers print."""

import pytest

from labkit.config import PRESETS, Layout
from labkit.memory.published import (
    gpt_bytes,
    mla_bytes,
    moe_bytes,
    recomputed_bytes,
    routed_rows,
)

V3 = PRESETS["v3-671b"]
PAPER = Layout(pp=16, dp=32, tp=2, ep=8)
GIB = 2**30


def four_layers(batch: int = 1, *, routing: str = "paper") -> float:
    rows = routed_rows(V3.moe, batch * 4096, PAPER, routing=routing)
    mla = mla_bytes(V3, batch, 4096, PAPER, is_flash=True)
    return 4 * (mla + moe_bytes(V3, batch * 4096, PAPER, rows)) / GIB


def test_four_layers_keep_what_the_papers_formulas_give():
    mla = mla_bytes(V3, 1, 4096, PAPER, is_flash=True)
    scores = mla_bytes(V3, 1, 4096, PAPER) - mla
    rows = routed_rows(V3.moe, 4096, PAPER, routing="paper")

    assert round(4 * mla / GIB, 3) == 1.586
    assert round(4 * scores / GIB, 2) == 20.00
    assert round(4 * moe_bytes(V3, 4096, PAPER, rows) / GIB, 3) == 1.391
    assert round(four_layers(), 2) == 2.98


def test_tokens_that_come_from_other_ranks_more_than_double_the_experts_share():
    rows = routed_rows(V3.moe, 4096, PAPER)

    assert round(4 * moe_bytes(V3, 4096, PAPER, rows) / GIB, 3) == 3.125
    assert round(four_layers(routing="physical"), 2) == 4.71


def test_full_recompute_of_four_layers_keeps_the_papers_bytes():
    kept = 4 * recomputed_bytes(V3, 4096, PAPER)

    assert kept == 235_143_168
    assert kept / 2**20 == 224.25


def test_activations_grow_with_the_batch_and_nothing_else():
    assert four_layers(3) == pytest.approx(3 * four_layers())


def test_imbalance_scales_the_rows():
    even = routed_rows(V3.moe, 4096, PAPER)

    assert routed_rows(V3.moe, 4096, PAPER, imbalance=1.25) == 1.25 * even


@pytest.mark.parametrize(
    ("n_values", "scores", "n_layers", "none", "both"),
    [
        # 22B: 4 sequences of 2048, 64 heads of a width of 6144, 48 layers.
        (4 * 2048 * 6144, 64 * 2048 / 6144, 48, 59.25, 9.56),
        # 175B: 1 sequence, 96 heads of 12288, 96 layers; 8 stages, 3 chunks on each.
        (2048 * 12288, 96 * 2048 / 12288, 96 * (1 + 7 / 24), 66.84, 12.35),
    ],
)
def test_gpt_keeps_the_gibibytes_that_are_published(
    n_values, scores, n_layers, none, both
):
    plain = gpt_bytes(n_values, scores, tp=8)
    least = gpt_bytes(n_values, scores, tp=8, policy="both")

    assert round(n_layers * plain / GIB, 2) == none
    assert round(n_layers * least / GIB, 2) == both


@pytest.mark.parametrize(
    ("policy", "percent"),
    [("sequence", 62.04), ("selective", 56.53), ("both", 18.49), ("full", 8.71)],
)
def test_policies_keep_the_published_shares_of_a_175b_layer(policy, percent):
    scores = 96 * 2048 / 12288
    share = gpt_bytes(1, scores, tp=8, policy=policy) / gpt_bytes(1, scores, tp=8)

    assert 100 * share == pytest.approx(percent, rel=2e-3)


def test_routing_other_than_these_two_is_refused(unchecked):
    with pytest.raises(ValueError, match="routing must be one of 'paper', 'physical'"):
        routed_rows(V3.moe, 4096, PAPER, routing="even")
