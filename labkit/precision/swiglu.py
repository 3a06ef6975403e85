"""SwiGLU networks in FP8: the dense one, and routed experts.

Both keep in FP8 what SwiGLU reads, and the backward pass computes its product from
that (DeepSeek-V3, section 3.3.3), which costs all gradients about a decibel.

None of this has been run on a GPU.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from labkit.model.experts import Dispatch, Experts, block_multiple, dispatch
from labkit.model.mlp import MLP
from labkit.model.norm import compute_dtype
from labkit.precision.linear import (
    Fp8Linear,
    Fp8Recipe,
    InFp8,
    Observer,
    dgrad,
    flat_rows,
    fprop,
    keep,
    kept_by,
    shared_rows,
    wgrad,
)
from labkit.precision.quantize import QTensor, quantize


def swiglu_backward(
    grad: Float[Tensor, "n f"], gate: Float[Tensor, "n f"], up: Float[Tensor, "n f"]
) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n f"]]:
    """Return the gradients of gate and up from that of silu(gate) · up."""
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


class _Fp8SwiGLU(torch.autograd.Function):
    """silu(gate) · up, and the layer that reads it; kept are gate and up in FP8."""

    @staticmethod
    def forward(  # noqa: PLR0913  autograd takes each tensor on its own
        ctx: FunctionCtx,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        recipe: Fp8Recipe,
        observer: Observer | None,
    ) -> Tensor:
        keep(ctx, weight, *(quantize(flat_rows(x), recipe.rows) for x in (gate, up)))
        ctx.recipe, ctx.observer = recipe, observer
        return fprop(F.silu(gate) * up, weight, recipe, observer)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        weight, *kept = kept_by(ctx)
        how = ctx.recipe, ctx.observer
        gate, up = (q.dequantize() for q in kept)
        rows, grad_weight = flat_rows(grad), None
        if ctx.needs_input_grad[2]:
            grad_weight = wgrad(rows, F.silu(gate) * up, *how).type_as(weight)
        grad_product = dgrad(rows, weight, *how)
        shape = (*grad.shape[:-1], -1)
        grad_gate, grad_up = (
            x.to(grad.dtype).view(shape)
            for x in swiglu_backward(grad_product.float(), gate, up)
        )
        return grad_gate, grad_up, grad_weight, None, None


class Fp8MLP(InFp8, MLP):
    """A SwiGLU network in FP8; without the product, if its `w2` is in FP8 too."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        gate, up = self.w1(x), self.w3(x)
        if not torch.is_grad_enabled() or not isinstance(self.w2, Fp8Linear):
            return self.w2(F.silu(gate) * up)
        last = self.w2
        return _Fp8SwiGLU.apply(gate, up, last.weight, last.recipe, last.observer)


class Fp8Experts(InFp8, Experts):
    """Routed experts in FP8, that share their input's `QTensor` with shared ones.

    An expert's block of rows is an operand by itself: its weights' gradients have
    tiles along its own tokens.
    """

    def forward(
        self,
        x: Float[Tensor, "n d"],
        weights: Float[Tensor, "n k"],
        experts: Int[Tensor, "n k"],
    ) -> Float[Tensor, "n d"]:
        dtype = compute_dtype(x)
        x, weights = x.to(dtype), weights.to(dtype)
        multiple = block_multiple(x, experts.numel(), len(self.w13))
        plan = dispatch(experts, len(self.w13), multiple=multiple)
        given = (x, weights, self.w13, self.w2, plan, self.recipe)
        if not torch.is_grad_enabled():
            return _sum_of_experts(*given)[0]
        return _Fp8Experts.apply(*given, self.observer)


def _sum_of_experts(  # noqa: PLR0913  what the autograd function takes
    x: Float[Tensor, "n d"],
    weights: Float[Tensor, "n k"],
    w13: Float[Tensor, "e f2 d"],
    w2: Float[Tensor, "e d f"],
    plan: Dispatch,
    recipe: Fp8Recipe,
    observer: Observer | None = None,
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "p f2"]]:
    """Return the weighted sum of each token's experts, and their hidden layers."""
    rows = _gathered(shared_rows(x, recipe.rows), plan.token)  # (p, d)
    scale = _sorted_weights(weights, plan)  # (p, 1)
    hidden = x.new_empty(len(plan.token), w13.shape[1])  # (p, 2f)
    out = x.new_empty(len(plan.token), w2.shape[1])  # (p, d)
    for expert, block in _busy(plan.ends):
        watch = _watch(observer, expert, plan.ends)
        own, matrix = _gathered(rows, block), quantize(w13[expert], recipe.squares)
        if watch is not None:
            watch("fprop", (x[plan.token[block]], own), (w13[expert], matrix))
        hidden[block] = recipe.product(own, matrix, x.dtype)
        gate, up = hidden[block].chunk(2, dim=-1)
        product = F.silu(gate).mul_(up).mul_(scale[block])
        out[block] = fprop(product, w2[expert], recipe, watch)
    return F.embedding_bag(plan.row, out, mode="sum"), hidden


class _Fp8Experts(torch.autograd.Function):
    """The sum over experts; kept are its input and the hidden layers, in FP8."""

    @staticmethod
    def forward(  # noqa: PLR0913  autograd takes each tensor on its own
        ctx: FunctionCtx,
        x: Tensor,
        weights: Tensor,
        w13: Tensor,
        w2: Tensor,
        plan: Dispatch,
        recipe: Fp8Recipe,
        observer: Observer | None,
    ) -> Tensor:
        out, hidden = _sum_of_experts(x, weights, w13, w2, plan, recipe, observer)
        kept = shared_rows(x, recipe.kept_rows), quantize(hidden, recipe.rows)
        keep(ctx, weights, w13, w2, plan.token, plan.row, *kept)
        ctx.ends, ctx.recipe, ctx.observer = plan.ends, recipe, observer
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None, None]:
        weights, w13, w2, token, row, kept_x, kept_hidden = kept_by(ctx)
        x = kept_x.dequantize()
        scale = _sorted_weights(weights, Dispatch(token, row, ctx.ends)).float()
        rows = grad.index_select(0, token)  # (p, d)
        grad_scale = torch.zeros_like(scale)
        grad_w13, grad_w2 = torch.zeros_like(w13), torch.zeros_like(w2)
        for expert, block in _busy(ctx.ends):
            how = ctx.recipe, _watch(ctx.observer, expert, ctx.ends)
            gate, up = _gathered(kept_hidden, block).dequantize().chunk(2, dim=-1)
            product = F.silu(gate) * up
            grad_product = dgrad(rows[block], w2[expert], *how).float()
            grad_scale[block] = (grad_product * product).sum(-1, keepdim=True)
            product.mul_(scale[block])
            grad_w2[expert] = wgrad(rows[block], product, *how)
            both = swiglu_backward(grad_product.mul_(scale[block]), gate, up)
            grad_hidden = torch.cat(both, dim=-1).to(grad.dtype)
            grad_w13[expert] = wgrad(grad_hidden, x[token[block]], *how)
            # The gradient's rows are read; their place takes the input's.
            rows[block] = dgrad(grad_hidden, w13[expert], *how)
        grad_x = F.embedding_bag(row, rows, mode="sum")
        grad_weights = grad_scale.flatten()[row].type_as(weights)
        return grad_x, grad_weights, grad_w13, grad_w2, None, None, None


def _busy(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have tokens, and their rows."""
    for expert, (start, end) in enumerate(pairwise([0, *ends])):
        if end > start:
            yield expert, slice(start, end)


def _watch(observer: Observer | None, expert: int, ends: list[int]) -> Observer | None:
    """Return what sees an expert's products; the busiest one's are the sample."""
    if observer is None:
        return None
    lengths = [end - start for start, end in pairwise([0, *ends])]
    return partial(observer, is_sampled=expert == lengths.index(max(lengths)))


def _gathered(q: QTensor, rows: Int[Tensor, "p"] | slice) -> QTensor:
    """Return rows of a matrix in tiles of one row."""
    return QTensor(q.data[rows], q.scale[rows], q.spec, q.n_columns)


def _sorted_weights(
    weights: Float[Tensor, "n k"], plan: Dispatch
) -> Float[Tensor, "p 1"]:
    """Return the routing weight of each row; that of padding is 0."""
    ordered = weights.new_zeros(len(plan.token))
    ordered[plan.row.flatten()] = weights.flatten()
    return ordered.unsqueeze(-1)
