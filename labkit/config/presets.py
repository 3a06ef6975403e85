"""The models the book speaks of: two to train here, four that were published.

The published ones repeat `data/models/*.json`, and a test keeps them equal.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from labkit.config.model import ModelConfig
from labkit.config.parts import MLAConfig, MoEConfig, MTPConfig, RopeConfig

BYTE_VOCAB = 256
"""Tokens of the byte-level corpus; byte 0 separates documents."""

TINY = ModelConfig(
    vocab_size=BYTE_VOCAB,
    dim=128,
    n_layers=4,
    inter_dim=384,
    attention=MLAConfig(
        n_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    moe=MoEConfig(
        n_routed_experts=8,
        n_activated_experts=2,
        moe_inter_dim=96,
        n_expert_groups=4,
        n_limited_groups=2,
        route_scale=1.0,
    ),
    rope=RopeConfig(rope_factor=8.0, original_seq_len=256),
    mtp=MTPConfig(),
    max_seq_len=256,
    init_std=0.02,
)

SMALL = replace(
    TINY,
    dim=256,
    n_layers=6,
    inter_dim=1024,
    attention=MLAConfig(
        n_heads=8,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    moe=replace(
        TINY.moe,
        n_routed_experts=16,
        n_activated_experts=4,
        moe_inter_dim=128,
        n_expert_groups=4,
        n_limited_groups=2,
    ),
)

EXTENDED_ROPE = RopeConfig(rope_factor=40.0, original_seq_len=4096)

V2_LITE = ModelConfig(
    vocab_size=102_400,
    dim=2048,
    n_layers=27,
    inter_dim=10_944,
    attention=MLAConfig(n_heads=16),
    moe=MoEConfig(
        n_routed_experts=64,
        n_activated_experts=6,
        moe_inter_dim=1408,
        n_shared_experts=2,
        score_func="softmax",
        group_score="max",
        has_bias=False,
        norm_topk_prob=False,
        balance_loss_weight=1e-3,
    ),
    rope=replace(EXTENDED_ROPE, mscale=0.707, mscale_all_dim=0.707),
    max_seq_len=163_840,
)

V2 = replace(
    V2_LITE,
    dim=5120,
    n_layers=60,
    inter_dim=12_288,
    attention=MLAConfig(n_heads=128, q_lora_rank=1536),
    moe=replace(
        V2_LITE.moe,
        n_routed_experts=160,
        moe_inter_dim=1536,
        n_expert_groups=8,
        n_limited_groups=3,
        route_scale=16.0,
    ),
    rope=EXTENDED_ROPE,
)

V3 = ModelConfig(
    vocab_size=129_280,
    dim=7168,
    n_layers=61,
    n_dense_layers=3,
    inter_dim=18_432,
    attention=MLAConfig(n_heads=128, q_lora_rank=1536),
    moe=MoEConfig(
        n_routed_experts=256,
        n_activated_experts=8,
        moe_inter_dim=2048,
        n_expert_groups=8,
        n_limited_groups=4,
        route_scale=2.5,
    ),
    rope=EXTENDED_ROPE,
    mtp=MTPConfig(),
    max_seq_len=163_840,
)

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": TINY,
        "small": SMALL,
        "v2-lite-16b": V2_LITE,
        "v2-236b": V2,
        "v3-671b": V3,
        "v3.1-671b": V3,
    }
)
"""Models by name. V3.1 has V3's architecture; its checkpoint's scales differ."""
