"""Two levels of four real processes: the same sums, the bytes of the closed form."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.parallel.communication import Cluster, Link, cost, form
from labkit.parallel.communication.calibrate import (
    TIMED,
    calibrate,
    seconds_of,
    time_collective,
)
from labkit.parallel.communication.compress import finish
from labkit.parallel.communication.count import count_communication
from labkit.parallel.communication.hierarchy import (
    Hierarchical,
    Nodes,
    expected_levels,
    hierarchical_all_reduce,
    nodes_of,
)
from labkit.parallel.launch import launch

N_RANKS = 4
SIZES = (1, 5, 1024)


def sums(nodes: Nodes) -> list[dict]:
    found = []
    for size in SIZES:
        mine = torch.arange(size, dtype=torch.float32) + 10 * dist.get_rank()
        flat = mine.clone()
        dist.all_reduce(flat)
        with count_communication() as counted:
            hierarchical_all_reduce(mine, nodes)
        found.append(
            {
                "is_equal": torch.equal(mine, flat),
                "sent": {
                    axis: (
                        counted.sum("n_messages", axis=axis),
                        counted.sum("sent_bytes", axis=axis),
                    )
                    for axis in ("inside", "across")
                },
            }
        )
    return found


def as_compression(nodes: Nodes) -> dict:
    parameter = nn.Parameter(torch.zeros(3, 5))
    hook = Hierarchical(nodes)
    flat = torch.full((15,), float(dist.get_rank()))
    with count_communication() as counted:
        total = finish(hook.sum(flat, [parameter], dist.group.WORLD))
    return {
        "total": total.tolist(),
        "counted": (counted.n_messages, counted.sent_bytes),
        "expected": tuple(hook.expected([(3, 5)], N_RANKS)),
    }


LINKS = {
    "inside": Link(latency_seconds=1e-6, bytes_per_second=1e9),
    "across": Link(latency_seconds=1e-4, bytes_per_second=5e7),
}


def exact_seconds(collective: str, n_bytes: int, group: dist.ProcessGroup) -> float:
    """Return what the closed form says, on another link in a node than between."""
    is_inside = dist.get_process_group_ranks(group)[1] % 2 == 1 and (
        dist.get_process_group_ranks(group)[0] % 2 == 0
    )
    link = LINKS["inside" if is_inside else "across"]
    return form(collective, group.size()).seconds(link, n_bytes)


def order_of_turns() -> list[str]:
    calls: list[str] = []
    works = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    seconds = seconds_of(works, n_repeats=2)
    assert all(value >= 0 for value in seconds.values())
    return calls


def work_of_a_rank() -> dict:
    nodes = nodes_of(2)
    measured = calibrate(nodes, timer=exact_seconds)
    try:
        nodes_of(3)
    except ValueError as error:
        refusal = str(error)
    return {
        "groups": [dist.get_process_group_ranks(group) for group in nodes],
        "sums": sums(nodes),
        "whole": hierarchical_integers(nodes),
        "compression": as_compression(nodes),
        "turns": order_of_turns(),
        "cluster": measured.cluster,
        "fits": repr(measured),
        "seconds": [time_collective(name, 1 << 16, n_repeats=1) for name in TIMED],
        "refusal": refusal,
    }


def hierarchical_integers(nodes: Nodes) -> list[int]:
    counts = torch.tensor([[dist.get_rank(), 1], [2, 3]])
    hierarchical_all_reduce(counts, nodes)
    return counts.flatten().tolist()


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return launch(work_of_a_rank, N_RANKS, timeout=500)


def test_the_first_ranks_are_the_first_node(found):
    assert [rank["groups"] for rank in found] == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_the_sum_is_that_of_a_flat_all_reduce_whatever_the_size(found, index):
    assert all(rank["sums"][index]["is_equal"] for rank in found)


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_bytes_on_each_level_are_those_of_the_closed_form(found, index):
    inside, across, _ = expected_levels(4 * SIZES[index], n_nodes=2, per_node=2)
    for rank in found:
        sent = rank["sums"][index]["sent"]
        assert sent == {"inside": tuple(inside), "across": tuple(across)}


def test_whole_numbers_of_any_shape_can_be_summed(found):
    assert all(rank["whole"] == [6, 4, 8, 12] for rank in found)


def test_as_a_hook_it_sends_what_it_predicts(found):
    for rank in found:
        assert rank["compression"]["total"] == [6.0] * 15
        assert rank["compression"]["counted"] == rank["compression"]["expected"]


def test_works_that_are_timed_take_turns_after_one_turn_without_a_clock(found):
    assert all(rank["turns"] == ["a", "b"] * 3 for rank in found)


def test_calibration_finds_the_link_inside_nodes_and_the_one_between(found):
    for rank in found:
        cluster = rank["cluster"]
        assert (cluster.n_nodes, cluster.gpus_per_node) == (2, 2)
        for ours, theirs in (
            (cluster.link, LINKS["inside"]),
            (cluster.network, LINKS["across"]),
        ):
            assert ours.latency_seconds == pytest.approx(theirs.latency_seconds)
            assert ours.bytes_per_second == pytest.approx(theirs.bytes_per_second)
        assert rank["fits"].startswith("2 nodes of 2\n  inside  all_reduce")


def test_all_ranks_agree_how_long_a_collective_took(found):
    for rank in found:
        assert rank["seconds"] == found[0]["seconds"]
        assert min(rank["seconds"]) > 0


def test_bytes_between_nodes_are_those_of_the_cost_model():
    link = LINKS["inside"]
    nodes = Cluster(link=link, network=link, n_nodes=4, gpus_per_node=8)
    predicted = cost.all_reduce(nodes, 1 << 20, algorithm="hierarchical")
    inside, across, _ = expected_levels(1 << 20, n_nodes=4, per_node=8)
    assert inside.n_bytes == predicted.link_bytes
    assert across.n_bytes * 8 == predicted.node_bytes


def test_nodes_that_ranks_do_not_fill_are_one_sentence(found):
    assert "the ranks must be a multiple of n_nodes" in found[0]["refusal"]
