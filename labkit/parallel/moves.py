"""What it costs to go from one placement of experts to another.

A GPU fetches the weights of an expert that it holds after, and did not before; from its
own node where another GPU there had them, else over the network. Which of two GPUs of a
node gets which set of experts is free, so `settle` chooses that fewest move.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from labkit.config.checks import require_whole
from labkit.parallel.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moves:
    """The weights that a new placement makes GPUs fetch."""

    fetched: Int64[Tensor, "l g"]
    """Experts that each GPU lacks, by layer."""

    remote: Int64[Tensor, "l g"]
    """Those of them that no GPU of its node had."""

    expert_bytes: int
    """Weights of one expert; optimizer states move as well if they are counted here."""

    @property
    def total_bytes(self) -> int:
        """Bytes that all GPUs fetch."""
        return self.fetched.sum().item() * self.expert_bytes

    @property
    def network_bytes(self) -> int:
        """The part of them that comes from another node."""
        return self.remote.sum().item() * self.expert_bytes

    @property
    def busiest_bytes(self) -> int:
        """Bytes that the GPU fetches which fetches most; the others wait for it."""
        return self.fetched.sum(dim=0).max().item() * self.expert_bytes


def moves(before: Placement, after: Placement, *, expert_bytes: int) -> Moves:
    """Return what GPUs fetch when `before` gives way to `after`.

    >>> from labkit.parallel.placement import contiguous
    >>> before = contiguous(1, 4, n_gpus=2)
    >>> after = replace(before, experts=torch.tensor([[0, 2, 1, 3]]))
    >>> moves(before, after, expert_bytes=10).total_bytes
    20

    Raises:
        ValueError: the two are not of one model on the same GPUs.
    """
    require_whole({"expert_bytes": expert_bytes})
    _require_same(before, after)
    held, wanted = _holds(before), _holds(after)
    on_node = held.unflatten(1, (after.n_nodes, -1)).any(dim=2)
    on_node = on_node.repeat_interleave(after.n_gpus // after.n_nodes, dim=1)
    return Moves(
        fetched=(wanted & ~held).sum(dim=-1),
        remote=(wanted & ~on_node).sum(dim=-1),
        expert_bytes=expert_bytes,
    )


def settle(before: Placement, after: Placement) -> Placement:
    """Return `after` with GPUs renamed inside each node, so that less has to move.

    Every node keeps its experts and every load its GPU's, only under another number.
    Pairs with most experts in common are matched first, which is not always best; where
    it is worse than the numbers as they were, these stay.

    Raises:
        ValueError: the two are not of one model on the same GPUs.
    """
    _require_same(before, after)
    held, wanted = _holds(before).long(), _holds(after).long()
    common = torch.einsum("lhe,lge->lhg", held, wanted)  # (l, old GPU, new GPU)
    size = after.n_gpus // after.n_nodes
    renamed = [
        [
            start + index
            for start in range(0, after.n_gpus, size)
            for index in _match(layer[start : start + size, start : start + size])
        ]
        for layer in common
    ]
    order = torch.tensor(renamed).unsqueeze(-1).expand_as(after.by_gpu)
    return replace(after, experts=after.by_gpu.gather(1, order).flatten(1))


def _match(common: Int64[Tensor, "h g"]) -> list[int]:
    """Return for each old GPU the new set that it takes; best pairs first."""
    size = len(common)
    taken = [-1] * size
    free = set(range(size))
    for pair in common.flatten().argsort(descending=True, stable=True).tolist():
        old, new = divmod(pair, size)
        if taken[old] < 0 and new in free:
            taken[old] = new
            free.remove(new)
    is_better = sum(common[range(size), taken]) > common.trace()
    return taken if is_better else list(range(size))


def _holds(placement: Placement) -> Bool[Tensor, "l g e"]:
    """Return whether each GPU has each expert."""
    n_layers, n_gpus, _ = placement.by_gpu.shape
    none = torch.zeros(n_layers, n_gpus, placement.n_experts, dtype=torch.bool)
    return none.scatter(2, placement.by_gpu, True)


def _require_same(before: Placement, after: Placement) -> None:
    sizes = [
        (len(each.experts), each.n_experts, each.n_gpus, each.n_nodes)
        for each in (before, after)
    ]
    if sizes[0] != sizes[1]:
        raise ValueError(
            "two placements must agree in layers, experts, GPUs and nodes; got "
            f"{sizes[0]} and {sizes[1]}. Make both for the same model and GPUs."
        )
