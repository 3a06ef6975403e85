"""Mixture of experts: router, experts, balance (DeepSeek-V3, section 2.1.2).

Tokens are sorted by expert once, each expert multiplies one contiguous block of
rows, and every token sums its k results. The gradient of that permutation is again
a gather, so no scattered additions occur in either direction.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from labkit.config import MoEConfig
from labkit.model.checks import has_values
from labkit.model.experts import Experts
from labkit.model.linear import linear
from labkit.model.mlp import MLP


class Routing(NamedTuple):
    """What a router decided, kept for the balance loss and the load."""

    affinity: Float[Tensor, "b s e"]
    """Affinities without bias, in FP32; differentiable."""

    experts: Int[Tensor, "b s k"]


class _ExactLinear(torch.autograd.Function):
    """The FP32 product of narrower operands, which keeps these and not their copies.

    Gradients are those that PyTorch gives of the copies, to the bit.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        # Detached: what a reader left with the tensor itself would be kept with it.
        ctx.save_for_backward(x.detach(), weight)
        return linear(x.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_x = (grad @ weight.float()).type_as(x) if needs_x else None
        grad_weight = (grad.T @ x.float()).type_as(weight) if needs_weight else None
        return grad_x, grad_weight


class Router(nn.Module):
    """Choose experts for each token by affinity, steered by a balancing bias.

    The bias takes part in the choice only; the weights come from the affinity
    alone.
    """

    bias: Tensor | None

    def __init__(self, dim: int, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.n_routed_experts, dim))
        bias = torch.zeros(moe.n_routed_experts) if moe.has_bias else None
        self.register_buffer("bias", bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        exact = self.bias
        super()._apply(fn, recurse)
        if self.bias is not None and self.bias.dtype != torch.float32:
            # Casting the model must not round the bias: steps of 0.001 would vanish.
            self.bias = exact.to(self.bias.device)
        return self

    def forward(
        self, x: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"], Float[Tensor, "n e"]]:
        # Affinities in FP32: rounding in BF16 reorders near-ties between experts.
        known = "cpu" if x.is_meta else x.device.type  # to autocast
        with torch.autocast(known, enabled=False):
            if x.dtype != torch.float32 and torch.is_grad_enabled():
                logits = _ExactLinear.apply(x, self.weight)
            else:
                logits = linear(x.float(), self.weight.float())
        return self.route(logits)

    def route(
        self, logits: Float[Tensor, "n e"]
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"], Float[Tensor, "n e"]]:
        """Return weights, experts and affinities of tokens, from affinity logits."""
        moe = self.moe
        is_sigmoid = moe.score_func == "sigmoid"
        affinity = logits.sigmoid() if is_sigmoid else logits.softmax(dim=-1)
        experts = self.choose(affinity.detach())
        weights = affinity.gather(-1, experts)
        if moe.norm_topk_prob:
            # The guard only matters when every chosen affinity underflows.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * moe.route_scale, experts, affinity

    def choose(self, affinity: Float[Tensor, "n e"]) -> Int[Tensor, "n k"]:
        """Return the experts each token visits, within its best groups."""
        moe = self.moe
        score = affinity if self.bias is None else affinity + self.bias
        if moe.n_limited_groups < moe.n_expert_groups:
            grouped = score.unflatten(-1, (moe.n_expert_groups, -1))  # (n, g, e/g)
            n_best = min(2, moe.experts_per_group) if moe.group_score == "top2" else 1
            group_score = grouped.topk(n_best, dim=-1).values.sum(dim=-1)
            groups = group_score.topk(moe.n_limited_groups, dim=-1).indices
            is_closed = torch.ones_like(group_score, dtype=torch.bool)
            is_closed.scatter_(-1, groups, False)
            score = grouped.masked_fill(is_closed.unsqueeze(-1), -torch.inf).flatten(-2)
        return score.topk(moe.n_activated_experts, dim=-1, sorted=False).indices


class MoE(nn.Module):
    """A feed-forward layer of routed and shared experts."""

    def __init__(self, dim: int, moe: MoEConfig) -> None:
        super().__init__()
        self.gate = Router(dim, moe)
        self.experts = Experts(moe.n_routed_experts, dim, moe.moe_inter_dim)
        shared = moe.n_shared_experts * moe.moe_inter_dim
        self.shared_experts = MLP(dim, shared) if shared else None

    def forward(
        self, x: Float[Tensor, "b s d"]
    ) -> tuple[Float[Tensor, "b s d"], Routing]:
        batch = x.shape[:-1]
        flat = x.flatten(0, -2)  # (n, d)
        weights, experts, affinity = self.gate(flat)
        out = self.mixture(flat, weights, experts)
        routing = Routing(affinity.unflatten(0, batch), experts.unflatten(0, batch))
        return out.unflatten(0, batch), routing

    def mixture(
        self,
        x: Float[Tensor, "n d"],
        weights: Float[Tensor, "n k"],
        experts: Int[Tensor, "n k"],
    ) -> Float[Tensor, "n d"]:
        """Return the sum of each token's routed and shared experts.

        Another function may stand here, where other processes have some experts.
        """
        out = self.experts(x, weights, experts)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out


def expert_load(
    experts: Int[Tensor, "b s k"], n_routed_experts: int
) -> Int[Tensor, "e"]:
    """Return how many tokens visit each expert; without values, nobody knows."""
    if not has_values(experts):
        return experts.new_empty(n_routed_experts)
    return torch.bincount(experts.flatten(), minlength=n_routed_experts)


def balance_loss(
    affinity: Float[Tensor, "b s e"], n_activated_experts: int
) -> Float[Tensor, ""]:
    """Return the sequence-wise balance loss, summed over sequences, before alpha.

    Equations 17 to 20: for each sequence, the share of choices an expert would get
    without bias or groups, times its mean normalised affinity. Perfect balance
    gives 1 per sequence.

    >>> even = torch.full((1, 4, 4), 0.5) + 0.1 * torch.eye(4)
    >>> round(balance_loss(even, 1).item(), 4)
    1.0
    """
    _, n_tokens, n_experts = affinity.shape
    chosen = affinity.detach().topk(n_activated_experts, dim=-1).indices
    counts = torch.zeros_like(affinity).scatter_(-1, chosen, 1.0).sum(dim=1)  # (b, e)
    share = counts * (n_experts / (n_activated_experts * n_tokens))
    normalised = affinity / affinity.sum(dim=-1, keepdim=True)
    return (share * normalised.mean(dim=1)).sum()
