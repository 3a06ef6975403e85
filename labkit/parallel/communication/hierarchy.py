"""All-reduce in two levels: inside each node, between nodes, inside each node again.

Ranks of a node first add up their buffers, each a part of them (reduce-scatter). Then
ranks of the same place in their nodes add up these parts (all-reduce), and last each
node's ranks hand their parts round (all-gather). Of n bytes, 2 (N - 1) / N n leave a
node of N; a flat ring over all p ranks sends 2 (p - 1) / p n from each node, and pays
the latency of the slow link 2 (p - 1) times, or nearly. It helps where the link between
nodes is much slower than the one inside; else two more collectives cost more than they
save.

As a `Compression` it is a hook of DDP: `compress_replicas(ddp, Hierarchical(nodes))`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from labkit.config.checks import require_whole
from labkit.parallel.communication.compress import Rounds, Sent, Shapes, finish
from labkit.parallel.communication.forms import form
from labkit.parallel.placement import require_multiple


class Nodes(NamedTuple):
    """The two groups of a rank."""

    inside: dist.ProcessGroup
    """The ranks of its node."""

    across: dist.ProcessGroup
    """The ranks of the same place in all nodes."""

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return self.inside.size()

    @property
    def n_nodes(self) -> int:
        """How many nodes there are."""
        return self.across.size()


def nodes_of(n_nodes: int, *, device: str = "cpu") -> Nodes:
    """Return the groups of equal nodes, of which the first has the first ranks.

    Every rank calls it, because groups are made by all.

    Raises:
        ValueError: ranks do not fill the nodes evenly.
    """
    require_whole({"n_nodes": n_nodes})
    n_ranks = dist.get_world_size()
    require_multiple("the ranks", n_ranks, "n_nodes", n_nodes)
    shape = (n_nodes, n_ranks // n_nodes)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("across", "inside"))
    return Nodes(mesh.get_group("inside"), mesh.get_group("across"))


def hierarchical_all_reduce(tensor: Num[Tensor, "..."], nodes: Nodes) -> None:
    """Make a tensor the sum over all ranks, in place; any number of values will do."""
    flat = tensor.flatten()
    tensor.copy_(finish(_rounds(flat, nodes)).view_as(tensor))


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """Sums of DDP's buckets in two levels; nothing is lost."""

    nodes: Nodes

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return "hierarchical"

    @property
    def state_bytes(self) -> int:
        """Bytes that are kept from step to step."""
        return 0

    def sum(
        self,
        flat: Float[Tensor, " n"],
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
    ) -> Rounds:
        """Sum a bucket over all ranks of all nodes, which `group` must be."""
        assert group.size() == self.nodes.per_node * self.nodes.n_nodes
        return _rounds(flat, self.nodes)

    def expected(self, shapes: Shapes, n_ranks: int) -> Sent:
        """Return what a rank sends for a bucket, to its node and beyond."""
        return expected_levels(
            4 * sum(prod(shape) for shape in shapes),
            n_nodes=self.nodes.n_nodes,
            per_node=n_ranks // self.nodes.n_nodes,
        )[-1]


def expected_levels(
    n_bytes: int, *, n_nodes: int, per_node: int, itemsize: int = 4
) -> tuple[Sent, Sent, Sent]:
    """Return what a rank sends inside its node, beyond it, and in all.

    Args:
        n_bytes: of a rank's buffer, which is padded to a multiple of `per_node` values.
        n_nodes: how many nodes.
        per_node: ranks of each.
        itemsize: bytes of a value.

    >>> inside, across, both = expected_levels(1 << 20, n_nodes=2, per_node=2)
    >>> inside.n_bytes, across.n_bytes
    (1048576.0, 524288.0)
    """
    part = -(-n_bytes // (per_node * itemsize)) * itemsize
    half, whole = form("all_gather", per_node), form("all_reduce", n_nodes)
    inside = Sent(2 * half.n_messages, 2 * half.share * part * per_node)
    across = Sent(whole.n_messages, whole.share * part)
    total = (a + b for a, b in zip(inside, across, strict=True))
    return inside, across, Sent(*total)


def _rounds(flat: Tensor, nodes: Nodes) -> Rounds:
    """Sum over both levels; yields each collective once it has begun."""
    inside, across = nodes
    n_values = len(flat)
    whole = F.pad(flat, (0, -n_values % inside.size()))
    part = whole
    if inside.size() > 1:
        part = whole.new_empty(len(whole) // inside.size())
        yield dist.reduce_scatter_single(part, whole, group=inside, async_op=True)
    if across.size() > 1:
        yield dist.all_reduce(part, group=across, async_op=True)
    if inside.size() > 1:
        whole = torch.empty_like(whole)
        yield dist.all_gather_single(whole, part, group=inside, async_op=True)
    return whole[:n_values]
