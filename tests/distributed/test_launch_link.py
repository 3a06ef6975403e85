"""Nodes on one machine: a link that is slow, and one that is reckoned to be."""

import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labkit.parallel.communication.slow_link import SlowLink, bytes_sent, slow_link
from labkit.parallel.group import node_of
from labkit.parallel.launch import launch

RATE = 400e6

N_BYTES = 1 << 20
"""Of each message: 21 ms on the link."""

LINK_SECONDS = N_BYTES * 8 / RATE

MOST_BURST = 0.8
"""At least this share of a message waits for the bucket, which holds the rest."""


def seconds_of(collective) -> float:
    """The quickest of three."""
    spent = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        collective()
        spent.append(time.perf_counter() - begin)
    return min(spent)


def talk() -> dict:
    """Send messages inside a node and between nodes; rank 3 hears from all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("far", "near"))
    message = torch.ones(N_BYTES // 4)
    seen = {"node": node_of(rank), "total": torch.ones(1) * rank}
    dist.all_reduce(seen["total"])
    for name in ("near", "far"):
        group = mesh[name].get_group()
        seen[name] = seconds_of(lambda g=group: dist.all_reduce(message, group=g))
    work = dist.all_reduce(message, async_op=True)
    begin = time.perf_counter()
    time.sleep(0.2)
    work.wait()
    seen["overlapped"] = time.perf_counter() - begin
    return seen


def layers() -> float:
    """Return the sum of a gradient that FSDP and DDP send over the link."""
    mesh = init_device_mesh("cpu", (2,))
    shards = torch.nn.Linear(4, 4, bias=False)
    fully_shard(shards, mesh=mesh)
    shards(torch.ones(2, 4)).sum().backward()
    copies = torch.nn.Linear(4, 4, bias=False)
    dist.broadcast(copies.weight.data, src=0)
    copies = torch.nn.parallel.DistributedDataParallel(copies)
    copies(torch.ones(2, 4)).sum().backward()
    rows = torch.arange(3.0)
    received = torch.empty(3)
    sizes = ([1, 2], [1, 2]) if dist.get_rank() == 0 else ([2, 1], [2, 1])
    dist.all_to_all_single(received, rows, *sizes)
    shard = shards.weight.grad.full_tensor().sum()
    return (shard + copies.module.weight.grad.sum()).item() + received.sum().item()


def count() -> tuple[int, int]:
    """Return what the node has sent, before and after a message to the other."""
    before = bytes_sent()
    message = torch.ones(N_BYTES // 4)
    if dist.get_rank() == 0:
        dist.send(message, 1)
    else:
        dist.recv(message, 0)
    dist.barrier()
    return before, bytes_sent()


@pytest.fixture
def real_link() -> Iterator[SlowLink]:
    with slow_link(RATE) as link:
        if link.kind != "real":
            pytest.skip(f"no real link here: {link.why}")
        yield link


def check_talk(results: list[dict]) -> None:
    assert [seen["node"] for seen in results] == [0, 0, 1, 1]
    assert all(seen["total"].item() == 6 for seen in results)
    far = min(seen["far"] for seen in results)
    near = min(seen["near"] for seen in results)
    assert far >= LINK_SECONDS * MOST_BURST
    assert near < far
    # 1.5 messages over the link (31 ms) end under 200 ms of something else.
    assert min(seen["overlapped"] for seen in results) < 0.2 + LINK_SECONDS


def test_a_real_link_is_slow_between_nodes_and_counts_what_passes(real_link):
    check_talk(launch(talk, 4, link=real_link, timeout=200.0))
    sent = launch(count, 2, link=real_link, timeout=200.0)

    # Headers, and what the store and the barrier say, come on top.
    assert N_BYTES < sent[0][1] - sent[0][0] < 1.2 * N_BYTES
    assert sent[1][1] - sent[1][0] < 0.2 * N_BYTES


def test_nothing_is_left_of_a_link():
    with slow_link(RATE, n_nodes=3) as link:
        assert len(link.pids) == (3 if link.kind == "real" else 0)
        assert all(psutil.pid_exists(pid) for pid in link.pids)

    assert not any(psutil.pid_exists(pid) for pid in link.pids)


def test_a_modelled_link_takes_as_long_as_it_is_reckoned_to():
    link = SlowLink(bits_per_second=RATE, n_nodes=2, kind="modelled")

    check_talk(launch(talk, 4, link=link, timeout=200.0))


def test_layers_that_are_shared_over_a_modelled_link_have_the_same_gradients():
    link = SlowLink(bits_per_second=1e9, n_nodes=2, kind="modelled")

    # 4 x 4 weights, each with the gradient 2 in every rank: sums of 64 and means of 32
    # in FSDP (its mean is over ranks) and DDP; then rows 0, 0, 1 and 1, 2, 2.
    assert launch(layers, 2, link=link, timeout=200.0) == [32 + 32 + 1, 32 + 32 + 5]


def test_bytes_are_counted_on_a_real_link_only():
    with pytest.raises(ValueError) as caught:
        bytes_sent()

    assert str(caught.value) == (
        "bytes are counted by a real link, and this process is at none. Call it in a "
        "rank of launch(..., link=link) whose link.kind is 'real'."
    )
