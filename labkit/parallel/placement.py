"""Which GPU holds which expert, and how much work that gives each.

An expert may lie in several slots; its tokens are then spread evenly over them. All
GPUs have equally many slots, and of each layer every expert has at least one.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64, Num
from torch import Tensor

from labkit.config.checks import require_whole


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Placement:
    """The expert in each slot of each GPU, for every MoE layer."""

    experts: Int64[Tensor, "l r"]
    """Expert of each slot; GPU `i` holds the `i`-th run of `n_slots` of them."""

    n_experts: int
    n_gpus: int

    n_nodes: int = 1
    """Nodes, of `n_gpus / n_nodes` neighbouring GPUs each."""

    def __post_init__(self) -> None:
        require_whole({"n_experts": self.n_experts, "n_gpus": self.n_gpus})
        require_whole({"n_nodes": self.n_nodes})
        require_multiple("n_gpus", self.n_gpus, "n_nodes", self.n_nodes)
        require_multiple("slots", self.experts.shape[1], "n_gpus", self.n_gpus)
        if self.experts.numel() == 0:
            raise ValueError(
                "a placement must have a layer and a slot; got experts of shape "
                f"{tuple(self.experts.shape)}. Give a row for each MoE layer."
            )
        is_known = (self.experts >= 0) & (self.experts < self.n_experts)
        if not is_known.all():
            raise ValueError(
                f"experts must be numbers below n_experts={self.n_experts}; got "
                f"{self.experts[~is_known][0].item()}. Correct the placement."
            )
        is_absent = self.counts() == 0
        if is_absent.any():
            layer, expert = is_absent.nonzero()[0].tolist()
            raise ValueError(
                "every expert must have a slot in every layer; got none for expert "
                f"{expert} in layer {layer}. Give it one."
            )

    @property
    def n_slots(self) -> int:
        """Experts that one GPU holds of each layer."""
        return self.experts.shape[1] // self.n_gpus

    @property
    def by_gpu(self) -> Int64[Tensor, "l g c"]:
        """The experts of each GPU."""
        return self.experts.unflatten(1, (self.n_gpus, self.n_slots))

    def counts(self) -> Int64[Tensor, "l e"]:
        """Return in how many slots each expert lies."""
        none = torch.zeros(len(self.experts), self.n_experts, dtype=torch.int64)
        return none.scatter_add(1, self.experts, torch.ones_like(self.experts))

    def gpu_load(self, load: Num[Tensor, "l e"]) -> Float64[Tensor, "l g"]:
        """Return the tokens that each GPU computes when `load` of them choose experts.

        Raises:
            ValueError: the load has another shape, or is negative or not finite.
        """
        self._require_load(load)
        shares = load.double() / self.counts()
        return shares.gather(1, self.experts).unflatten(1, (self.n_gpus, -1)).sum(-1)

    def imbalance(self, load: Num[Tensor, "l e"]) -> Float64[Tensor, "l"]:
        """Return the load of the slowest GPU over the mean, by layer; 1 is best.

        A layer that no token comes to is balanced.
        """
        by_gpu = self.gpu_load(load)
        mean = by_gpu.mean(dim=1)
        return torch.where(mean > 0, by_gpu.amax(dim=1) / mean, 1.0)

    def slowdown(self, load: Num[Tensor, "l e"]) -> float:
        """Return how many times longer the experts of all layers take than balanced.

        In each layer all GPUs wait for the slowest, so that layers add up.
        """
        by_gpu = self.gpu_load(load)
        balanced = by_gpu.mean(dim=1).sum().item()
        return by_gpu.amax(dim=1).sum().item() / balanced if balanced else 1.0

    def _require_load(self, load: Num[Tensor, "l e"]) -> None:
        expected = len(self.experts), self.n_experts
        if tuple(load.shape) != expected:
            raise ValueError(
                "load must have a row for each layer and a column for each expert, "
                f"which makes {expected}; got {tuple(load.shape)}. Count the tokens "
                "of the model that the placement was made for."
            )
        require_counts(load)

    def __repr__(self) -> str:
        nodes = f" on {self.n_nodes} nodes" if self.n_nodes > 1 else ""
        return (
            f"Placement({len(self.experts)} layers: {self.n_experts} experts in "
            f"{self.n_gpus} x {self.n_slots} slots{nodes})"
        )


def contiguous(
    n_layers: int, n_experts: int, *, n_gpus: int, n_nodes: int = 1
) -> Placement:
    """Return the placement of a fresh model: each GPU has the next experts, none twice.

    >>> contiguous(1, 4, n_gpus=2).by_gpu.tolist()
    [[[0, 1], [2, 3]]]

    Raises:
        ValueError: the experts do not spread evenly over the GPUs.
    """
    require_whole({"n_layers": n_layers, "n_experts": n_experts, "n_gpus": n_gpus})
    require_multiple("n_experts", n_experts, "n_gpus", n_gpus)
    return Placement(
        experts=torch.arange(n_experts).repeat(n_layers, 1),
        n_experts=n_experts,
        n_gpus=n_gpus,
        n_nodes=n_nodes,
    )


def require_multiple(whole: str, total: int, part: str, n_parts: int) -> None:
    """Raise ValueError unless `total` splits into `n_parts` equal parts."""
    if total % n_parts:
        raise ValueError(
            f"{whole} must be a multiple of {part}; got {total} and {n_parts}. Set "
            f"{whole}={-(-total // n_parts) * n_parts} or change {part}."
        )


def require_counts(load: Num[Tensor, "l e"]) -> None:
    """Raise ValueError unless every load is finite and not negative."""
    is_wrong = ~torch.isfinite(load) | (load < 0)
    if is_wrong.any():
        layer, expert = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            "load must count tokens, finite and not negative; got "
            f"{load[layer, expert].item()} for expert {expert} in layer {layer}. "
            "Count again."
        )
