"""The parts of a model config: attention, experts, rotary positions, MTP.

Field names are DeepSeek's own (`inference/model.py`, class `ModelArgs`).
"""

import math
from dataclasses import dataclass
from typing import Literal

from labkit.config.checks import (
    named,
    require_above,
    require_at_least,
    require_choice,
    require_flag,
    require_whole,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAConfig:
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1)."""

    n_heads: int

    q_lora_rank: int | None = None
    """Rank of the query compression; None projects queries directly."""

    kv_lora_rank: int = 512
    """Width of the KV latent that all heads share, and the bulk of the cache."""

    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128

    def __post_init__(self) -> None:
        widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        require_whole(named(self, "n_heads", *widths))
        if self.q_lora_rank is not None:
            require_whole(named(self, "q_lora_rank"))
        _require_even("qk_rope_head_dim", self.qk_rope_head_dim)

    @property
    def kind(self) -> Literal["mla"]:
        return "mla"

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: the part without and with RoPE."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_dim(self) -> int:
        """Values of each head that RoPE rotates."""
        return self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Values cached per token and layer: the KV latent and one RoPE key.

        >>> MLAConfig(n_heads=128, q_lora_rank=1536).cache_width
        576
        """
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def decompressed_cache_width(self) -> int:
        """Values per token and layer if keys and values were cached per head.

        >>> MLAConfig(n_heads=128, q_lora_rank=1536).decompressed_cache_width
        40960
        """
        return self.n_heads * (self.qk_head_dim + self.v_head_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class GQAConfig:
    """Sizes of grouped-query attention; equal head counts make it plain MHA."""

    n_heads: int

    n_kv_heads: int
    """Heads that keep keys and values; each serves `n_heads / n_kv_heads` queries."""

    head_dim: int = 128

    def __post_init__(self) -> None:
        require_whole(named(self, "n_heads", "n_kv_heads", "head_dim"))
        _require_even("head_dim", self.head_dim)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                "n_kv_heads must divide n_heads, because each group of query heads "
                f"shares one key; got {self.n_kv_heads} and {self.n_heads}. "
                f"Set n_kv_heads={math.gcd(self.n_heads, self.n_kv_heads)}."
            )

    @property
    def kind(self) -> Literal["mha", "gqa"]:
        return "mha" if self.n_kv_heads == self.n_heads else "gqa"

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.head_dim

    @property
    def rope_dim(self) -> int:
        """Values of each head that RoPE rotates."""
        return self.head_dim

    @property
    def cache_width(self) -> int:
        """Values cached per token and layer: a key and a value per KV head.

        >>> GQAConfig(n_heads=128, n_kv_heads=8).cache_width
        2048
        """
        return 2 * self.n_kv_heads * self.head_dim

    @property
    def decompressed_cache_width(self) -> int:
        """Values per token and layer that the attention core reads as stored."""
        return self.cache_width


AttentionConfig = MLAConfig | GQAConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Sizes and routing rule of a mixture-of-experts layer (DeepSeek-V3, 2.1.2)."""

    n_routed_experts: int
    n_activated_experts: int
    """Routed experts that each token visits."""

    moe_inter_dim: int
    """Width of one expert's hidden layer."""

    n_shared_experts: int = 1
    """Experts that every token visits; computed as one MLP of their joint width."""

    n_expert_groups: int = 1
    n_limited_groups: int = 1
    """Groups a token may choose from; DeepSeek-V3 makes a group per node."""

    score_func: Literal["sigmoid", "softmax"] = "sigmoid"

    group_score: Literal["top2", "max"] = "top2"
    """A group's score: the sum of its two best experts (V3), or its best (V2)."""

    has_bias: bool = True
    """Whether a balancing bias steers the choice (auxiliary-loss-free balance)."""

    norm_topk_prob: bool = True
    """Whether the chosen affinities are scaled to sum to 1 before `route_scale`."""

    route_scale: float = 1.0

    balance_loss_weight: float = 1e-4
    """Weight alpha of the sequence-wise balance loss (equations 17 to 20)."""

    def __post_init__(self) -> None:
        experts = ("n_routed_experts", "n_activated_experts", "moe_inter_dim")
        require_whole(named(self, *experts, "n_expert_groups", "n_limited_groups"))
        require_whole(named(self, "n_shared_experts"), at_least=0)
        require_choice(named(self, "score_func"), ("sigmoid", "softmax"))
        require_choice(named(self, "group_score"), ("top2", "max"))
        require_flag(named(self, "has_bias", "norm_topk_prob"))
        require_above(named(self, "route_scale"), 0)
        require_at_least(named(self, "balance_loss_weight"), 0)
        self._check_experts()
        self._check_groups()

    def _check_experts(self) -> None:
        if self.n_activated_experts > self.n_routed_experts:
            raise ValueError(
                "n_activated_experts must be at most n_routed_experts; got "
                f"{self.n_activated_experts} of {self.n_routed_experts}. "
                f"Set n_activated_experts={self.n_routed_experts} or less."
            )

    def _check_groups(self) -> None:
        if self.n_routed_experts % self.n_expert_groups:
            fix = math.gcd(self.n_routed_experts, self.n_expert_groups)
            raise ValueError(
                "n_expert_groups must divide n_routed_experts; got "
                f"{self.n_expert_groups} and {self.n_routed_experts}. "
                f"Set n_expert_groups={fix}."
            )
        if self.n_limited_groups > self.n_expert_groups:
            raise ValueError(
                "n_limited_groups must be at most n_expert_groups; got "
                f"{self.n_limited_groups} of {self.n_expert_groups}. "
                f"Set n_limited_groups={self.n_expert_groups} or less."
            )
        reachable = self.n_limited_groups * self.experts_per_group
        if reachable < self.n_activated_experts:
            fewest = -(-self.n_activated_experts // self.experts_per_group)
            raise ValueError(
                "n_limited_groups must leave at least n_activated_experts to choose "
                f"from; {self.n_limited_groups} groups of {self.experts_per_group} "
                f"hold {reachable}, but {self.n_activated_experts} are activated. "
                f"Set n_limited_groups={fewest} or more."
            )

    @property
    def experts_per_group(self) -> int:
        return self.n_routed_experts // self.n_expert_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary positions and their YaRN extension (DeepSeek-V3, section 4.3)."""

    rope_theta: float = 10_000.0

    rope_factor: float = 1.0
    """Context extension s; used only beyond `original_seq_len`."""

    original_seq_len: int = 4096
    """Context of the first training phase; up to it YaRN is off."""

    beta_fast: float = 32.0
    beta_slow: float = 1.0

    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    """Softmax factor is m², m = 0.1 · mscale_all_dim · ln(rope_factor) + 1."""

    def __post_init__(self) -> None:
        require_whole(named(self, "original_seq_len"))
        require_above(named(self, "rope_theta"), 1)
        require_at_least(named(self, "rope_factor"), 1)
        require_above(named(self, "beta_fast", "beta_slow"), 0)
        require_at_least(named(self, "mscale", "mscale_all_dim"), 0)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                "beta_fast must be above beta_slow, because fast dimensions keep "
                f"their frequency; got {self.beta_fast} and {self.beta_slow}. "
                "DeepSeek-V3 has 32 and 1."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MTPConfig:
    """Multi-token prediction (DeepSeek-V3, section 2.2)."""

    depth: int = 1
    """Modules D; module k predicts the token k + 1 ahead of the input."""

    loss_weight: float = 0.3
    """Weight lambda: 0.3 for the first 10T tokens of DeepSeek-V3, then 0.1."""

    def __post_init__(self) -> None:
        require_whole(named(self, "depth"))
        require_at_least(named(self, "loss_weight"), 0)


def _require_even(name: str, value: int) -> None:
    if value % 2:
        raise ValueError(
            f"{name} must be even, because RoPE rotates pairs; got {value}. "
            f"Set {name}={value + 1}."
        )
