"""Parameters, cache bytes and FLOPs of a model, as arithmetic on its config.

Everything here is exact where the quantity is a count, and answers in
microseconds, so that a slider can call it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.config.checks import require_choice, require_whole
from labkit.config.parts import AttentionConfig, MLAConfig, MoEConfig

if TYPE_CHECKING:
    from labkit.config.model import ModelConfig

CACHE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one cached value, by the name of its dtype."""

CACHE_TILE = 128
"""Values of a latent that share a scale in an FP8 cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Parameters by part; `total` leaves out the MTP modules, as DeepSeek does."""

    embedding: int
    head: int
    attention: int
    dense_ffn: int
    routed_experts: int
    shared_experts: int
    router: int
    norms: int
    mtp: int
    """Unique parameters of the MTP modules; embedding and head are shared."""

    @property
    def total(self) -> int:
        """Parameters of the main model."""
        experts = self.routed_experts + self.shared_experts + self.router
        rest = self.embedding + self.head + self.attention + self.dense_ffn
        return rest + experts + self.norms


def attention_params(attention: AttentionConfig, dim: int) -> int:
    """Return the parameters of one attention layer, its inner norms included.

    >>> v3 = MLAConfig(n_heads=128, q_lora_rank=1536)
    >>> attention_params(v3, 7168)
    187107328
    """
    require_whole({"dim": dim})
    n_heads = attention.n_heads
    output = n_heads * attention.v_head_dim * dim
    query_width = n_heads * attention.qk_head_dim
    if not isinstance(attention, MLAConfig):
        return dim * (query_width + attention.cache_width) + output
    rank = attention.q_lora_rank
    query = dim * query_width if rank is None else rank * (dim + 1 + query_width)
    up_width = n_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    latent = attention.kv_lora_rank
    down = dim * attention.cache_width
    return query + down + latent + latent * up_width + output


def ffn_params(dim: int, width: int) -> int:
    """Return the parameters of one SwiGLU feed-forward network.

    >>> ffn_params(7168, 2048)
    44040192
    """
    require_whole({"dim": dim, "width": width})
    return 3 * dim * width


def router_params(moe: MoEConfig, dim: int) -> int:
    """Return the parameters of one router; the balancing bias is counted.

    >>> router_params(MoEConfig(n_routed_experts=256, n_activated_experts=8,
    ...                         moe_inter_dim=2048), 7168)
    1835264
    """
    require_whole({"dim": dim})
    return moe.n_routed_experts * (dim + moe.has_bias)


def moe_params(moe: MoEConfig, dim: int) -> int:
    """Return the parameters of one MoE layer: router, routed and shared experts."""
    n_experts = moe.n_routed_experts + moe.n_shared_experts
    return router_params(moe, dim) + n_experts * ffn_params(dim, moe.moe_inter_dim)


def mtp_params(cfg: ModelConfig) -> int:
    """Return the unique parameters of all MTP modules (embedding, head shared)."""
    if cfg.mtp is None:
        return 0
    attention = attention_params(cfg.attention, cfg.dim)
    ffn = ffn_params(cfg.dim, cfg.inter_dim)
    if cfg.moe is not None:
        ffn = moe_params(cfg.moe, cfg.dim)
    projection = 2 * cfg.dim * cfg.dim
    norms = 5 * cfg.dim  # two of the block; enorm, hnorm and shared_head.norm
    return cfg.mtp.depth * (attention + ffn + projection + norms)


def parameter_counts(cfg: ModelConfig) -> ParameterCounts:
    """Return the parameters of the model by part."""
    dim, moe = cfg.dim, cfg.moe
    n_moe = cfg.n_moe_layers
    expert = ffn_params(dim, moe.moe_inter_dim) if moe else 0
    return ParameterCounts(
        embedding=cfg.vocab_size * dim,
        head=cfg.vocab_size * dim,
        attention=cfg.n_layers * attention_params(cfg.attention, dim),
        dense_ffn=(cfg.n_layers - n_moe) * ffn_params(dim, cfg.inter_dim),
        routed_experts=n_moe * moe.n_routed_experts * expert if moe else 0,
        shared_experts=n_moe * moe.n_shared_experts * expert if moe else 0,
        router=n_moe * router_params(moe, dim) if moe else 0,
        norms=(2 * cfg.n_layers + 1) * dim,
        mtp=mtp_params(cfg),
    )


def n_params(cfg: ModelConfig, *, include_mtp: bool = False) -> int:
    """Return the parameters of the main model, or of it and its MTP modules."""
    counts = parameter_counts(cfg)
    return counts.total + (counts.mtp if include_mtp else 0)


def n_active_params(cfg: ModelConfig, *, include_embedding: bool = False) -> int:
    """Return the parameters that one token passes through.

    The head is counted and the input embedding is not: this convention reproduces
    the published 2.4B, 21B and 37B (an embedding is looked up, not multiplied).
    """
    counts = parameter_counts(cfg)
    idle = 0 if include_embedding else counts.embedding
    if cfg.moe is not None:
        n_idle = cfg.moe.n_routed_experts - cfg.moe.n_activated_experts
        idle += cfg.n_moe_layers * n_idle * ffn_params(cfg.dim, cfg.moe.moe_inter_dim)
    return counts.total - idle


def kv_bytes_per_token(cfg: ModelConfig, dtype: str = "bfloat16") -> int:
    """Return the bytes of cache that one token keeps in all main layers.

    Args:
        cfg: the model.
        dtype: of the cache; "fp8" for MLA alone, see `fp8_row_bytes`.

    Raises:
        ValueError: `dtype` does not name a cache dtype, or not one of this attention.
    """
    require_choice({"dtype": dtype}, (*CACHE_DTYPE_BYTES, "fp8"))
    if dtype == "fp8":
        return cfg.n_layers * fp8_row_bytes(cfg.attention)
    return cfg.n_layers * cfg.attention.cache_width * CACHE_DTYPE_BYTES[dtype]


def fp8_row_bytes(attention: AttentionConfig) -> int:
    """Return the bytes of one token and layer in the FP8 layout of FlashMLA.

    A byte per value of the latent, an FP32 scale for every 128 of them, and the rotary
    key in BF16.

    >>> fp8_row_bytes(MLAConfig(n_heads=128, q_lora_rank=1536))
    656

    Raises:
        ValueError: the attention has no latent.
    """
    if not isinstance(attention, MLAConfig):
        raise ValueError(
            "an FP8 cache must be one of MLA, whose latent its published layout "
            f"quantizes; got attention of kind {attention.kind!r}. Cache in BF16, or "
            "set attention=MLAConfig(...)."
        )
    n_scales = -(-attention.kv_lora_rank // CACHE_TILE)
    return attention.kv_lora_rank + 4 * n_scales + 2 * attention.qk_rope_head_dim


def attention_flops_per_token(
    cfg: ModelConfig, seq_len: int, *, causal: bool = True
) -> int:
    """Return forward FLOPs per token of scores and weighted values, all layers.

    A multiply-add counts 2. A causal token sees half the sequence on average;
    `seq_len / 2` is DeepSeek's convention (the exact mean is `(seq_len + 1) / 2`).

    Raises:
        ValueError: `seq_len` is not a whole number of at least 1.
    """
    require_whole({"seq_len": seq_len})
    widths = cfg.attention.qk_head_dim + cfg.attention.v_head_dim
    flops = 2 * cfg.attention.n_heads * widths * seq_len * cfg.n_layers
    return flops // 2 if causal else flops


def flops_per_token(
    cfg: ModelConfig, seq_len: int, *, causal: bool = True, training: bool = True
) -> int:
    """Return FLOPs per token of a training step, or of a forward pass.

    Matrix products of the main model only: 2 per active parameter forward, twice
    that backward; recompute and MTP are not included. Source: the formula that
    reproduces 250 GFLOP per token of "Insights into DeepSeek-V3", table 2.

    Raises:
        ValueError: `seq_len` is not a whole number of at least 1.
    """
    forward = 2 * n_active_params(cfg) + attention_flops_per_token(
        cfg, seq_len, causal=causal
    )
    return 3 * forward if training else forward
