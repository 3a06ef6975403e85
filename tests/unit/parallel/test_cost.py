"""Collectives take what their messages and bytes add up to, and no less."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.hardware import ACCELERATORS
from labkit.parallel.communication import (
    Cluster,
    Link,
    algorithms,
    all_gather,
    all_reduce,
    all_to_all,
    cluster,
    cost,
    form,
    quickest,
    reduce_scatter,
    send,
)

FAST = Link(latency_seconds=1e-6, bytes_per_second=100e9)
SLOW = Link(latency_seconds=10e-6, bytes_per_second=10e9)
FOUR = Cluster(link=FAST, network=SLOW, n_nodes=2, gpus_per_node=2, nics_per_node=1)

COLLECTIVES = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
}
EVERY = [(name, way) for name in COLLECTIVES for way in algorithms(name)]

links = st.builds(
    Link,
    latency_seconds=st.floats(0, 1e-3),
    bytes_per_second=st.floats(1e6, 1e12),
)
clusters = st.builds(
    Cluster,
    link=links,
    network=links,
    n_nodes=st.integers(1, 9),
    gpus_per_node=st.integers(1, 9),
    nics_per_node=st.none() | st.integers(1, 4),
)


def run_ring(n_ranks, of_node):
    """All-reduce one number a part around a ring; return sums, messages, crossings."""
    held = [[rank * 100 + part for part in range(n_ranks)] for rank in range(n_ranks)]
    n_steps, n_sent, n_crossed = 0, 0, 0
    for is_gather in (False, True):
        for step in range(n_ranks - 1):
            moving = [
                (rank, (rank - step + is_gather) % n_ranks) for rank in range(n_ranks)
            ]
            values = [held[rank][part] for rank, part in moving]
            for (rank, part), value in zip(moving, values, strict=True):
                to = (rank + 1) % n_ranks
                held[to][part] = value if is_gather else held[to][part] + value
                n_crossed += of_node(rank) == 0 and of_node(to) != 0
            n_steps, n_sent = n_steps + 1, n_sent + 1
    return held, n_steps, n_sent / n_ranks, n_crossed / n_ranks


@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_a_ring_run_number_by_number_sends_what_is_counted(per_node):
    n = 2 * per_node
    held, n_steps, sent, crossed = run_ring(n, lambda rank: rank // per_node)
    ring = Cluster(link=FAST, network=SLOW, n_nodes=2, gpus_per_node=per_node)
    counted = all_reduce(ring, 1.0)

    sums = [sum(rank * 100 + part for rank in range(n)) for part in range(n)]
    assert held == [sums] * n
    assert form("all_reduce", n) == (n_steps, pytest.approx(sent))
    assert counted.node_bytes == pytest.approx(crossed)


def test_two_nodes_of_two_by_hand():
    # A megabyte: a flat ring takes 1.5 MB over every link, of which the slow one is
    # the bottleneck; in layers, each link takes 1 MB, one after the other.
    flat = all_reduce(FOUR, 1e6)
    layers = all_reduce(FOUR, 1e6, algorithm="hierarchical")
    tree = all_reduce(FOUR, 1e6, algorithm="tree")

    assert flat == pytest.approx((4 * 1e-6 + 2 * 10e-6 + 150e-6, 24e-6, 1.5e6, 1.5e6))
    assert layers == pytest.approx((22e-6 + 10e-6 + 100e-6, 22e-6, 1e6, 1e6))
    assert tree == pytest.approx((22e-6 + 200e-6, 22e-6, 2e6, 2e6))


def test_what_leaves_a_node_was_measured():
    # A flat ring and layers over two nodes of two processes each, on a slow link with
    # TCP around the payload: 1.58 and 1.05 MB for a MiB, 6.31 and 4.21 MB for four.
    for n_bytes, flat, layers in ((2**20, 1.58e6, 1.05e6), (2**22, 6.31e6, 4.21e6)):
        found = [
            all_reduce(FOUR, n_bytes, algorithm=way).node_bytes
            for way in ("ring", "hierarchical")
        ]
        assert found == pytest.approx([flat, layers], rel=0.01)


def test_all_to_all_by_hand():
    # Of 4 MB each GPU keeps a quarter, gives one to its neighbour, and two leave it.
    direct = all_to_all(FOUR, 4e6)
    layers = all_to_all(FOUR, 4e6, algorithm="hierarchical")

    assert direct == pytest.approx((21e-6 + 400e-6, 1e-6 + 2 * 10e-6, 1e6, 4e6))
    assert layers == pytest.approx((11e-6 + 20e-6 + 400e-6, 11e-6, 2e6, 4e6))


def test_a_send_takes_one_message_of_the_link_in_question():
    assert send(FOUR, 1e6) == pytest.approx((11e-6, 1e-6, 1e6, 0))
    assert send(FOUR, 1e6, between_nodes=True) == pytest.approx((110e-6, 10e-6, 0, 1e6))


@pytest.mark.parametrize("n_ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_equal_links_take_what_the_form_says(name, n_ranks):
    inside = Cluster(link=FAST, network=SLOW, gpus_per_node=n_ranks)
    between = Cluster(link=FAST, network=SLOW, gpus_per_node=1, n_nodes=n_ranks)
    for way in algorithms(name):
        flat = None if way == "hierarchical" else way
        expected = form(name, n_ranks, algorithm=flat)
        found = COLLECTIVES[name](between, 1e6, algorithm=way).seconds
        assert found == pytest.approx(expected.seconds(SLOW, 1e6))
        if way != "tree":  # which is a chain inside a node
            found = COLLECTIVES[name](inside, 1e6, algorithm=way).seconds
            assert found == pytest.approx(expected.seconds(FAST, 1e6))


def test_the_bus_bandwidth_of_a_long_all_reduce_is_that_of_the_link():
    # As nccl-tests defines it: 2 (p - 1) / p n over the seconds.
    for n_gpus in (2, 4, 8):
        node = cluster("h100", n_gpus, share_used=1)
        seconds = all_reduce(node, 1e12).seconds
        bus = 2 * (n_gpus - 1) / n_gpus * 1e12 / seconds
        assert bus == pytest.approx(450e9, rel=1e-3)


@given(clusters, st.floats(0, 1e10))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(cluster, n_bytes):
    for way in algorithms("all_gather"):
        halves = [
            each(cluster, n_bytes, algorithm=way)
            for each in (reduce_scatter, all_gather)
        ]
        whole = all_reduce(cluster, n_bytes, algorithm=way)
        assert whole == pytest.approx(tuple(map(sum, zip(*halves, strict=True))))


@settings(max_examples=40)
@given(clusters, st.floats(0, 1e10), st.floats(1, 10), st.sampled_from(EVERY))
def test_more_bytes_worse_links_and_fewer_cards_never_help(
    cluster, n_bytes, factor, which
):
    name, way = which
    before = COLLECTIVES[name](cluster, n_bytes, algorithm=way).seconds

    def worse(link):
        return Link(
            latency_seconds=link.latency_seconds * factor,
            bytes_per_second=link.bytes_per_second / factor,
        )

    for changed, n in (
        (cluster, n_bytes * factor),
        (replace(cluster, link=worse(cluster.link)), n_bytes),
        (replace(cluster, network=worse(cluster.network)), n_bytes),
        (replace(cluster, nics_per_node=1), n_bytes),
    ):
        after = COLLECTIVES[name](changed, n, algorithm=way).seconds
        assert after >= before * (1 - 1e-12)


@settings(max_examples=40)
@given(clusters, st.floats(1, 1e10), st.sampled_from(EVERY))
def test_nothing_beats_the_limits_of_its_links(cluster, n_bytes, which):
    name, way = which
    found = COLLECTIVES[name](cluster, n_bytes, algorithm=way)
    nothing = COLLECTIVES[name](cluster, 0.0, algorithm=way)

    assert nothing.seconds == nothing.latency_seconds == found.latency_seconds
    transfer = found.seconds - found.latency_seconds
    links = (
        found.link_bytes / cluster.link.bytes_per_second,
        found.node_bytes / cluster.node_bytes_per_second,
    )
    slack = 1e-9 * found.seconds
    assert max(links) - slack <= transfer <= sum(links) + slack
    if cluster.n_gpus == 1:
        assert found == (0, 0, 0, 0)
    if name == "all_reduce" and cluster.n_nodes > 1:
        # What every node must at least send for the others to have its part.
        n = cluster.n_nodes
        assert found.node_bytes >= 2 * (n - 1) / n * n_bytes * (1 - 1e-12)


@settings(max_examples=40)
@given(clusters, st.floats(0, 1e10), st.sampled_from(list(COLLECTIVES)))
def test_the_quickest_is_the_quickest(cluster, n_bytes, name):
    way, found = quickest(name, cluster, n_bytes)
    every = [
        COLLECTIVES[name](cluster, n_bytes, algorithm=each) for each in algorithms(name)
    ]

    assert found == COLLECTIVES[name](cluster, n_bytes, algorithm=way)
    assert found.seconds == min(each.seconds for each in every)


def test_layers_gain_between_slow_nodes_and_lose_inside_fast_ones():
    def gain(network):
        changed = replace(FOUR, network=network)
        flat, layers = (
            all_reduce(changed, 4e6, algorithm=way).seconds
            for way in ("ring", "hierarchical")
        )
        return flat / layers

    assert 1.3 < gain(SLOW) < 1.5
    assert gain(FAST) < 0.8


def test_many_ranks_make_short_messages_quicker_in_a_tree():
    nodes = cluster("h100", 512)

    assert quickest("all_reduce", nodes, 1e3)[0] == "tree"
    assert quickest("all_reduce", cluster("h100", 8), 1e9)[0] != "tree"
    assert quickest("send", nodes, 1e3) == ("direct", send(nodes, 1e3))


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_accelerator_of_the_table_makes_a_cluster(name):
    of_table = ACCELERATORS[name]
    whole = cluster(name, 4 * of_table.gpus_per_node, share_used=1)

    assert (whole.n_nodes, whole.gpus_per_node) == (4, of_table.gpus_per_node)
    assert whole.link.bytes_per_second == of_table.link_bytes_per_second
    assert whole.node_bytes_per_second == (
        of_table.gpus_per_node * of_table.network_bytes_per_second
    )
    assert cluster(name, 2).n_nodes == 1


def test_the_h800_reaches_what_was_measured_on_it():
    nodes = cluster("h800", 64)

    assert nodes.link.bytes_per_second == 160e9
    assert nodes.network.bytes_per_second == 40e9
    assert nodes.node_bytes_per_second == 320e9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: all_gather(FOUR, 1e6, algorithm="tree"),
            "algorithm must be one of 'ring', 'hierarchical'; got 'tree'.",
        ),
        (
            lambda: form("all_reduce", 4, algorithm="hierarchical"),
            "algorithm must be one of 'ring', 'tree'; got 'hierarchical'.",
        ),
        (lambda: form("gather"), "collective must be one of 'all_reduce', "),
        (lambda: form("all_reduce", 0), "n_ranks must be a whole number of at least 1"),
        (lambda: all_reduce(FOUR, -1.0), "n_bytes must be at least 0 and finite; got"),
        (
            lambda: cluster("h800", 12),
            "n_gpus must be a multiple of the GPUs of a node; got 12 and 8. Set "
            "n_gpus=16 or",
        ),
        (
            lambda: cluster("h800", 8, share_used=1.5),
            "share_used is a part of the bandwidth and must be at most 1; got 1.5. Set "
            "share_used to 0.8, or what you measured.",
        ),
        (
            lambda: Link(latency_seconds=-1.0, bytes_per_second=1.0),
            "latency_seconds must be at least 0 and finite; got -1.0.",
        ),
        (
            lambda: Link(latency_seconds=0.0, bytes_per_second=0.0),
            "bytes_per_second must be above 0 and finite; got 0.0.",
        ),
        (
            lambda: replace(FOUR, nics_per_node=0),
            "nics_per_node must be a whole number of at least 1; got 0.",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_the_module_has_a_function_for_every_collective():
    assert all(hasattr(cost, name) for name in (*COLLECTIVES, "send"))
