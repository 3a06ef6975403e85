"""What the backward of an attention layer waits for."""

from collections.abc import Iterator

from labkit.config import GQAConfig, MLAConfig
from labkit.config.parts import AttentionConfig
from labkit.memory.tape import EXACT_BYTES, Kept, Op, Pass, activation, linear, norm

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
    is_kept = step.device == "cpu" or _padded_width(attention) > attention.v_head_dim
    out_width = attention.n_heads * attention.v_head_dim
    out = activation("input", step.n_tokens * out_width, step.compute)
    # A fused kernel on a GPU has kept its result already, unless it was padded.
    yield linear(step, "wo", (out_width, dim), kept=(out,) if is_kept else ())


def _mla_tape(mla: MLAConfig, dim: int, step: Pass) -> Iterator[Op]:
    n, dtype, rank = step.n_tokens, step.compute, mla.q_lora_rank
    query_width = mla.n_heads * mla.qk_head_dim
    normed = activation("input", n * dim, dtype)
    if rank is None:
        yield linear(step, "wq", (dim, query_width), kept=(normed,))
    else:
        latent = activation("input", n * rank, dtype, is_split=False)
        yield linear(step, "wq_a", (dim, rank), kept=(normed,))
        yield norm(step, "q_norm", rank, dtype=dtype, kept=(latent,))
        yield linear(step, "wq_b", (rank, query_width), kept=(latent,))
    yield linear(step, "wkv_a", (dim, mla.cache_width))
    # The norm reads a view: the rotary key that lies beside the latent is kept too.
    entries = activation("input", n * mla.cache_width, dtype, is_split=False)
    yield norm(step, "kv_norm", mla.kv_lora_rank, dtype=dtype, kept=(entries,))
    latent = activation("input", n * mla.kv_lora_rank, dtype, is_split=False)
    up_width = mla.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield linear(step, "wkv_b", (mla.kv_lora_rank, up_width), kept=(latent,))
    yield _core(mla, step, value_width=up_width // mla.n_heads)


def _gqa_tape(gqa: GQAConfig, dim: int, step: Pass) -> Iterator[Op]:
    normed = activation("input", step.n_tokens * dim, step.compute)
    kv_width = gqa.n_kv_heads * gqa.head_dim
    yield linear(step, "wq", (dim, gqa.n_heads * gqa.head_dim), kept=(normed,))
    yield linear(step, "wk", (dim, kv_width))
    yield linear(step, "wv", (dim, kv_width))
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
    return Op("", (*kept, *extra))


def _padded_width(attention: AttentionConfig) -> int:
    return max(attention.qk_head_dim, attention.v_head_dim)
