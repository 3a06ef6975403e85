"""A cluster as two kinds of link: one inside a node, one between nodes.

A message of n bytes takes alpha + beta n seconds (Hockney 1994), where alpha is the
latency and 1 / beta the bandwidth of its link.
"""

from dataclasses import dataclass

from labkit.config.checks import named, require_above, require_at_least, require_whole
from labkit.hardware import accelerator
from labkit.hardware.units import rate
from labkit.parallel.placement import require_multiple

LATENCY = {"NVLink": 3.4e-6, "PCIe": 5.7e-6, "Infinity": 3.4e-6}
"""Seconds for a message inside a node, by the first word of `Accelerator.link`.

What NCCL itself reckons with for a step of a ring with its Simple protocol (`hwLat` in
its src/graph/tuning.cc, 2026); Infinity Fabric is assumed to be as quick as NVLink.
"""

NETWORK_LATENCY = 14e-6
"""Seconds for a message between nodes, from the same table."""

SHARE_USED = 0.8
"""Of a link's bandwidth, what collectives reach: on the H800 160 of 200 GB/s of NVLink
and 40 of 50 GB/s of the network (arXiv 2505.09343)."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Link:
    """What joins two GPUs, in one direction."""

    latency_seconds: float
    """Alpha: what a message takes however short it is."""

    bytes_per_second: float
    """1 / beta: what a long message reaches."""

    def __post_init__(self) -> None:
        require_at_least(named(self, "latency_seconds"), 0)
        require_above(named(self, "bytes_per_second"), 0)

    def seconds(self, n_bytes: float, *, n_messages: float = 1) -> float:
        """Return how long `n_bytes` take in so many messages, one after another.

        >>> Link(latency_seconds=1e-6, bytes_per_second=1e9).seconds(1000)
        2e-06
        """
        return n_messages * self.latency_seconds + n_bytes / self.bytes_per_second

    def __repr__(self) -> str:
        speed = rate(self.bytes_per_second, "B/s")
        return f"Link({self.latency_seconds * 1e6:.3g} us, {speed})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    link: Link
    """From each GPU to the others of its node."""

    network: Link
    """From one network card to another node."""

    n_nodes: int = 1
    gpus_per_node: int = 8

    nics_per_node: int | None = None
    """Network cards that share a node's traffic; None gives each GPU its own."""

    def __post_init__(self) -> None:
        require_whole(named(self, "n_nodes", "gpus_per_node"))
        if self.nics_per_node is not None:
            require_whole(named(self, "nics_per_node"))

    @property
    def n_gpus(self) -> int:
        """All GPUs, of which each is a rank."""
        return self.n_nodes * self.gpus_per_node

    @property
    def node_bytes_per_second(self) -> float:
        """What leaves a node at once, over all its network cards."""
        return (
            self.nics_per_node or self.gpus_per_node
        ) * self.network.bytes_per_second


def cluster(name: str, n_gpus: int, *, share_used: float = SHARE_USED) -> Cluster:
    """Return `n_gpus` accelerators of the hardware table, in nodes of the usual size.

    Fewer than a node has are a smaller node.

    Args:
        name: of `ACCELERATORS`.
        n_gpus: at most a node of them, or a whole number of nodes.
        share_used: of the bandwidths on the data sheet, what collectives reach.

    >>> cluster("h800", 2048).n_nodes, cluster("h800", 2048).link
    (256, Link(3.4 us, 160 GB/s))

    Raises:
        ValueError: no such accelerator, or nodes that are not whole.
    """
    require_whole({"n_gpus": n_gpus})
    require_above({"share_used": share_used}, 0)
    if share_used > 1:
        raise ValueError(
            "share_used is a part of the bandwidth and must be at most 1; got "
            f"{share_used}. Set share_used to {SHARE_USED}, or what you measured."
        )
    found = accelerator(name)
    per_node = min(found.gpus_per_node, n_gpus)
    require_multiple("n_gpus", n_gpus, "the GPUs of a node", per_node)
    return Cluster(
        n_nodes=n_gpus // per_node,
        gpus_per_node=per_node,
        link=Link(
            latency_seconds=LATENCY[found.link.split()[0]],
            bytes_per_second=found.link_bytes_per_second * share_used,
        ),
        network=Link(
            latency_seconds=NETWORK_LATENCY,
            bytes_per_second=found.network_bytes_per_second * share_used,
        ),
    )
