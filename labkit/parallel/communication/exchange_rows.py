"""Which rows an exchange of tokens sends from rank to rank, counted from choices alone.

`labkit.parallel.communication.dispatch` has what is to be expected where all experts
are equally likely; this counts what given choices take, whatever their skew.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from labkit.config.checks import require_flag, require_whole
from labkit.parallel.communication.exchange import levels_of
from labkit.parallel.placement import require_multiple


class Crossing(NamedTuple):
    """Rows of all ranks in one direction; those that stay on their rank are free."""

    between: int
    """From a node to another."""

    inside: int
    """From a rank to another of its node."""


def rows_sent(
    experts: Int[Tensor, "r n k"],
    n_experts: int,
    *,
    n_nodes: int = 1,
    deduplicate: bool = True,
) -> Int[Tensor, "r r"]:
    """Return how many rows each rank (row) sends to each (column), on one way.

    As many come back. Each row takes `RowFormat.n_bytes`.

    Args:
        experts: what each rank's tokens chose.
        n_experts: on all ranks, in order.
        n_nodes: of two hops; 1 is one hop, whatever the ranks are on.
        deduplicate: as for `expert_exchange`.

    >>> experts = torch.tensor([[[2, 3]], [[2, 1]], [[0, 1]], [[2, 3]]])
    >>> rows_sent(experts, 4).tolist()
    [[0, 0, 1, 1], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]]
    >>> rows_sent(experts, 4, n_nodes=2).tolist()
    [[1, 1, 1, 0], [0, 2, 0, 1], [1, 0, 1, 1], [0, 0, 2, 2]]

    Raises:
        ValueError: as `expert_exchange`.
    """
    require_flag({"deduplicate": deduplicate})
    n_ranks = len(experts)
    sent = torch.zeros(n_ranks, n_ranks, dtype=torch.int64)

    def add(rank: int, chosen: Int[Tensor, "n k"], depth: int = 0) -> None:
        levels = levels_of(rank, n_ranks, n_experts, n_nodes)
        goals = levels[depth].goals(chosen)
        for goal, is_copied in zip(levels[depth].ranks, goals.T, strict=True):
            sent[rank, goal] += is_copied.sum()
            if depth + 1 < len(levels):
                add(goal, chosen[is_copied], depth + 1)

    for rank, chosen in enumerate(experts):
        # Without deduplication every choice is a row by itself.
        add(rank, chosen if deduplicate else chosen.reshape(-1, 1))
    return sent


def crossing(rows: Int[Tensor, "r r"], n_nodes: int) -> Crossing:
    """Return how many rows leave their node, and how many their rank only.

    Args:
        rows: from each rank to each, as `rows_sent` has them.
        n_nodes: on which these are, in order.

    >>> crossing(torch.tensor([[5, 1, 2, 3]] * 4), 2)
    Crossing(between=22, inside=11)

    Raises:
        ValueError: nodes would not be equal.
    """
    require_whole({"n_nodes": n_nodes})
    require_multiple("the ranks", len(rows), "n_nodes", n_nodes)
    per_node = len(rows) // n_nodes
    blocks = rows.unflatten(0, (n_nodes, per_node)).unflatten(2, (n_nodes, per_node))
    in_nodes = blocks.diagonal(dim1=0, dim2=2).sum()
    return Crossing(int(rows.sum() - in_nodes), int(in_nodes - rows.trace()))
