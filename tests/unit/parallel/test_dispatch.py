"""Tokens go to experts in as many copies as counting every choice gives."""

import re
from dataclasses import replace
from itertools import combinations
from math import prod
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import PRESETS, MoEConfig
from labkit.parallel.communication import Cluster, Link, cluster, expert_dispatch

LINK = Link(latency_seconds=1e-6, bytes_per_second=100e9)


def nodes(n_nodes, per_node):
    return Cluster(link=LINK, network=LINK, n_nodes=n_nodes, gpus_per_node=per_node)


def experts(n, k, n_groups=1, n_limited=1):
    return MoEConfig(
        n_routed_experts=n,
        n_activated_experts=k,
        moe_inter_dim=8,
        n_expert_groups=n_groups,
        n_limited_groups=n_limited,
    )


def choices(moe):
    """Yield every set of experts that a token can get, equally likely."""
    size = moe.n_routed_experts // moe.n_expert_groups
    for groups in combinations(range(moe.n_expert_groups), moe.n_limited_groups):
        held = [e for group in groups for e in range(group * size, (group + 1) * size)]
        yield from combinations(held, moe.n_activated_experts)


def counted(moe, n_nodes, per_node):
    """Return the copies of a token of GPU 0 that leave its node, and that stay."""
    per_gpu = moe.n_routed_experts // (n_nodes * per_node)
    far, near = [], []
    for chosen in choices(moe):
        gpus = {expert // per_gpu for expert in chosen}
        reached = {gpu // per_node for gpu in gpus}
        far.append(len(reached - {0}))
        # In every node the GPU with the sender's index has the token already.
        near.append(len([gpu for gpu in gpus if gpu % per_node]))
    return mean(far), mean(near)


@pytest.mark.parametrize(
    ("moe", "n_nodes", "per_node"),
    [
        (experts(8, 3), 2, 2),
        (experts(8, 2), 4, 2),
        (experts(8, 3, 4, 2), 2, 2),
        (experts(8, 3, 2, 2), 2, 2),
        (experts(12, 2, 6, 3), 3, 2),
        (experts(8, 2, 2, 1), 4, 2),
        (experts(8, 3, 4, 2), 1, 4),
    ],
)
def test_copies_are_those_of_every_choice_tried(moe, n_nodes, per_node):
    found = expert_dispatch(nodes(n_nodes, per_node), moe, n_tokens=1, token_bytes=1.0)
    far, near = counted(moe, n_nodes, per_node)

    assert found.node_bytes == pytest.approx(far * per_node)
    # Of all GPUs, a sender has each index once, so that GPU 0 stands for all.
    assert found.link_bytes == pytest.approx(near)


def test_a_token_of_v3_goes_to_under_four_nodes():
    # With four groups of 32 experts and 8 to choose, a group is missed rarely.
    hit = 4 * (1 - prod((96 - i) / (128 - i) for i in range(8)))
    found = expert_dispatch(
        cluster("h800", 64), PRESETS["v3-671b"].moe, n_tokens=1, token_bytes=1.0
    )

    assert found.node_bytes / 8 == pytest.approx(hit * 7 / 8)
    assert 3.6 < hit < 3.7


@pytest.mark.parametrize(
    ("limited", "deduplicate", "measured"),
    [(2, False, 6.35e6), (2, True, 2.17e6), (1, True, 1.09e6)],
)
def test_what_leaves_a_node_was_measured(limited, deduplicate, measured):
    # Two nodes of two processes with 512 tokens each, width 256 in FP32, 6 of 16
    # experts: there and back, with counts and TCP around the rows.
    moe = experts(16, 6, 2, limited)
    one_way = expert_dispatch(
        nodes(2, 2), moe, n_tokens=512, token_bytes=1024.0, deduplicate=deduplicate
    )

    assert 2 * one_way.node_bytes == pytest.approx(measured, rel=0.05)
    assert 2 * one_way.node_bytes < measured


def test_the_node_limit_and_narrow_rows_reach_the_bar_of_a_seventh():
    moe = experts(16, 6, 2, 1)
    flat = expert_dispatch(
        nodes(2, 2),
        experts(16, 6),
        n_tokens=512,
        token_bytes=1024.0,
        deduplicate=False,
    )
    fp8, bf16 = (
        expert_dispatch(nodes(2, 2), moe, n_tokens=512, token_bytes=width).node_bytes
        for width in (256.0 + 8, 512.0)
    )

    assert (fp8 + bf16) / (2 * flat.node_bytes) < 0.15


@settings(max_examples=40)
@given(
    n_nodes=st.sampled_from([1, 2, 4]),
    per_node=st.sampled_from([1, 2, 4]),
    k=st.integers(1, 4),
    limit=st.integers(1, 4),
)
def test_sending_once_a_node_is_never_more_and_a_limit_bounds_it(
    n_nodes, per_node, k, limit
):
    moe, where = experts(16, k, 4, limit), nodes(n_nodes, per_node)
    once, plain = (
        expert_dispatch(where, moe, n_tokens=3, token_bytes=5.0, deduplicate=each)
        for each in (True, False)
    )
    free = expert_dispatch(
        where, replace(moe, n_limited_groups=4), n_tokens=3, token_bytes=5.0
    )
    rows = 3 * 5.0 * per_node

    assert once.node_bytes <= min(plain.node_bytes, free.node_bytes) + 1e-9
    assert once.node_bytes <= rows * min(k, limit, n_nodes) + 1e-9
    assert once.latency_seconds <= plain.latency_seconds
    if n_nodes == 1:
        assert once.node_bytes == 0
    if per_node == 1:
        assert once.link_bytes == 0


@pytest.mark.parametrize(
    ("moe", "where", "message"),
    [
        (
            experts(10, 2),
            nodes(2, 2),
            "n_routed_experts must be a multiple of the GPUs; got 10 and 4. Set",
        ),
        (
            experts(12, 2, 3, 2),
            nodes(2, 1),
            "the experts of a node or GPU must be whole groups, or an equal part of "
            "one; got 6 of them and groups of 4. Choose n_expert_groups so that",
        ),
    ],
)
def test_experts_that_do_not_spread_are_refused(moe, where, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        expert_dispatch(where, moe, n_tokens=1, token_bytes=1.0)


def test_a_dispatch_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="n_tokens must be a whole number of at least"):
        expert_dispatch(nodes(1, 2), experts(4, 2), n_tokens=0, token_bytes=1.0)
