"""Activation formulas as papers print them, to compare with and to check against.

MLA and MoE: "Memory Analysis on the Training Course of DeepSeek Models"
(arXiv 2502.07846); GPT: "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198). All give bytes per layer and micro-batch, in BF16, of one
rank; tensor parallelism comes with sequence parallelism of the same degree.
"""

from typing import Literal

from labkit.config import Layout, MLAConfig, ModelConfig, MoEConfig
from labkit.config.checks import require_above, require_choice, require_whole

ROUTINGS = ("paper", "physical")

GPT_POLICIES = ("none", "sequence", "selective", "both", "full")


def routed_rows(
    moe: MoEConfig,
    n_tokens: int,
    layout: Layout,
    *,
    routing: Literal["paper", "physical"] = "physical",
    imbalance: float = 1.0,
) -> float:
    """Return the rows that the routed experts of one rank compute.

    Args:
        moe: the experts.
        n_tokens: tokens of the micro-batch, before tensor parallelism divides them.
        layout: degrees of parallelism.
        routing: "paper" spreads a rank's own tokens over all experts and counts those
            that stay; "physical" counts also those that come from the other ranks,
            which are as many as leave.
        imbalance: load of the busiest rank over the mean.

    >>> moe = MoEConfig(n_routed_experts=256, n_activated_experts=8, moe_inter_dim=1)
    >>> layout = Layout(dp=32, tp=2, ep=8)
    >>> routed_rows(moe, 4096, layout, routing="paper")
    4096.0
    >>> routed_rows(moe, 4096, layout)
    16384.0
    """
    require_whole({"n_tokens": n_tokens})
    require_choice({"routing": routing}, ROUTINGS)
    require_above({"imbalance": imbalance}, 0)
    pairs = n_tokens * moe.n_activated_experts
    return pairs / (layout.ep if routing == "paper" else layout.tp) * imbalance


def mla_bytes(
    cfg: ModelConfig,
    batch: int,
    seq_len: int,
    layout: Layout,
    *,
    is_flash: bool = False,
) -> float:
    """Return the bytes that one MLA layer keeps, its norm included (2502.07846).

    Args:
        cfg: the model; its queries are compressed.
        batch: sequences of the micro-batch.
        seq_len: tokens of each.
        layout: degrees of parallelism; `tp` divides all but the latents.
        is_flash: whether scores are computed again, which the paper does not assume.
    """
    mla, n = cfg.attention, batch * seq_len
    assert isinstance(mla, MLAConfig)
    heads = mla.n_heads
    latents = 2 * n * ((mla.q_lora_rank or 0) + mla.kv_lora_rank)
    keys = 4 * n * heads * mla.qk_head_dim
    values = 2 * n * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    scores = 0 if is_flash else 5 * heads * n * seq_len
    return (5 * n * cfg.dim + keys + values + scores) / layout.tp + latents


def moe_bytes(cfg: ModelConfig, n_tokens: int, layout: Layout, rows: float) -> float:
    """Return the bytes that one MoE layer keeps, its norm included (2502.07846).

    Args:
        cfg: the model, with experts.
        n_tokens: tokens of the micro-batch.
        layout: degrees of parallelism.
        rows: of the routed experts, from `routed_rows`.
    """
    moe = cfg.moe
    assert moe is not None
    expert = 3 * cfg.dim + 8 * moe.moe_inter_dim
    router = 4 * moe.n_routed_experts + 2 * moe.n_activated_experts
    stream = 4 * n_tokens * cfg.dim / layout.tp
    shared = moe.n_shared_experts * n_tokens
    return stream + n_tokens * router + (rows + shared) * expert


def recomputed_bytes(cfg: ModelConfig, n_tokens: int, layout: Layout) -> float:
    """Return the bytes of one MLA and MoE layer with full recompute (2502.07846).

    Kept are the inputs of both halves, and which experts were chosen.

    >>> from labkit.config import PRESETS
    >>> layout = Layout(pp=16, dp=32, tp=2, ep=8)
    >>> round(4 * recomputed_bytes(PRESETS["v3-671b"], 4096, layout))
    235143168
    """
    assert cfg.moe is not None
    choices = 2 * n_tokens * cfg.moe.n_activated_experts
    return 2 * 2 * n_tokens * cfg.dim / layout.tp + choices


def gpt_bytes(
    n_values: int,
    scores: float,
    *,
    tp: int = 1,
    policy: Literal["none", "sequence", "selective", "both", "full"] = "none",
) -> float:
    """Return the bytes that one layer of a GPT keeps (2205.05198).

    Args:
        n_values: values of the residual stream, s·b·h.
        scores: values of all heads' scores over those of the stream, a·s/h.
        tp: tensor-parallel ranks.
        policy: "sequence" parallelism, "selective" recompute of the attention core,
            "both", or "full" recompute, which keeps each layer's input.

    >>> gpt_bytes(1, 96 * 2048 / 12288, tp=8)
    23.0
    """
    require_whole({"n_values": n_values, "tp": tp})
    require_choice({"policy": policy}, GPT_POLICIES)
    if policy == "full":
        return 2.0 * n_values
    core = 0 if policy in ("selective", "both") else 5 * scores / tp
    is_split = policy in ("sequence", "both")
    return n_values * (10 / (tp if is_split else 1) + 24 / tp + core)
