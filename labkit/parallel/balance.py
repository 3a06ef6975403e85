"""Where to put experts, and which of them twice, so that no GPU works much longer.

The expert-parallel load balancer that DeepSeek published with V3 (section 3.4 of the
report; DeepSeek-EPLB), in three greedy steps:

1. *Groups to nodes*: the heaviest group of experts first, each onto the node with the
   least load that has room. Tokens choose few groups, so a group belongs on one node.
2. *Replicas*: while a node has free slots, the expert whose replicas are busiest gets
   another one.
3. *Replicas to GPUs*: as step 1, inside each node.

Where groups do not spread evenly over nodes, the nodes are forgotten, and steps 2 and 3
serve all GPUs at once. That *global* form balances better, and sends tokens further.

No step is undone, so that the best placement can be missed: for experts that are almost
equally busy, spare slots may even leave a GPU with more to do than none would.
"""

import heapq
from collections.abc import Sequence

import torch
from jaxtyping import Num
from torch import Tensor

from labkit.config.checks import require_whole
from labkit.parallel.placement import Placement, require_counts, require_multiple


def balance_experts(
    load: Num[Tensor, "l e"],
    *,
    n_replicas: int,
    n_gpus: int,
    n_nodes: int = 1,
    n_groups: int = 1,
) -> Placement:
    """Return where every expert goes, the busy ones to several GPUs.

    The placement is hierarchical where `n_nodes` divides `n_groups`, else global; what
    `n_nodes` it then has says only which GPUs are neighbours.

    Args:
        load: tokens that chose each expert of each MoE layer, as `LossParts.load` has
            them, summed over steps and ranks.
        n_replicas: slots for experts on all GPUs together.
        n_gpus: GPUs that share one layer's experts.
        n_nodes: nodes with `n_gpus / n_nodes` of them each.
        n_groups: groups of neighbouring experts that the router chooses first.

    >>> load = torch.tensor([[90, 10, 10, 10]])
    >>> balanced = balance_experts(load, n_replicas=6, n_gpus=2)
    >>> balanced.by_gpu.tolist(), balanced.gpu_load(load).tolist()
    ([[[0, 0, 3], [0, 1, 2]]], [[70.0, 50.0]])

    Raises:
        ValueError: the numbers do not divide, or a load is no count.
    """
    numbers = {"n_replicas": n_replicas, "n_gpus": n_gpus}
    require_whole(numbers | {"n_nodes": n_nodes, "n_groups": n_groups})
    _require_fit(load, n_replicas, n_groups)
    require_multiple("n_replicas", n_replicas, "n_gpus", n_gpus)
    require_multiple("n_gpus", n_gpus, "n_nodes", n_nodes)
    n_domains = 1 if n_groups % n_nodes else n_nodes
    if n_domains == 1:
        n_groups = 1
    experts = [
        _place(
            each,
            _nodes_of(each, n_groups, n_domains),
            n_replicas=n_replicas // n_domains,
            n_gpus=n_gpus // n_domains,
        )
        for each in load.double().tolist()
    ]
    return Placement(
        experts=torch.tensor(experts),
        n_experts=load.shape[1],
        n_gpus=n_gpus,
        n_nodes=n_nodes,
    )


def pack(weights: Sequence[float], n_packs: int) -> list[list[int]]:
    """Return which items go together, equally many in each pack, the heaviest first.

    Each goes to the lightest pack that has room (longest processing time first, Graham
    1969, with a limit on the number); ties go to the lower index.

    >>> pack([5, 4, 3, 2], 2)
    [[0, 3], [1, 2]]
    """
    room = len(weights) // n_packs
    packs = [[] for _ in range(n_packs)]
    lightest = [(0.0, index) for index in range(n_packs)]
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        weight, index = heapq.heappop(lightest)
        packs[index].append(item)
        if len(packs[index]) < room:
            heapq.heappush(lightest, (weight + weights[item], index))
    return packs


def _nodes_of(load: list[float], n_groups: int, n_nodes: int) -> list[list[int]]:
    """Return the experts of each node, in whole groups."""
    size = len(load) // n_groups
    groups = [range(group * size, (group + 1) * size) for group in range(n_groups)]
    of_groups = [sum(load[expert] for expert in group) for group in groups]
    return [
        [expert for group in pack_of_groups for expert in groups[group]]
        for pack_of_groups in pack(of_groups, n_nodes)
    ]


def _place(
    load: list[float], nodes: list[list[int]], *, n_replicas: int, n_gpus: int
) -> list[int]:
    """Return the expert of every slot of one layer, node by node, GPU by GPU."""
    slots = []
    for experts in nodes:
        replicas, shares = _replicate(load, experts, n_replicas)
        for gpu in pack(shares, n_gpus):
            slots += [replicas[replica] for replica in gpu]
    return slots


def _replicate(
    load: list[float], experts: list[int], n_replicas: int
) -> tuple[list[int], list[float]]:
    """Return `n_replicas` of these experts, first each once, and what comes to each."""
    busiest = [(-load[expert], index) for index, expert in enumerate(experts)]
    heapq.heapify(busiest)
    counts = [1] * len(experts)
    replicas = list(range(len(experts)))
    while len(replicas) < n_replicas:
        index = busiest[0][1]
        counts[index] += 1
        replicas.append(index)
        heapq.heapreplace(busiest, (-load[experts[index]] / counts[index], index))
    shares = [load[experts[index]] / counts[index] for index in replicas]
    return [experts[index] for index in replicas], shares


def _require_fit(load: Num[Tensor, "l e"], n_replicas: int, n_groups: int) -> None:
    require_counts(load)
    n_layers, n_experts = load.shape
    if not n_layers or not n_experts:
        raise ValueError(
            "load must have a layer and an expert; got the shape "
            f"{tuple(load.shape)}. Give a row for each MoE layer."
        )
    require_multiple("the experts", n_experts, "n_groups", n_groups)
    if n_replicas < n_experts:
        raise ValueError(
            f"n_replicas must be at least the {n_experts} experts, which need a slot "
            f"each; got {n_replicas}. Set n_replicas={n_experts} or more."
        )
