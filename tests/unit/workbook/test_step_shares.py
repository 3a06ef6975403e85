"""What a step takes, part by part: by hand, and where parts must agree or vanish."""

from dataclasses import replace

import pytest

from labkit.config import PRESETS, Layout
from labkit.parallel.communication import all_reduce, cluster, expert_dispatch
from labkit.workbook.step_shares import (
    FP8_ROW,
    PROFILED_SECONDS,
    Parts,
    Run,
    rate_of,
)

V3 = Run(layout=Layout(pp=16, dp=128, ep=64))


def test_a_layer_of_deepseek_v3_computes_as_long_as_its_profile_says():
    assert V3.layer_seconds == pytest.approx(PROFILED_SECONDS / 4)
    assert V3.parts.computing == pytest.approx(120 * 61 / 16 * PROFILED_SECONDS / 4)


def test_other_cards_compute_at_the_same_share_of_their_data_sheet():
    assert rate_of("a100-80g") / rate_of("h800") == pytest.approx(312 / 990)


def test_computing_does_not_depend_on_the_layout():
    layouts = (
        Layout(pp=16, dp=128, ep=64),
        Layout(pp=8, dp=32, tp=8, ep=64),
        Layout(dp=2048, ep=256),
    )

    assert len({round(Run(layout=x).parts.computing, 6) for x in layouts}) == 1


def test_tensor_parallelism_sends_four_all_reduces_for_a_layer():
    run = replace(V3, layout=Layout(pp=16, dp=16, tp=8, ep=64))
    once = all_reduce(cluster("h800", 8), 4096 * 7168 * 2).seconds

    assert run.parts.tensor == pytest.approx(960 * 61 / 16 * 4 * once)
    assert V3.parts.tensor == 0


def test_tokens_go_there_in_fp8_and_back_in_bf16_forward_and_backward():
    nodes, moe = cluster("h800", 64), PRESETS["v3-671b"].moe
    there, back = (
        expert_dispatch(nodes, moe, n_tokens=4096, token_bytes=7168 * n).seconds
        for n in (FP8_ROW, 2)
    )

    assert V3.expert_seconds == pytest.approx(2 * (there + back) * 58 / 61)


def test_a_format_half_as_wide_takes_half_the_time():
    wide, narrow = (
        replace(V3, there=x, back=x).expert_seconds for x in ("FP32", "BF16")
    )

    assert narrow == pytest.approx(wide / 2, rel=0.02)


def test_one_rank_alone_only_computes():
    run = Run(model="v2-lite-16b", n_sequences=8)

    assert run.parts.total == run.parts.computing


def test_what_is_hidden_is_not_waited_for_and_cannot_exceed_the_computation():
    most = replace(V3, overlap=1.0)
    crowded = Run(layout=Layout(dp=256, tp=8, ep=256), overlap=1.0)

    assert (most.parts.experts, most.parts.gradients) == (0, 0)
    assert replace(V3, overlap=0.5).parts.experts == V3.parts.experts / 2
    assert crowded.parts.experts == pytest.approx(
        replace(crowded, overlap=0).parts.experts - crowded.parts.computing
    )


def test_the_bubble_is_the_published_one_and_sends_are_few():
    parts = V3.parts
    busy = parts.computing + parts.experts

    assert 15 / 120 * busy < parts.pipeline < 1.15 * 15 / 120 * busy


def test_gradients_are_summed_over_those_who_hold_the_same():
    # 2 ranks of 8 hold each expert: without messages between dense ranks there would
    # be half as much again for every further copy.
    alone = Run(model="v2-lite-16b", layout=Layout(dp=8, ep=8), n_sequences=8)
    twice = replace(alone, layout=Layout(dp=16, ep=8), n_sequences=16)

    assert 0 < alone.gradient_seconds < twice.gradient_seconds


def test_hierarchy_helps_the_sum_of_gradients_between_nodes_of_many_gpus():
    run = Run(model="v2-lite-16b", layout=Layout(dp=64, ep=8), n_sequences=64)
    better = replace(run, is_hierarchical=True)

    assert better.gradient_seconds != run.gradient_seconds
    assert better.parts.computing == run.parts.computing


def test_the_fullest_experts_are_waited_for():
    run = replace(V3, imbalance=1.5)

    assert run.parts.imbalance == pytest.approx(
        0.5 * 0.49 * V3.parts.computing, rel=0.01
    )
    assert run.parts.experts == pytest.approx(1.5 * V3.parts.experts)


def test_the_share_of_communication_leaves_waiting_out():
    parts = Parts(4.0, 1.0, 2.0, 1.0, 1.0, 1.0)

    assert parts.total == 10
    assert parts.communication_share == 0.4
