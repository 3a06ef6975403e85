"""The attention core: softmax(q·k · scale) v, by the kernel that serves the shape.

On a CPU, causal attention runs here block by block: a few heads and queries at a
time, so that their scores stay in the processor's cache, and never the keys after
them. The backward pass computes the scores again instead of keeping an s × s matrix
(FlashAttention-2, arXiv 2307.08691, section 3). Everything else goes to PyTorch's
`scaled_dot_product_attention`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

BLOCK_QUERIES = 128

BLOCK_BYTES = 2 << 20
"""Scores computed at a time: about what the cores' caches hold. Twice that for long
sequences, or too few heads are left for the cores to share."""

SHORT_SEQ = 512


def attend(
    q: Float[Tensor, "b h s q"],
    k: Float[Tensor, "b g t q"],
    v: Float[Tensor, "b g t u"],
    *,
    scale: float,
    mask: Bool[Tensor, "b s t"] | None = None,
) -> Float[Tensor, "b h s u"]:
    """Return the attention of each query; causal when no mask is given.

    Args:
        q: queries; without a mask, as many as keys.
        k: keys; of fewer heads than the queries, each serves a run of those.
        v: values, of as many heads as the keys.
        scale: factor on the products before the softmax.
        mask: True where a query sees a key; the same for all heads.
    """
    if mask is not None and q.shape[2] == 1:
        # Heads that share keys are rows of queries here: no key is read twice.
        rows = q.squeeze(2).unflatten(1, (k.shape[1], -1))  # (b, g, r, q)
        return _padded_sdpa(rows, k, v, scale, mask).flatten(1, 2).unsqueeze(2)
    k, v = (_per_query_head(x, q.shape[1]) for x in (k, v))
    if mask is None and q.device.type == "cpu":
        heads = q.shape[:2]
        out = _BlockwiseCausal.apply(*(x.flatten(0, 1) for x in (q, k, v)), scale)
        return out.unflatten(0, heads)
    return _padded_sdpa(q, k, v, scale, mask)


def attend_shared(
    q: Float[Tensor, "b rows w"],
    entries: Float[Tensor, "b t w"],
    *,
    scale: float,
    mask: Bool[Tensor, "#b rows t"] | None = None,
) -> Float[Tensor, "b rows w"]:
    """Return softmax(q·entries · scale) entries; without a mask all keys are seen.

    That is absorbed MLA: all heads of all new tokens are rows, and the cached entries
    are keys and, in their first columns, values.
    """
    shared = entries.unsqueeze(1)
    mask = None if mask is None else mask.unsqueeze(1)
    out = F.scaled_dot_product_attention(
        q.unsqueeze(1), shared, shared, attn_mask=mask, scale=scale
    )
    return out.squeeze(1)


def _per_query_head(
    x: Float[Tensor, "b g t c"], n_heads: int
) -> Float[Tensor, "b h t c"]:
    group = n_heads // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _padded_sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> Tensor:
    """Return SDPA over equal widths: only then do its kernels stream over keys.

    Zero columns change neither a product of query and key nor the columns kept.
    """
    v_width = v.shape[-1]
    widest = max(q.shape[-1], v_width)
    out = F.scaled_dot_product_attention(
        _pad(q, widest),
        _pad(k, widest),
        _pad(v, widest),
        attn_mask=None if mask is None else mask.unsqueeze(1),
        is_causal=mask is None,
        scale=scale,
    )
    return out[..., :v_width]


def _pad(x: Float[Tensor, "b g t c"], width: int) -> Float[Tensor, "b g t w"]:
    # `F.pad` copies also where there is nothing to add: all of a cache at each token.
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


class _Block(NamedTuple):
    """A group of heads, a run of queries, and the keys that these may see."""

    heads: slice
    queries: slice
    keys: slice


def _blocks(q: Float[Tensor, "g s q"]) -> Iterator[_Block]:
    """Yield the blocks of each group of heads, the last queries first."""
    n_heads, seq_len, _ = q.shape
    row_bytes = min(BLOCK_QUERIES, seq_len) * seq_len * q.element_size()
    block_bytes = BLOCK_BYTES if seq_len <= SHORT_SEQ else 2 * BLOCK_BYTES
    group = min(max(block_bytes // row_bytes, 1), n_heads)
    for head in range(0, n_heads, group):
        heads = slice(head, min(head + group, n_heads))
        for query in reversed(range(0, seq_len, BLOCK_QUERIES)):
            end = min(query + BLOCK_QUERIES, seq_len)
            yield _Block(heads, slice(query, end), slice(0, end))


class _BlockwiseCausal(torch.autograd.Function):
    """Causal attention of heads (g, s, ·), scores recomputed in the backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        k_t = k.transpose(1, 2)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        future = _future(q)
        with _exact(q):
            for block in _blocks(q):
                weights = _weights(q, k_t, scale, future, block)
                out[block.heads, block.queries] = torch.bmm(
                    weights, v[block.heads, block.keys]
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        scale, k_t, v_t = ctx.scale, k.transpose(1, 2), v.transpose(1, 2)
        grad_q = torch.empty_like(q)
        # Many blocks add to one key, so their sum is kept in FP32, transposed: a
        # product with the tall matrix of scores on its right is the faster one.
        exact = torch.promote_types(q.dtype, torch.float32)
        grad_k_t = k_t.new_empty(k_t.shape, dtype=exact)
        grad_v_t = v_t.new_empty(v_t.shape, dtype=exact)
        future = _future(q)
        with _exact(q):
            for block in _blocks(q):
                heads, queries, keys = block
                weights = _weights(q, k_t, scale, future, block)
                grad_out = grad[heads, queries]
                to_v_t = torch.bmm(grad_out.transpose(1, 2), weights)
                grad_weights = torch.bmm(grad_out, v_t[heads, :, keys])
                grad_scores = torch.ops.aten._softmax_backward_data(
                    grad_weights, weights, -1, weights.dtype
                )
                grad_q[heads, queries] = _scaled_bmm(grad_scores, k[heads, keys], scale)
                q_t = q[heads, queries].transpose(1, 2)
                to_k_t = _scaled_bmm(q_t, grad_scores, scale)
                if queries.stop == q.shape[1]:  # a group's first block sees all keys
                    grad_v_t[heads], grad_k_t[heads] = to_v_t, to_k_t
                else:
                    grad_v_t[heads, :, keys] += to_v_t
                    grad_k_t[heads, :, keys] += to_k_t
        grad_k, grad_v = grad_k_t.transpose(1, 2), grad_v_t.transpose(1, 2)
        return grad_q, grad_k.type_as(k), grad_v.type_as(v), None


def _weights(
    q: Tensor, k_t: Tensor, scale: float, future: Tensor, block: _Block
) -> Tensor:
    """Return the softmax of one block's scores."""
    heads, queries, keys = block
    scores = _scaled_bmm(q[heads, queries], k_t[heads, :, keys], scale)
    n_queries = queries.stop - queries.start
    scores[:, :, queries].add_(future[:n_queries, :n_queries])
    return torch.softmax(scores, dim=-1, out=scores)


def _scaled_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the batch of products a b · scale, scaled as they are written."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _future(q: Tensor) -> Tensor:
    """Return what to add to the scores of a block's queries with one another."""
    size = min(BLOCK_QUERIES, q.shape[1])
    return q.new_full((size, size), -torch.inf).triu_(1)


def _exact(q: Tensor) -> torch.autocast:
    """Return a context in which autocast leaves the chosen dtypes alone."""
    return torch.autocast(q.device.type, enabled=False)
