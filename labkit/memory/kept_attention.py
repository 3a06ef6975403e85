"""What the backward of an attention layer waits for."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from labkit.config import GQAConfig, MLAConfig
from labkit.config.parts import AttentionConfig
from labkit.memory.tape import (
    EXACT_BYTES,
    Kept,
    Op,
    Pass,
    activation,
    linear,
    norm,
    shared_gradient,
)
from labkit.model.attention_core import BLOCK_BYTES, BLOCK_QUERIES, SHORT_SEQ

COMPLEX_BYTES = 8

RANDOM_STATE_BYTES = 16
"""Seed and offset, which a fused kernel on a GPU keeps also without dropout."""


def rotations(attention: AttentionConfig, step: Pass) -> Op:
    """Return the turns of RoPE, which all layers share: the first of them keeps it."""
    n_bytes = step.seq_len * attention.rope_dim // 2 * COMPLEX_BYTES
    return Op("attn", (Kept("rotations", n_bytes, is_split=False),))


def attention_tape(attention: AttentionConfig, dim: int, step: Pass) -> Iterator[Op]:
    """Yield the operators of an attention layer, names relative to its own."""
    if isinstance(attention, MLAConfig):
        yield from _mla_tape(attention, dim, step)
    else:
        yield from _gqa_tape(attention, dim, step)
    is_kept = step.device == "cpu" or isinstance(attention, MLAConfig)
    out_width = attention.n_heads * attention.v_head_dim
    out = activation("input", step.n_tokens * out_width, step.compute)
    # A fused kernel keeps its result, which has the layout of the queries: that of
    # GQA can be read as it is, and MLA's, whose queries are joined per head, cannot.
    yield from linear(
        step,
        "wo",
        (out_width, dim),
        kept=(out,) if is_kept else (),
        beside=-shared_gradient(step, dim),
    )


def _mla_tape(mla: MLAConfig, dim: int, step: Pass) -> Iterator[Op]:
    n, dtype, rank = step.n_tokens, step.compute, mla.q_lora_rank
    query_width = mla.n_heads * mla.qk_head_dim
    normed = activation("input", n * dim, dtype)
    # In the backward, gradients of what comes later here wait for what comes first.
    at_input, at_queries = (n * width * dtype.itemsize for width in (dim, query_width))
    if rank is None:
        beside = max(at_input, at_queries)
        yield from linear(step, "wq", (dim, query_width), kept=(normed,), beside=beside)
    else:
        latent = activation("input", n * rank, dtype, is_split=False)
        beside = at_input + max(at_input - latent.n_bytes, 0)
        yield from linear(step, "wq_a", (dim, rank), kept=(normed,), beside=beside)
        down_norm = norm(step, "q_norm", rank, dtype=dtype, kept=(latent,))
        yield down_norm.beside(at_input)
        beside = at_input + at_queries
        yield from linear(
            step, "wq_b", (rank, query_width), kept=(latent,), beside=beside
        )
    yield from linear(step, "wkv_a", (dim, mla.cache_width), beside=at_queries)
    # The norm reads a view: the rotary key that lies beside the latent is kept too.
    entries = activation("input", n * mla.cache_width, dtype, is_split=False)
    kv_norm = norm(step, "kv_norm", mla.kv_lora_rank, dtype=dtype, kept=(entries,))
    yield kv_norm.beside(at_queries)
    latent = activation("input", n * mla.kv_lora_rank, dtype, is_split=False)
    up_width = mla.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    ends = mla.kv_lora_rank, up_width
    yield from linear(step, "wkv_b", ends, kept=(latent,), beside=at_queries)
    yield _core(mla, step, value_width=up_width // mla.n_heads)


def _gqa_tape(gqa: GQAConfig, dim: int, step: Pass) -> Iterator[Op]:
    normed = activation("input", step.n_tokens * dim, step.compute)
    kv_width = gqa.n_kv_heads * gqa.head_dim
    query_width = gqa.n_heads * gqa.head_dim
    at_input, at_queries, at_keys = (
        step.n_tokens * width * step.compute.itemsize
        for width in (dim, query_width, kv_width)
    )
    beside = at_input + max(at_input - at_queries, 0)
    yield from linear(step, "wq", (dim, query_width), kept=(normed,), beside=beside)
    yield from linear(step, "wk", (dim, kv_width), beside=at_input + at_queries)
    yield from linear(step, "wv", (dim, kv_width), beside=at_queries + at_keys)
    yield _core(gqa, step, value_width=gqa.head_dim)


def _core(attention: AttentionConfig, step: Pass, *, value_width: int) -> Op:
    """Return the attention core, with keys and values repeated for each query head.

    Args:
        attention: its sizes.
        step: the pass.
        value_width: values per head of the tensor in which the values lie.
    """
    u, q_width = attention.v_head_dim, attention.qk_head_dim
    n_vectors = step.n_tokens * attention.n_heads
    if step.device == "cpu":
        # Heads and sequences become one dimension: a view if one of them is alone.
        is_view = 1 in (step.batch, step.seq_len, attention.n_heads)
        widths = (q_width, q_width, value_width if is_view else u)
        extra = ()
    else:
        widest = _padded_width(attention)
        widths = (widest, widest, widest if widest > u else value_width)
        extra = (
            activation("output", n_vectors * widest, step.compute),
            Kept("log-sum-exp", n_vectors * EXACT_BYTES),
            Kept("random state", RANDOM_STATE_BYTES, is_split=False),
        )
    names = ("queries", "keys", "values")
    kept = (
        activation(name, n_vectors * width, step.compute)
        for name, width in zip(names, widths, strict=True)
    )
    working_bytes = _core_working_bytes(attention, step)
    return Op("", (*kept, *extra), working_bytes=working_bytes)


def _core_working_bytes(attention: AttentionConfig, step: Pass) -> int:
    """Return what the core's backward needs: gradients in and out, and scores."""
    u, w = attention.v_head_dim, attention.qk_head_dim
    n_vectors, size = step.n_tokens * attention.n_heads, step.compute.itemsize
    ends = n_vectors * (u + w) * size
    if step.device == "gpu":
        # A fused kernel sums the gradient of the queries in FP32.
        return ends + n_vectors * ((u + w) * size + w * EXACT_BYTES)
    blocks = _block_bytes(attention, step)
    copies = n_vectors * (u + w) * size if size < EXACT_BYTES else 0
    last = 3 * blocks[-1].scores + blocks[-1].sides
    most = max(_both(*pair) for pair in pairwise([_Block(0, 0), *blocks]))
    sums = n_vectors * (u + w) * EXACT_BYTES
    future = min(BLOCK_QUERIES, step.seq_len) ** 2 * size
    return ends + sums + future + max(most, last + copies)


class _Block(NamedTuple):
    """Bytes of one block of the core's backward, see `attention_core`."""

    scores: int
    """Of each of three matrices of scores."""

    sides: int
    """Of what it adds to the gradients of keys and values."""


def _both(before: _Block, block: _Block) -> int:
    """Return the most bytes while a block's matrices replace those of the last."""
    pair = before.scores, block.scores
    return 3 * max(pair) + min(pair) + max(before.sides, block.sides)


def _block_bytes(attention: AttentionConfig, step: Pass) -> list[_Block]:
    """Return the blocks of a group of heads, and the next group's first."""
    seq_len, size = step.seq_len, step.compute.itemsize
    n_heads = step.batch * attention.n_heads
    row_bytes = min(BLOCK_QUERIES, seq_len) * seq_len * size
    limit = BLOCK_BYTES if seq_len <= SHORT_SEQ else 2 * BLOCK_BYTES
    group = min(max(limit // row_bytes, 1), n_heads)
    side = group * (attention.qk_head_dim + attention.v_head_dim) * size
    blocks = []
    for query in reversed(range(0, seq_len, BLOCK_QUERIES)):
        end = min(query + BLOCK_QUERIES, seq_len)
        blocks.append(_Block(group * (end - query) * end * size, side * end))
    return blocks if group == n_heads else [*blocks, blocks[0]]


def _padded_width(attention: AttentionConfig) -> int:
    return max(attention.qk_head_dim, attention.v_head_dim)
