"""What is counted on four real processes is what the closed forms say."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.communication import cost, form
from labkit.parallel.communication.cluster import Cluster, Link
from labkit.parallel.communication.count import count_communication, counted
from labkit.parallel.launch import launch

N_RANKS = 4
N = 12
"""Values in each collective; of four bytes each."""


def traffic_of(work, **axes):
    with count_communication(axes) as found:
        work()
    return {
        (row.collective, row.axis): (
            row.n_calls,
            row.n_bytes,
            row.n_messages,
            row.sent_bytes,
        )
        for row in found.traffic
    }


def eager() -> dict:
    """Each collective of torch.distributed once."""
    rank = dist.get_rank()
    part = torch.ones(N // N_RANKS)
    parts = [part.clone() for _ in range(N_RANKS)]

    def work():
        dist.all_reduce(torch.ones(N))
        dist.all_gather_single(torch.empty(N), part)
        dist.all_gather([torch.empty(N // N_RANKS) for _ in range(N_RANKS)], part)
        dist.reduce_scatter_single(part.clone(), torch.ones(N))
        dist.all_to_all_single(torch.empty(N), torch.ones(N))
        dist.broadcast(torch.ones(N), src=1)
        dist.reduce(torch.ones(N), dst=1)
        dist.gather(part, parts if rank == 1 else None, dst=1)
        dist.scatter(part.clone(), parts if rank == 1 else None, src=1)
        dist.barrier()

    return traffic_of(work)


def uneven() -> dict:
    """Rank r gives r + 1 rows to every rank, and the last gets none of rank 0."""
    rank = dist.get_rank()
    gives = [rank + 1] * N_RANKS
    takes = [source + 1 for source in range(N_RANKS)]
    if rank == 0:
        gives[-1] = 0
    if rank == N_RANKS - 1:
        takes[0] = 0
    mine = torch.ones(sum(gives), 2, dtype=torch.bfloat16)
    theirs = torch.empty(sum(takes), 2, dtype=torch.bfloat16)
    return traffic_of(lambda: dist.all_to_all_single(theirs, mine, takes, gives))


def backward() -> dict:
    """Functional collectives along an axis, and what their gradients send."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    x = torch.ones(6, 2, requires_grad=True)

    def work():
        y = functional.all_to_all_single(x, None, None, mesh.get_group("ep"))
        y.square().sum().backward()

    return traffic_of(work)


def point_to_point() -> dict:
    rank = dist.get_rank()

    def work():
        operations = [
            dist.P2POp(dist.isend, torch.ones(N), (rank + 1) % N_RANKS),
            dist.P2POp(dist.irecv, torch.empty(N), (rank - 1) % N_RANKS),
        ]
        for handle in dist.batch_isend_irecv(operations):
            handle.wait()

    return traffic_of(work)


def threads() -> dict:
    """One all-reduce in a thread that is told to count, one in one that is not."""

    def work():
        for target in (counted(lambda: dist.all_reduce(torch.ones(N))), untold):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()

    def untold():
        dist.all_reduce(torch.ones(N))

    return traffic_of(work)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def unchecked_group() -> dist.ProcessGroup:
    """Return a group whose collectives are not checked: DDP cannot bear the checks."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    group = dist.new_group(group_desc="replicas")
    dist.set_debug_level(level)
    return group


def transforms() -> dict:
    """A backward pass of DDP, of FSDP2 and of tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    models = {
        "ddp": DistributedDataParallel(layers(), process_group=unchecked_group()),
        "fsdp": fully_shard(layers(), mesh=mesh["dp"]),
        "tp": parallelize_module(layers(), mesh["tp"], plan),
    }

    def step(model):
        model(torch.ones(4, 8)).sum().backward()

    for _ in range(2):  # the second pass agrees on new buckets
        step(models["ddp"])
    found = {}
    for name, model in models.items():
        found[name] = traffic_of(lambda model=model: step(model))
    return found


def nested() -> list[dict]:
    """What an outer and an inner count saw of two all-reduces, one in both."""
    with count_communication({"everyone": dist.group.WORLD}) as outer:
        dist.all_reduce(torch.ones(N))
        with count_communication() as inner:
            dist.all_reduce(torch.ones(N))
    link = Link(latency_seconds=1.0, bytes_per_second=4.0)
    return [
        (found.n_messages, found.sent_bytes, found.seconds(link), repr(found))
        for found in (outer, inner)
    ]


def counts_of_a_rank() -> dict:
    cases = (eager, uneven, backward, point_to_point, threads, transforms, nested)
    return {case.__name__: case() for case in cases}


@pytest.fixture(scope="module")
def counts() -> list[dict]:
    return launch(counts_of_a_rank, N_RANKS, timeout=300)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_rings_send_what_the_closed_form_says(counts, collective):
    expected = form(collective, N_RANKS)
    for found in counts:
        calls, given, messages, sent = found["eager"][collective, "world"]
        assert (calls, given) == (1, 4 * N)
        assert (messages, sent) == (expected.n_messages, expected.share * 4 * N)


def test_an_all_gather_is_counted_by_its_result_given_as_one_tensor_or_as_a_list(
    counts,
):
    expected = form("all_gather", N_RANKS)
    for found in counts:
        assert found["eager"]["all_gather", "world"] == (
            2,
            2 * 4 * N,
            2 * expected.n_messages,
            2 * expected.share * 4 * N,
        )


def test_bytes_of_each_collective_are_those_of_the_cost_model(counts):
    link = Link(latency_seconds=0.0, bytes_per_second=1.0)
    node = Cluster(link=link, network=link, gpus_per_node=N_RANKS)
    for name in ("all_reduce", "reduce_scatter", "all_to_all"):
        expected = getattr(cost, name)(node, 4 * N)
        for found in counts:
            assert found["eager"][name, "world"][3] == expected.link_bytes


def test_only_the_source_of_a_broadcast_or_scatter_sends(counts):
    for rank, found in enumerate(counts):
        is_source = rank == 1
        assert found["eager"]["broadcast", "world"][2:] == (
            (3, 3 * 4 * N) if is_source else (0, 0)
        )
        assert found["eager"]["scatter", "world"][2:] == (
            (3, 3 * N) if is_source else (0, 0)
        )


def test_all_but_the_target_of_a_reduce_or_gather_send(counts):
    for rank, found in enumerate(counts):
        is_target = rank == 1
        reduced, gathered = (
            found["eager"][name, "world"][2:] for name in ("reduce", "gather")
        )
        assert reduced == ((0, 0) if is_target else (1, 4 * N))
        assert gathered == ((0, 0) if is_target else (1, N))


def test_an_uneven_all_to_all_sends_all_rows_but_those_that_stay(counts):
    row = 2 * 2
    for rank, found in enumerate(counts):
        stays = (rank + 1) * row
        given = 4 * stays - (stays if rank == 0 else 0)
        assert found["uneven"] == {
            ("all_to_all", "world"): (1, given, 3, given - stays)
        }


def test_gradients_that_travel_are_counted_along_the_axis_of_the_mesh(counts):
    for found in counts:
        # 6 rows of 2 FP32 values, of which half goes to the other rank; and back.
        assert found["backward"] == {("all_to_all", "ep"): (2, 96, 2, 48)}


def test_sends_and_receives_are_counted_apart(counts):
    for found in counts:
        assert found["point_to_point"] == {
            ("send", "world"): (1, 4 * N, 1, 4 * N),
            ("receive", "world"): (1, 4 * N, 0, 0),
        }


def test_a_thread_is_counted_if_it_was_told_to(counts):
    for found in counts:
        assert found["threads"]["all_reduce", "world"][0] == 1


def test_ddp_reduces_every_gradient_once(counts):
    n_bytes = 4 * sum(p.numel() for p in layers().parameters())
    for found in counts:
        sent = form("all_reduce", N_RANKS).share * n_bytes
        calls = found["transforms"]["ddp"]
        assert calls == {("all_reduce", "replicas"): (1, n_bytes, 6, sent)}


def test_fsdp_gathers_weights_and_scatters_gradients_along_its_axis(counts):
    n_bytes = 4 * sum(p.numel() for p in layers().parameters())
    for found in counts:
        assert found["transforms"]["fsdp"] == {
            # The outermost weights are kept from the forward pass to the backward.
            ("all_gather", "dp"): (1, n_bytes, 1, n_bytes / 2),
            ("reduce_scatter", "dp"): (1, n_bytes, 1, n_bytes / 2),
        }


def test_collectives_of_dtensors_are_counted(counts):
    for found in counts:
        # A row-wise product is summed: 4 rows of 8.
        assert found["transforms"]["tp"] == {("all_reduce", "tp"): (1, 128, 2, 128)}


def test_a_count_inside_another_counts_for_both(counts):
    for found in counts:
        (n_outer, sent_outer, _, table), (n_inner, sent_inner, seconds, _) = found[
            "nested"
        ]
        assert (n_outer, n_inner) == (12, 6)
        assert (sent_outer, sent_inner) == (144, 72)
        assert seconds == 6 * 1.0 + 72 / 4.0
        assert table.splitlines() == [
            "collective  axis      ranks  calls  given  messages   sent",
            "all_reduce  everyone      4      2   96 B        12  144 B",
            "all                                              12  144 B",
        ]
