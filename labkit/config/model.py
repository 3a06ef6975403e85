"""The config of a whole model, and the numbers that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.config import counts
from labkit.config.checks import (
    named,
    require_above,
    require_instance,
    require_whole,
)
from labkit.config.hf_reading import read_hf
from labkit.config.hf_writing import write_hf
from labkit.config.parts import (
    AttentionConfig,
    GQAConfig,
    MLAConfig,
    MoEConfig,
    MTPConfig,
    RopeConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Architecture of a DeepSeek-V2/V3-class decoder.

    Compose variants with `dataclasses.replace(cfg, n_layers=4)`.
    """

    vocab_size: int
    dim: int
    """Width of the residual stream."""

    n_layers: int
    inter_dim: int
    """Width of the dense feed-forward networks."""

    attention: AttentionConfig

    moe: MoEConfig | None = None
    """None makes every layer dense."""

    n_dense_layers: int = 1
    """First layers whose feed-forward network is dense (used with `moe` only)."""

    rope: RopeConfig = RopeConfig()

    mtp: MTPConfig | None = None

    max_seq_len: int = 4096
    """Longest sequence; above `rope.original_seq_len` YaRN is on."""

    norm_eps: float = 1e-6

    init_std: float = 0.006
    """Standard deviation of initial weights (DeepSeek-V3, section 4.2)."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "n_layers", "inter_dim", "max_seq_len")
        require_whole(named(self, *sizes))
        require_whole(named(self, "n_dense_layers"), at_least=0)
        require_above(named(self, "norm_eps", "init_std"), 0)
        require_instance(named(self, "attention"), MLAConfig, GQAConfig)
        require_instance(named(self, "moe"), MoEConfig, optional=True)
        require_instance(named(self, "rope"), RopeConfig)
        require_instance(named(self, "mtp"), MTPConfig, optional=True)
        if self.n_dense_layers > self.n_layers:
            raise ValueError(
                f"n_dense_layers must lie between 0 and n_layers={self.n_layers}; "
                f"got {self.n_dense_layers}. Set n_dense_layers={self.n_layers} or "
                "less."
            )

    @property
    def n_moe_layers(self) -> int:
        """Main layers with experts."""
        return 0 if self.moe is None else self.n_layers - self.n_dense_layers

    @property
    def n_mtp(self) -> int:
        """MTP modules."""
        return 0 if self.mtp is None else self.mtp.depth

    @property
    def is_extended(self) -> bool:
        """Whether YaRN is on: frequencies and softmax factor change together."""
        longer = self.max_seq_len > self.rope.original_seq_len
        return longer and self.rope.rope_factor > 1

    @property
    def softmax_scale(self) -> float:
        """Factor on query-key products: 1/√d, times m² when YaRN is on.

        >>> from labkit.config import PRESETS
        >>> round(PRESETS["v3-671b"].softmax_scale, 6)
        0.135234
        """
        scale = self.attention.qk_head_dim**-0.5
        if not self.is_extended:
            return scale
        m = 0.1 * self.rope.mscale_all_dim * math.log(self.rope.rope_factor) + 1
        return scale * m * m

    def n_params(self, *, include_mtp: bool = False) -> int:
        """Return the parameters of the model, without its MTP modules by default.

        >>> from labkit.config import PRESETS
        >>> PRESETS["v3-671b"].n_params()
        671026419200
        """
        return counts.n_params(self, include_mtp=include_mtp)

    def n_active_params(self, *, include_embedding: bool = False) -> int:
        """Return the parameters one token passes through (the head counted).

        >>> from labkit.config import PRESETS
        >>> f"{PRESETS['v3-671b'].n_active_params():.4e}"
        '3.6626e+10'
        """
        return counts.n_active_params(self, include_embedding=include_embedding)

    def parameter_counts(self) -> counts.ParameterCounts:
        """Return the parameters by part."""
        return counts.parameter_counts(self)

    def kv_bytes_per_token(self, dtype: str = "bfloat16") -> int:
        """Return the bytes of cache that one token keeps in all main layers.

        >>> from labkit.config import PRESETS
        >>> PRESETS["v3-671b"].kv_bytes_per_token()
        70272
        >>> PRESETS["v3-671b"].kv_bytes_per_token("fp8") == 61 * 656
        True
        """
        return counts.kv_bytes_per_token(self, dtype)

    def flops_per_token(
        self, seq_len: int, *, causal: bool = True, training: bool = True
    ) -> int:
        """Return FLOPs per token: forward and backward, or forward alone.

        >>> from labkit.config import PRESETS
        >>> round(PRESETS["v3-671b"].flops_per_token(4096) / 1e9, 1)
        250.5
        """
        return counts.flops_per_token(self, seq_len, causal=causal, training=training)

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any]) -> ModelConfig:
        """Return the model that a Hugging Face `config.json` describes.

        Args:
            source: the file, the folder that holds it, or its contents.

        Raises:
            ValueError: not a DeepSeek-V2/V3 config, a field missing or unusable, or
                one that asks for what labkit does not compute.
        """
        return cls(**read_hf(source))

    def to_hf(self) -> dict[str, Any]:
        """Return the contents of a `config.json` that transformers reads.

        Raises:
            ValueError: transformers' DeepSeek models cannot express this config.
        """
        return write_hf(self)
