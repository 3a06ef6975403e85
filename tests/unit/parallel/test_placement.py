"""What a placement gives each GPU to do, and what changing it moves."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.parallel import Placement, balance_experts, contiguous, moves, settle


def placement(*gpus, n_experts=4, n_nodes=1):
    experts = torch.tensor([[expert for gpu in gpus for expert in gpu]])
    return Placement(
        experts=experts, n_experts=n_experts, n_gpus=len(gpus), n_nodes=n_nodes
    )


def test_replicas_share_the_tokens_of_their_expert():
    # Expert 0 lies on both GPUs, and twice on the first: 90 tokens in three parts.
    held = placement((0, 0, 1), (0, 2, 3))
    load = torch.tensor([[90, 6, 5, 4]])

    assert held.counts().tolist() == [[3, 1, 1, 1]]
    assert held.gpu_load(load).tolist() == [[66.0, 39.0]]
    assert held.imbalance(load).tolist() == [66 / 52.5]


def test_layers_wait_for_their_slowest_gpu_one_after_another():
    load = torch.tensor([[3, 1], [1, 3], [0, 0]])
    held = contiguous(3, 2, n_gpus=2)

    assert held.imbalance(load).tolist() == [1.5, 1.5, 1.0]
    assert held.slowdown(load) == 1.5
    assert held.slowdown(torch.zeros(3, 2)) == 1.0


def test_experts_that_a_gpu_had_are_not_moved():
    before = placement((0, 1), (2, 3))
    after = placement((1, 2), (3, 0))

    moved = moves(before, after, expert_bytes=100)
    assert moved.fetched.tolist() == [[1, 1]]
    assert moved.total_bytes == 200
    assert moved.busiest_bytes == 100


def test_a_second_replica_on_the_same_gpu_needs_no_bytes():
    before, after = placement((0, 1), (2, 3)), placement((0, 0, 1), (2, 2, 3))

    assert moves(before, after, expert_bytes=1).total_bytes == 0


def test_only_what_no_gpu_of_the_node_had_comes_over_the_network():
    before = placement((0,), (1,), (2,), (3,), n_nodes=2)
    after = placement((1,), (2,), (0,), (3,), n_nodes=2)
    moved = moves(before, after, expert_bytes=10)

    assert moved.fetched.tolist() == [[1, 1, 1, 0]]
    assert moved.remote.tolist() == [[0, 1, 1, 0]]
    assert (moved.total_bytes, moved.network_bytes) == (30, 20)


def test_the_busiest_gpu_counts_all_its_layers():
    before = contiguous(2, 4, n_gpus=2)
    after = replace(before, experts=torch.tensor([[0, 2, 1, 3], [0, 2, 3, 1]]))

    assert moves(before, after, expert_bytes=5).busiest_bytes == 10


def test_gpus_that_only_swapped_their_experts_are_renamed_back():
    before, after = placement((0, 1), (2, 3)), placement((2, 3), (1, 0))
    settled = settle(before, after)

    assert settled.by_gpu.tolist() == [[[1, 0], [2, 3]]]
    assert moves(before, settled, expert_bytes=1).total_bytes == 0


def test_gpus_are_not_renamed_across_nodes():
    before = placement((0, 1), (2, 3), n_nodes=2)
    after = placement((2, 3), (0, 1), n_nodes=2)

    assert settle(before, after).by_gpu.tolist() == after.by_gpu.tolist()


def test_gpus_keep_their_numbers_where_the_best_pair_would_cost_more():
    # GPU 0 shares two experts with its own number and three with the other; then GPU 1
    # would be left with none, instead of two.
    before = placement((0, 1, 2, 3, 4), (5, 5, 5, 6, 6), n_experts=7)
    after = placement((0, 0, 0, 1, 1), (2, 3, 4, 5, 6), n_experts=7)

    assert settle(before, after).by_gpu.tolist() == after.by_gpu.tolist()


@settings(max_examples=30)
@given(st.integers(0, 2**20), st.sampled_from([1, 2]))
def test_settling_keeps_nodes_and_loads_and_moves_no_more(seed, n_nodes):
    load = torch.rand(2, 2, 8, generator=torch.Generator().manual_seed(seed))
    sizes = {"n_replicas": 12, "n_gpus": 4, "n_nodes": n_nodes, "n_groups": n_nodes}
    before, after = (balance_experts(each, **sizes) for each in load)
    settled = settle(before, after)

    by_node, by_node_before = (
        each.gpu_load(load[1]).unflatten(1, (n_nodes, -1)).sort(dim=-1).values
        for each in (settled, after)
    )
    torch.testing.assert_close(by_node, by_node_before)
    assert (
        moves(before, settled, expert_bytes=1).total_bytes
        <= moves(before, after, expert_bytes=1).total_bytes
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: placement((0, 1), (2, 2)),
            "every expert must have a slot in every layer; got none for expert 3 in "
            "layer 0. Give it one.",
        ),
        (
            lambda: placement((0, 1), (2, 4)),
            "experts must be numbers below n_experts=4; got 4. Correct the placement.",
        ),
        (
            lambda: contiguous(1, 5, n_gpus=2),
            "n_experts must be a multiple of n_gpus; got 5 and 2. Set n_experts=6 or",
        ),
        (
            lambda: contiguous(2, 4, n_gpus=2).gpu_load(torch.ones(1, 4)),
            "load must have a row for each layer and a column for each expert, which "
            "makes (2, 4); got (1, 4). Count the tokens of the model that",
        ),
        (
            lambda: moves(
                contiguous(1, 4, n_gpus=2), contiguous(1, 4, n_gpus=4), expert_bytes=1
            ),
            "two placements must agree in layers, experts, GPUs and nodes; got "
            "(1, 4, 2, 1) and (1, 4, 4, 1). Make both for the same model and GPUs.",
        ),
    ],
)
def test_what_fits_nothing_is_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
