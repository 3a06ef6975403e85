"""What it takes to bring tokens to their experts and back.

A token goes to the GPUs that hold its k experts. Sent plainly, it goes once for each
expert. DeepSeek's kernels send it once to each *node* that has some of them, to the GPU
there with the sender's index, which hands it to others of the node (DeepSeek-V3,
section 3.2.2). The node limit of the router bounds how many nodes that are.

Counted here are expected copies, where every expert is as likely as any other and all
that are left after the node limit are independent of it. Where loads differ, the
busiest GPU has more to send: see `Placement`.
"""

from math import comb

from labkit.config import MoEConfig
from labkit.config.checks import require_above, require_flag, require_whole
from labkit.parallel.communication.cluster import Cluster
from labkit.parallel.communication.cost import NONE, Cost, Traffic, cost_of
from labkit.parallel.placement import require_multiple


def expert_dispatch(
    cluster: Cluster,
    moe: MoEConfig,
    *,
    n_tokens: int,
    token_bytes: float,
    deduplicate: bool = True,
) -> Cost:
    """Return what one way between tokens and experts takes, of one layer.

    The way back moves as many rows: sums of a node's experts instead of copies. Its
    rows are often wider, as BF16 beside FP8, and so it is asked for on its own.

    Args:
        cluster: whose GPUs share the experts.
        moe: how tokens choose them.
        n_tokens: of each GPU.
        token_bytes: of one token's row.
        deduplicate: whether a node gets a token once, instead of once an expert.

    >>> from labkit.config import PRESETS
    >>> from labkit.parallel.communication.cluster import cluster
    >>> moe, nodes = PRESETS["v3-671b"].moe, cluster("h800", 64)
    >>> cost = expert_dispatch(nodes, moe, n_tokens=4096, token_bytes=7168)
    >>> round(cost.node_bytes / 8 / 4096 / 7168, 2)
    3.18

    Raises:
        ValueError: experts or groups do not spread over the GPUs, or a number is out of
            range.
    """
    require_whole({"n_tokens": n_tokens})
    require_above({"token_bytes": token_bytes}, 0)
    require_flag({"deduplicate": deduplicate})
    n_nodes, per_node = cluster.n_nodes, cluster.gpus_per_node
    require_multiple(
        "n_routed_experts", moe.n_routed_experts, "the GPUs", cluster.n_gpus
    )
    if deduplicate:
        to_nodes = (n_nodes - 1) * _reached(moe, moe.n_routed_experts // n_nodes)
        of_gpu = _reached(moe, moe.n_routed_experts // cluster.n_gpus)
        in_nodes = n_nodes * (per_node - 1) * of_gpu
    else:
        each = moe.n_activated_experts / cluster.n_gpus
        to_nodes = each * (cluster.n_gpus - per_node)
        in_nodes = each * (per_node - 1)
    rows = n_tokens * token_bytes
    n_far = n_nodes - 1 if deduplicate else cluster.n_gpus - per_node
    return cost_of(
        cluster,
        inside=Traffic(per_node - 1, in_nodes * rows) if per_node > 1 else NONE,
        between=Traffic(n_far, to_nodes * rows * per_node) if n_nodes > 1 else NONE,
        is_at_once=True,
    )


def _reached(moe: MoEConfig, n_held: int) -> float:
    """Return how likely a token goes to one of the next `n_held` experts at all.

    Of G groups the token has M, of which j are here with probability
    C(h, j) C(G - h, M - j) / C(G, M); all k experts are then elsewhere in
    C(M s - j m, k) of C(M s, k) cases, with s experts in a group and m of them here.
    """
    n_groups, n_chosen = moe.n_expert_groups, moe.n_limited_groups
    k, size = moe.n_activated_experts, moe.n_routed_experts // n_groups
    n_here = max(n_held // size, 1)
    each = min(n_held, size)
    if n_held % each or (n_held < size and size % n_held):
        raise ValueError(
            "the experts of a node or GPU must be whole groups, or an equal part of "
            f"one; got {n_held} of them and groups of {size}. Choose n_expert_groups "
            "so that it is a multiple of the nodes, or divides them."
        )
    n_ways = comb(n_groups, n_chosen) * comb(n_chosen * size, k)
    missed = sum(
        comb(n_here, j)
        * comb(n_groups - n_here, n_chosen - j)
        * comb(n_chosen * size - j * each, k)
        for j in range(min(n_here, n_chosen) + 1)
    )
    return 1 - missed / n_ways
