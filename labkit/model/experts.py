"""Routed experts: sort tokens by expert, multiply block by block, sum per token."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from labkit.model.norm import compute_dtype


class Dispatch(NamedTuple):
    """A sorting of (token, choice) pairs by expert."""

    token: Int[Tensor, "p"]
    """The token of each row, rows sorted by expert."""

    row: Int[Tensor, "n k"]
    """The row of each token's choices: the inverse of the sorting."""

    ends: list[int]
    """The row after each expert's last; experts without tokens have none."""


def dispatch(experts: Int[Tensor, "n k"], n_experts: int) -> Dispatch:
    """Return the rows in expert order.

    >>> token, row, ends = dispatch(torch.tensor([[2, 0], [0, 2]]), 3)
    >>> token.tolist(), row.tolist(), ends
    ([0, 1, 0, 1], [[2, 0], [1, 3]], [2, 2, 4])
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)  # (p,)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(flat, minlength=n_experts)
    ends = counts.cumsum(0).tolist()
    return Dispatch(order // experts.shape[1], row.view_as(experts), ends)


class _SwiGLUExperts(torch.autograd.Function):
    """Weighted sum of SwiGLU experts, saving only what the backward must read.

    The routing weight multiplies the hidden layer, before the down-projection: the
    same sum, on the narrower side. Kept are the input, the two projections of the
    hidden layer and the weights; the gathered input and the product are rebuilt.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  autograd takes each tensor on its own
        ctx: FunctionCtx,
        x: Tensor,
        weights: Tensor,
        w13: Tensor,
        w2: Tensor,
        plan: Dispatch,
    ) -> Tensor:
        token, row, ends = plan
        rows = x.index_select(0, token)  # (p, d)
        scale = _sorted_weights(weights, row)  # (p, 1)
        hidden = rows.new_empty(len(token), w13.shape[1])  # (p, 2f)
        start = 0
        for expert, end in enumerate(ends):
            if end > start:
                block = hidden[start:end]
                torch.mm(rows[start:end], w13[expert].T, out=block)
                gate, up = block.chunk(2, dim=-1)
                product = F.silu(gate).mul_(up).mul_(scale[start:end])
                # The gathered rows are read; their place takes the result.
                torch.mm(product, w2[expert].T, out=rows[start:end])
            start = end
        ctx.save_for_backward(x, weights, w13, w2, hidden, token, row)
        ctx.ends = ends
        return F.embedding_bag(row, rows, mode="sum")

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        x, weights, w13, w2, hidden, token, row = ctx.saved_tensors
        rows = x.index_select(0, token)
        grad_rows = grad.index_select(0, token)  # (p, d)
        scale = _sorted_weights(weights, row)
        grad_scale = torch.empty_like(scale)
        grad_w13, grad_w2 = torch.empty_like(w13), torch.empty_like(w2)
        start = 0
        for expert, end in enumerate(ctx.ends):
            if end == start:
                grad_w13[expert].zero_()
                grad_w2[expert].zero_()
            else:
                block = slice(start, end)
                gate, up = hidden[block].chunk(2, dim=-1)
                grad_product = grad_rows[block] @ w2[expert]  # (rows, f)
                silu = F.silu(gate)
                product = silu * up
                torch.sum(
                    grad_product * product, -1, keepdim=True, out=grad_scale[block]
                )
                grad_product.mul_(scale[block])
                product.mul_(scale[block])
                torch.mm(grad_rows[block].T, product, out=grad_w2[expert])
                grad_gate = torch.ops.aten.silu_backward(grad_product * up, gate)
                grad_hidden = torch.cat((grad_gate, grad_product.mul_(silu)), dim=-1)
                torch.mm(grad_hidden.T, rows[block], out=grad_w13[expert])
                torch.mm(grad_hidden, w13[expert], out=grad_rows[block])
            start = end
        grad_x = F.embedding_bag(row, grad_rows, mode="sum")
        grad_weights = grad_scale.flatten()[row].type_as(weights)
        return grad_x, grad_weights, grad_w13, grad_w2, None


def _sorted_weights(
    weights: Float[Tensor, "n k"], row: Int[Tensor, "n k"]
) -> Float[Tensor, "p 1"]:
    ordered = torch.empty_like(weights).flatten()
    ordered[row.flatten()] = weights.flatten()
    return ordered.unsqueeze(-1)


class Experts(nn.Module):
    """Routed SwiGLU experts, stored as two stacks of matrices."""

    def __init__(self, n_experts: int, dim: int, inter_dim: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(n_experts, 2 * inter_dim, dim))
        """Gate rows first, then up rows."""
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, inter_dim))

    def forward(
        self,
        x: Float[Tensor, "n d"],
        weights: Float[Tensor, "n k"],
        experts: Int[Tensor, "n k"],
    ) -> Float[Tensor, "n d"]:
        dtype = compute_dtype(x)
        x, weights = x.to(dtype), weights.to(dtype)
        w13, w2 = self.w13.to(dtype), self.w2.to(dtype)
        plan = dispatch(experts, len(w13))
        return _SwiGLUExperts.apply(x, weights, w13, w2, plan)

    def extra_repr(self) -> str:
        n_experts, dim, inter_dim = self.w2.shape
        return f"n_experts={n_experts}, dim={dim}, inter_dim={inter_dim}"
