"""Tokens to the ranks that hold their experts, and sums of results back.

A token is copied to each rank that has some of its experts. With nodes it goes in two
hops: a copy to each *node*, to the rank there with the sender's index, which hands it
to others of the node. Results are summed the same way back: by rank, then in the node,
then at home (DeepSeek-V3, section 3.2.2). So a slow link between nodes carries a token
once and a result once, however many experts the node has of it; with node-limited
routing, one group of experts per node, few nodes have any.

Routing weights travel with tokens, 4 bytes a choice, and experts apply them. Otherwise
each expert's result would have to travel by itself, to be weighted at home, and to be
kept there for the gradient of its weight.

How many rows come is exchanged before the rows are.

Tested with gloo on CPUs; on GPUs and with NCCL it has not been run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from labkit.config.checks import require_flag, require_whole
from labkit.parallel.communication.exchange_trip import (
    Hop,
    Lanes,
    combine_trip,
    dispatch_trip,
    land,
    launch,
)
from labkit.parallel.communication.payload import Payload, payload_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Members of a group that have equally many experts each, in order."""

    ranks: tuple[int, ...]
    """The members, by their place among all that share experts."""

    first: int
    """The first expert of the first member."""

    each: int
    """Experts of a member; the last of all may have fewer."""

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    def members(self, experts: Int[Tensor, "n k"]) -> Int[Tensor, "n k"]:
        """Return who has these experts; `size` where nobody here does.

        >>> level = Level(ranks=(2, 3), first=4, each=2)
        >>> level.members(torch.tensor([[3, 4, 5, 6, 8]])).tolist()
        [[2, 0, 0, 1, 2]]
        """
        members = (experts - self.first).div(self.each, rounding_mode="floor")
        return members.masked_fill_((members < 0) | (members > self.size), self.size)

    def goals(self, experts: Int[Tensor, "n k"]) -> Bool[Tensor, "n r"]:
        """Return which members have some of each token's experts.

        >>> level = Level(ranks=(2, 3), first=4, each=2)
        >>> level.goals(torch.tensor([[3, 4, 5], [5, 6, 8]])).int().tolist()
        [[1, 0], [1, 1]]
        """
        shape = (len(experts), self.size + 1)
        is_goal = torch.zeros(shape, dtype=torch.bool, device=experts.device)
        return is_goal.scatter_(1, self.members(experts), True)[:, : self.size]


def levels_of(
    rank: int, n_ranks: int, n_experts: int, n_nodes: int = 1
) -> tuple[Level, ...]:
    """Return with whom a rank exchanges rows, the widest level first.

    >>> for level in levels_of(1, 4, 8, n_nodes=2):
    ...     level
    Level(ranks=(1, 3), first=0, each=4)
    Level(ranks=(0, 1), first=0, each=2)

    Raises:
        ValueError: as `expert_exchange`.
    """
    _require_places(n_ranks, n_experts, n_nodes)
    each, per_node = -(-n_experts // n_ranks), n_ranks // n_nodes
    start, place = rank - rank % per_node, rank % per_node
    across = Level(
        ranks=tuple(range(place, n_ranks, per_node)), first=0, each=each * per_node
    )
    inside = Level(
        ranks=tuple(range(start, start + per_node)), first=start * each, each=each
    )
    return tuple(level for level in (across, inside) if level.size > 1) or (inside,)


class Arrived(NamedTuple):
    """The rows that came to a rank, and all or one of the choices of their tokens."""

    values: Float[Tensor, "q d"]
    weights: Float[Tensor, "q k"]
    experts: Int[Tensor, "q k"]


class Exchange:
    """The way of tokens to experts over one or two levels of a group of ranks.

    Attributes:
        levels: from the widest to the narrowest.
        lanes: the groups of this rank's members on each level.
        payload: in what rows travel.
        deduplicate: whether a rank gets one copy of a row, instead of one for each
            expert that it has of the row's token.
        own: this rank's experts.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        lanes: Sequence[Lanes],
        *,
        n_experts: int,
        payload: str | Payload,
        deduplicate: bool,
    ) -> None:
        self.levels, self.lanes = tuple(levels), tuple(lanes)
        self.payload, self.deduplicate = payload_of(payload), deduplicate
        last = levels[-1]
        first = last.first + last.each * dist.get_rank(lanes[-1].forward)
        self.own = range(first, min(first + last.each, n_experts))

    def send(
        self,
        x: Float[Tensor, "n d"],
        weights: Float[Tensor, "n k"],
        experts: Int[Tensor, "n k"],
    ) -> "Journey":
        """Send tokens on their first hop; return while they are on their way."""
        journey = Journey(self)
        journey.depart(x, weights.float(), experts=experts)
        return journey

    def hop(self, level: int, experts: Int[Tensor, "n k"]) -> Hop:
        """Return who gets which rows on a level, once everyone has said how many."""
        lanes, k = self.lanes[level], experts.shape[1]
        if self.deduplicate:
            is_goal = self.levels[level].goals(experts)
            token = choice = is_goal.T.nonzero()[:, 1]
            counts = is_goal.sum(dim=0)
        else:
            members = self.levels[level].members(experts).flatten()
            choice = members.argsort(stable=True)
            token = choice.div(k, rounding_mode="floor")
            counts = members.bincount(minlength=self.levels[level].size)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=lanes.forward)
        return Hop(
            lanes=lanes,
            token=token,
            choice=choice,
            shape=(len(experts), k),
            n_choices=k if self.deduplicate else 1,
            sent=counts.tolist(),
            received=received.tolist(),
        )


class Journey:
    """Tokens of one batch on their way to experts, and results on their way back.

    Call `arrived`, then `back`, once each. What is computed before `arrived` is
    computed while tokens travel, and so is its gradient while theirs do.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.hops: list[Hop] = []

    def depart(self, *row: Float[Tensor, "n ..."], experts: Int[Tensor, "n k"]) -> None:
        """Send rows and weights over the next level, and do not wait for them."""
        hop = self.exchange.hop(len(self.hops), experts)
        self.hops.append(hop)
        self.trip = dispatch_trip(hop, self.exchange.payload, row[0], experts)
        self.promises = launch(self.trip, *row)

    def arrived(self) -> Arrived:
        """Return the rows for this rank's experts, when they are here."""
        row = land(self.trip, self.promises)
        while len(self.hops) < len(self.exchange.levels):
            self.depart(*row, experts=self.trip.experts)
            row = land(self.trip, self.promises)
        del self.promises
        return Arrived(*row, self.trip.experts)

    def back(self, results: Float[Tensor, "q d"]) -> Float[Tensor, "n d"]:
        """Return, for each token that was sent, the sum of its experts' results.

        Args:
            results: for each row that arrived, the weighted sum of experts here.
        """
        for hop in reversed(self.hops):
            trip = combine_trip(hop, self.exchange.payload, results)
            (results,) = land(trip, launch(trip, results))
        return results


def expert_exchange(
    ranks: Sequence[int],
    n_experts: int,
    *,
    payload: str | Payload = "fp32",
    n_nodes: int = 1,
    deduplicate: bool = True,
) -> Exchange:
    """Return the way of tokens to experts among some ranks; all of these call it.

    Experts are spread in order, ceil(n_experts / ranks) to a rank, as DTensors are.

    Args:
        ranks: that hold all experts together, node by node.
        n_experts: on all of them.
        payload: a name in `PAYLOADS`, or formats for each direction.
        n_nodes: that the ranks are on; more than one makes it two hops.
        deduplicate: whether a row goes once to a rank, instead of once for each expert.

    Raises:
        ValueError: this rank is not among them, a rank would have no expert, nodes
            would not be equal, or rows that go once for each expert were to go in two
            hops.
    """
    require_flag({"deduplicate": deduplicate})
    ranks = _with_this_one(ranks)
    levels = levels_of(ranks.index(dist.get_rank()), len(ranks), n_experts, n_nodes)
    if len(levels) > 1 and not deduplicate:
        raise ValueError(
            "deduplicate must be True with nodes, because a row goes to each once; got "
            f"False and n_nodes={n_nodes}. Set n_nodes=1."
        )
    return Exchange(
        levels,
        [_lanes([ranks[member] for member in level.ranks]) for level in levels],
        n_experts=n_experts,
        payload=payload,
        deduplicate=deduplicate,
    )


def _with_this_one(ranks: Sequence[int]) -> list[int]:
    ranks, this = list(ranks), dist.get_rank()
    if this not in ranks:
        raise ValueError(
            "ranks that exchange tokens must be those that call this; got "
            f"{ranks} on rank {this}. Call it with each rank's own group."
        )
    return ranks


def _lanes(ranks: list[int]) -> Lanes:
    groups = (dist.new_group(ranks, use_local_synchronization=True) for _ in range(2))
    return Lanes(*groups)


def _require_places(n_ranks: int, n_experts: int, n_nodes: int) -> None:
    require_whole({"n_experts": n_experts, "n_nodes": n_nodes})
    if n_ranks % n_nodes:
        raise ValueError(
            "n_nodes must divide the ranks that share experts, because nodes are "
            f"equal; got n_nodes={n_nodes} and {n_ranks} ranks. "
            f"Set n_nodes={math.gcd(n_nodes, n_ranks)}."
        )
    each = -(-n_experts // n_ranks)
    if (n_ranks - 1) * each >= n_experts:
        raise ValueError(
            f"ep must leave an expert for each rank, of which all but the last take "
            f"{each}; got ep={n_ranks} and {n_experts} experts. "
            f"Set ep={math.gcd(n_ranks, n_experts)}."
        )
