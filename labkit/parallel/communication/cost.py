"""How long collectives take on a cluster, and how many bytes cross which link.

Alpha-beta arithmetic: nobody else uses the links, all ranks are ready at once, and what
arrives is added up at no cost. `fit` calibrates it where it can be measured. No
collective of a GPU cluster has been timed against it here.

With N nodes of g GPUs, p = N g ranks, messages of latency a inside a node and A between
nodes, and n bytes (`forms` says of what):

    all-reduce  ring          2 (p - N) a + 2 (N - 1) A    2 (p-1)/p n over every link
                tree          2 (g - 1) a + 2 log2(N) A    2 n over every link
                hierarchical  2 (g - 1) a + 2 (N - 1) A    2 (g-1)/g n inside a node,
                                                           then 2 (N-1)/N n between
    all-gather and reduce-scatter                          half of that, as there is no
                                                           tree
    all-to-all  direct        (g - 1) a + (p - g) A        (g-1)/p n inside a node and
                                                           (p-g)/p n between, per GPU
                hierarchical  (g - 1) a + (N - 1) A        (g-1)/g n inside a node, then
                                                           (N-1)/N n between, per GPU

Flat algorithms keep both kinds of link busy at once, and wait for the slower; the
hierarchical ones use one after the other. What a ring sends between two nodes is spread
over as many rings as a node has network cards. Latencies of ring and tree are those of
NCCL's own model (src/graph/tuning.cc), in which a tree is a chain inside each node.
"""

import math
from typing import NamedTuple

from labkit.config.checks import require_at_least, require_choice, require_flag
from labkit.parallel.communication.cluster import Cluster
from labkit.parallel.communication.forms import algorithms, form, passes


class Cost(NamedTuple):
    """What one collective takes."""

    seconds: float

    latency_seconds: float
    """The part of `seconds` that no bandwidth would shorten."""

    link_bytes: float
    """That the busiest GPU sends inside its node."""

    node_bytes: float
    """That leave each node, over all its network cards."""


class Traffic(NamedTuple):
    """What goes over one kind of link."""

    n_messages: float
    """One after another."""

    n_bytes: float
    """From a GPU inside its node, or from a node."""


NONE = Traffic(0, 0)


def all_reduce(cluster: Cluster, n_bytes: float, *, algorithm: str = "ring") -> Cost:
    """Return what it takes that all ranks have the sum of everyone's `n_bytes`.

    Args:
        cluster: whose GPUs all take part.
        n_bytes: of each rank's buffer.
        algorithm: `ring`, `tree` or `hierarchical`: a reduce-scatter inside each node,
            an all-reduce of the parts between nodes, an all-gather inside each node.

    >>> from labkit.parallel.communication.cluster import cluster
    >>> node = cluster("h800", 8)
    >>> round(all_reduce(node, 160e9).seconds, 2)
    1.75

    Raises:
        ValueError: no such algorithm, or no such number of bytes.
    """
    return _collective("all_reduce", cluster, n_bytes, algorithm)


def all_gather(cluster: Cluster, n_bytes: float, *, algorithm: str = "ring") -> Cost:
    """Return what it takes that all ranks have everyone's part of `n_bytes`.

    Hierarchical: ranks of the same index in their nodes first gather among them, then
    each node inside itself.

    Raises:
        ValueError: no such algorithm, or no such number of bytes.
    """
    return _collective("all_gather", cluster, n_bytes, algorithm)


def reduce_scatter(
    cluster: Cluster, n_bytes: float, *, algorithm: str = "ring"
) -> Cost:
    """Return what it takes that each rank has its part of the sum of all `n_bytes`.

    Hierarchical: first inside each node, then among ranks of the same index.

    Raises:
        ValueError: no such algorithm, or no such number of bytes.
    """
    return _collective("reduce_scatter", cluster, n_bytes, algorithm)


def all_to_all(cluster: Cluster, n_bytes: float, *, algorithm: str = "direct") -> Cost:
    """Return what it takes that each rank gives every other an equal part of `n_bytes`.

    Hierarchical: what is for one index in any node first goes to that index in the own
    node, and from there to all nodes in fewer, longer messages.

    Raises:
        ValueError: no such algorithm, or no such number of bytes.
    """
    return _collective("all_to_all", cluster, n_bytes, algorithm)


def send(cluster: Cluster, n_bytes: float, *, between_nodes: bool = False) -> Cost:
    """Return what it takes that one rank gives another `n_bytes` (Hockney 1994).

    Raises:
        ValueError: no such number of bytes.
    """
    require_at_least({"n_bytes": n_bytes}, 0)
    require_flag({"between_nodes": between_nodes})
    link = cluster.network if between_nodes else cluster.link
    return Cost(
        seconds=link.seconds(n_bytes),
        latency_seconds=link.latency_seconds,
        link_bytes=0 if between_nodes else n_bytes,
        node_bytes=n_bytes if between_nodes else 0,
    )


def quickest(collective: str, cluster: Cluster, n_bytes: float) -> tuple[str, Cost]:
    """Return the algorithm that takes least time, and what it takes.

    >>> from labkit.parallel.communication.cluster import cluster
    >>> [quickest("all_reduce", cluster("h100", 16), n)[0] for n in (1e3, 1e10)]
    ['tree', 'ring']

    Raises:
        ValueError: no such collective, or no such number of bytes.
    """
    if collective == "send":
        return "direct", send(cluster, n_bytes)
    costs = {
        algorithm: _collective(collective, cluster, n_bytes, algorithm)
        for algorithm in algorithms(collective)
    }
    name = min(costs, key=lambda algorithm: costs[algorithm].seconds)
    return name, costs[name]


def cost_of(
    cluster: Cluster, *, inside: Traffic, between: Traffic, is_at_once: bool
) -> Cost:
    """Return what it takes to send over both kinds of link.

    Args:
        cluster: with both.
        inside: what each GPU sends inside its node.
        between: what leaves each node.
        is_at_once: whether both are busy at the same time, or one after the other.
    """
    transfers = (
        inside.n_bytes / cluster.link.bytes_per_second,
        between.n_bytes / cluster.node_bytes_per_second,
    )
    latency = (
        inside.n_messages * cluster.link.latency_seconds
        + between.n_messages * cluster.network.latency_seconds
    )
    return Cost(
        seconds=latency + (max(transfers) if is_at_once else sum(transfers)),
        latency_seconds=latency,
        link_bytes=inside.n_bytes,
        node_bytes=between.n_bytes,
    )


def _collective(
    collective: str, cluster: Cluster, n_bytes: float, algorithm: str
) -> Cost:
    require_choice({"algorithm": algorithm}, algorithms(collective))
    require_at_least({"n_bytes": n_bytes}, 0)
    traffic = {
        "ring": _ring,
        "tree": _tree,
        "direct": _direct,
        "hierarchical": _hierarchical,
    }[algorithm]
    inside, between = traffic(collective, cluster, n_bytes)
    return cost_of(
        cluster,
        inside=inside if cluster.gpus_per_node > 1 else NONE,
        between=between if cluster.n_nodes > 1 else NONE,
        is_at_once=algorithm != "hierarchical",
    )


def _ring(collective: str, cluster: Cluster, n: float) -> tuple[Traffic, Traffic]:
    whole = form(collective, cluster.n_gpus)
    n_crossing = passes(collective) * (cluster.n_nodes - 1)
    inside = Traffic(whole.n_messages - n_crossing, whole.share * n)
    return inside, Traffic(n_crossing, whole.share * n)


def _tree(collective: str, cluster: Cluster, n: float) -> tuple[Traffic, Traffic]:
    depth = math.ceil(math.log2(cluster.n_nodes))
    inside = Traffic(2 * (cluster.gpus_per_node - 1), 2 * n)
    return inside, Traffic(2 * depth, 2 * n)


def _direct(collective: str, cluster: Cluster, n: float) -> tuple[Traffic, Traffic]:
    p, g = cluster.n_gpus, cluster.gpus_per_node
    return Traffic(g - 1, (g - 1) / p * n), Traffic(p - g, g * (p - g) / p * n)


def _hierarchical(
    collective: str, cluster: Cluster, n: float
) -> tuple[Traffic, Traffic]:
    in_node = form(collective, cluster.gpus_per_node)
    across = form(collective, cluster.n_nodes)
    # Between nodes each GPU has a g-th of the data, but all of what it must exchange.
    n_between = n * cluster.gpus_per_node if collective == "all_to_all" else n
    return (
        Traffic(in_node.n_messages, in_node.share * n),
        Traffic(across.n_messages, across.share * n_between),
    )
