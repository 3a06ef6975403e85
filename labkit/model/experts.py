"""Routed experts: sort tokens by expert, multiply block by block, sum per token."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from labkit.model.checks import has_values
from labkit.model.linear import has_halves, linear
from labkit.model.norm import compute_dtype


class Dispatch(NamedTuple):
    """A sorting of (token, choice) pairs by expert, in blocks of padded length."""

    token: Int[Tensor, "p"]
    """The token of each row, rows sorted by expert; padding repeats token 0."""

    row: Int[Tensor, "n k"]
    """The row of each token's choices: the inverse of the sorting."""

    ends: list[int]
    """The row after each expert's last; experts without tokens have none."""


def dispatch(
    experts: Int[Tensor, "n k"], n_experts: int, *, multiple: int = 1
) -> Dispatch:
    """Return the rows in expert order, each block a multiple of `multiple` long.

    >>> token, row, ends = dispatch(torch.tensor([[2, 0], [0, 2]]), 3)
    >>> token.tolist(), row.tolist(), ends
    ([0, 1, 0, 1], [[2, 0], [1, 3]], [2, 2, 4])
    """
    if not has_values(experts):
        return _even_dispatch(experts, n_experts)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=n_experts)
    lengths = (counts + (multiple - 1)) // multiple * multiple
    ends = lengths.cumsum(0)
    shift = (ends - lengths) - (counts.cumsum(0) - counts)  # (e,) padding before
    row_of_pair = torch.arange(len(order), device=order.device) + shift[flat[order]]
    row = torch.empty_like(order)
    row[order] = row_of_pair
    ends = ends.tolist()
    token = order.new_zeros(ends[-1])  # (p,)
    token[row_of_pair] = order // experts.shape[1]
    return Dispatch(token, row.view_as(experts), ends)


def _even_dispatch(experts: Int[Tensor, "n k"], n_experts: int) -> Dispatch:
    """Return a plan of shapes alone: without choices, experts are equally busy."""
    n_pairs = experts.numel()
    ends = [n_pairs * (expert + 1) // n_experts for expert in range(n_experts)]
    return Dispatch(experts.new_empty(n_pairs), torch.empty_like(experts), ends)


def block_multiple(x: Float[Tensor, "n d"], n_rows: int, n_experts: int) -> int:
    """Return the multiple to which blocks of rows are padded.

    On a CPU a BF16 product of a new shape first compiles its kernel, three times the
    product's own time at 500 rows of 256; routing makes new shapes at every step.
    Rounding up by a sixteenth of a mean block leaves a handful of them.
    """
    if x.device.type != "cpu" or x.dtype != torch.bfloat16:
        return 1
    return max(n_rows // (8 * n_experts), 1)


class _SwiGLUExperts(torch.autograd.Function):
    """Weighted sum of SwiGLU experts, saving only what the backward must read.

    The routing weight multiplies the hidden layer, before the down-projection: the
    same sum, on the narrower side. Kept are the input, the two projections of the
    hidden layer and the weights; the gathered input and the product are rebuilt.
    Rows of padding have weight 0, so they add nothing anywhere.
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
        scale = _sorted_weights(weights, plan)  # (p, 1)
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
        # Detached: what a reader left with the tensor itself would be kept with it.
        ctx.save_for_backward(x.detach(), weights, w13, w2, hidden, token, row)
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
        scale = _sorted_weights(weights, Dispatch(token, row, ctx.ends))
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
                grad_hidden = torch.empty_like(hidden[block])
                grad_gate, grad_up = grad_hidden.chunk(2, dim=-1)
                torch.mul(grad_product, silu, out=grad_up)
                torch.ops.aten.silu_backward(
                    grad_product.mul_(up), gate, grad_input=grad_gate
                )
                torch.mm(grad_hidden.T, rows[block], out=grad_w13[expert])
                torch.mm(grad_hidden, w13[expert], out=grad_rows[block])
            start = end
        grad_x = F.embedding_bag(row, grad_rows, mode="sum")
        grad_weights = grad_scale.flatten()[row].type_as(weights)
        return grad_x, grad_weights, grad_w13, grad_w2, None


def _sorted_weights(
    weights: Float[Tensor, "n k"], plan: Dispatch
) -> Float[Tensor, "p 1"]:
    ordered = weights.new_zeros(len(plan.token))
    ordered[plan.row.flatten()] = weights.flatten()
    return ordered.unsqueeze(-1)


FEW_PAIRS = 16
"""Most (token, choice) pairs that are not worth sorting when decoding."""


def pair_by_pair(
    x: Float[Tensor, "n d"],
    weights: Float[Tensor, "n k"],
    experts: Int[Tensor, "n k"],
    w13: Float[Tensor, "e f2 d"],
    w2: Float[Tensor, "e d f"],
) -> Float[Tensor, "n d"]:
    """Return the weighted sum of experts for few tokens, two products a pair."""
    n_tokens, k = experts.shape
    chosen = experts.flatten().tolist()
    rows = [row for row in x.split(1) for _ in range(k)]
    hidden = [linear(row, w13[e]) for row, e in zip(rows, chosen, strict=True)]
    gate, up = torch.cat(hidden).chunk(2, dim=1)  # (p, f)
    product = F.silu(gate).mul_(up).mul_(weights.reshape(-1, 1)).split(1)
    out = [linear(row, w2[e]) for row, e in zip(product, chosen, strict=True)]
    return torch.cat(out).view(n_tokens, k, -1).sum(dim=1)


def all_pairs_at_once(
    x: Float[Tensor, "n d"],
    weights: Float[Tensor, "n k"],
    experts: Int[Tensor, "n k"],
    w13: Float[Tensor, "e f2 d"],
    w2: Float[Tensor, "e d f"],
) -> Float[Tensor, "n d"]:
    """Return the same as `pair_by_pair`, from copies of the matrices side by side.

    For dtypes and devices whose single products are slow to start: BF16 on a CPU was
    measured to take 190 µs a layer instead of 280 for 4 experts of 256 x 128.
    """
    n_tokens, k = experts.shape
    chosen = experts.flatten()
    columns = x.unsqueeze(1).expand(-1, k, -1).reshape(-1, 1, x.shape[1]).mT
    hidden = torch.bmm(w13.index_select(0, chosen), columns).squeeze(-1)
    gate, up = hidden.chunk(2, dim=-1)
    product = F.silu(gate).mul_(up).mul_(weights.reshape(-1, 1))  # (p, f)
    out = torch.bmm(w2.index_select(0, chosen), product.unsqueeze(1).mT)
    return out.view(n_tokens, k, -1).sum(dim=1)


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
        if experts.numel() <= FEW_PAIRS and not torch.is_grad_enabled():
            is_row_fast = x.is_cpu and has_halves(w13[0])
            few = pair_by_pair if is_row_fast else all_pairs_at_once
            return few(x, weights, experts, w13, w2)
        multiple = block_multiple(x, experts.numel(), len(w13))
        plan = dispatch(experts, len(w13), multiple=multiple)
        return _SwiGLUExperts.apply(x, weights, w13, w2, plan)

    def extra_repr(self) -> str:
        n_experts, dim, inter_dim = self.w2.shape
        return f"n_experts={n_experts}, dim={dim}, inter_dim={inter_dim}"
