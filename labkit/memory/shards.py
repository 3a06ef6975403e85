"""What one rank holds of its stage's weights, counted by how ranks share them.

The three buckets differ twice: in what cuts them (`tp`, nothing, `ep`), and in how
many ranks hold the same: `dp * cp` of dense weights, `dp * cp * tp / ep` of experts
(arXiv 2502.07846, section 3).
"""

import math
from dataclasses import dataclass

from labkit.config import GQAConfig, Layout, ModelConfig
from labkit.config.checks import require_choice
from labkit.memory.stages import Chunk, Contents, Stage
from labkit.memory.weights import (
    Weight,
    as_in_paper,
    embedding_weights,
    head_weights,
    layer_weights,
    mtp_weights,
)

FP8_BLOCK = 128
"""Rows and columns of a weight that share one FP8 scale."""

CONVENTIONS = ("megatron", "paper")
"""Whose cuts are counted: Megatron-Core's, or those of arXiv 2502.07846
(`as_in_paper` says how they differ)."""


@dataclass(kw_only=True, slots=True)
class Bucket:
    """What one rank holds of all weights that are shared in one way."""

    n_holders: int
    """Ranks that hold the same: copies, which ZeRO turns into shares."""

    n_params: int = 0
    n_tensors: int = 0
    n_fp8_params: int = 0
    """Parameters that an FP8 model keeps in FP8."""

    n_fp8_blocks: int = 0
    """Scales that come with them."""

    def add(self, weight: Weight, layout: Layout, times: int) -> None:
        """Add one rank's share of the weight, `times` times."""
        shape = local_shape(weight, layout)
        n_params = math.prod(shape)
        self.n_params += times * n_params
        self.n_tensors += times
        if weight.is_fp8:
            *stack, rows, columns = shape
            n_blocks = -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
            self.n_fp8_params += times * n_params
            self.n_fp8_blocks += times * math.prod(stack) * n_blocks


@dataclass(kw_only=True, slots=True)
class Shards:
    """What one rank holds of its stage's weights."""

    split: Bucket
    replicated: Bucket
    expert: Bucket

    n_biases: int = 0
    """Balancing biases of routers: FP32, without gradient or moments."""

    @property
    def buckets(self) -> tuple[Bucket, Bucket, Bucket]:
        """All that has gradients and optimizer states."""
        return self.split, self.replicated, self.expert

    @property
    def n_params(self) -> int:
        """Parameters of all buckets; biases of routers are none."""
        return sum(bucket.n_params for bucket in self.buckets)


def shard_params(
    cfg: ModelConfig,
    layout: Layout,
    stage: Stage | None = None,
    *,
    convention: str = "megatron",
) -> Shards:
    """Return what one rank of a pipeline stage holds of the model's weights.

    Data- and context-parallel ranks hold the same. Where `tp` does not divide the
    vocabulary, the rank with a row more is counted, without padding.

    Args:
        cfg: the model, its MTP modules included.
        layout: the cuts.
        stage: one of `stage_layers`; None is the whole model.
        convention: one of `CONVENTIONS`.

    >>> from labkit.config import PRESETS
    >>> stage = Stage(chunks=(Chunk(layers=range(4, 8)),))
    >>> layout = Layout(pp=16, dp=32, tp=2, ep=8)
    >>> shards = shard_params(PRESETS["v3-671b"], layout, stage, convention="paper")
    >>> shards.split.n_params, shards.expert.n_params, shards.n_params
    (318767104, 5820645376, 6250364928)
    >>> shards.split.n_holders, shards.expert.n_holders
    (32, 8)

    Raises:
        ValueError: the layout cuts through a head, an expert or a hidden unit.
    """
    require_choice({"convention": convention}, CONVENTIONS)
    require_cuts(cfg, layout)
    stage = stage or whole(cfg)
    contents = stage.contents(cfg)
    shards = _empty(layout, stage.n_copies)
    for weights, times in _parts(cfg, contents):
        if convention == "paper":
            weights = as_in_paper(weights, cfg)
        for weight in weights:
            getattr(shards, weight.bucket).add(weight, layout, times)
    if cfg.moe is not None and cfg.moe.has_bias:
        shards.n_biases = contents.n_routers * cfg.moe.n_routed_experts
    return shards


def whole(cfg: ModelConfig) -> Stage:
    """Return the only stage of a model that is not cut into stages."""
    layers = range(cfg.n_layers)
    return Stage(chunks=(Chunk(layers=layers, is_first=True, is_last=True),))


def local_shape(weight: Weight, layout: Layout) -> tuple[int, ...]:
    """Return the shape of the largest share that a rank holds of a weight.

    >>> down = Weight("w2.weight", (7168, 18432), "split", cut=1)
    >>> local_shape(down, Layout(tp=4))
    (7168, 4608)
    """
    if weight.cut is None:
        return weight.shape
    degree = layout.tp if weight.bucket == "split" else layout.ep
    shape = list(weight.shape)
    n_grains = shape[weight.cut] // weight.grain
    shape[weight.cut] = -(-n_grains // degree) * weight.grain
    return tuple(shape)


def require_cuts(cfg: ModelConfig, layout: Layout) -> None:
    """Raise ValueError unless `tp` and `ep` cut the model into equal whole parts."""
    moe, tp = cfg.moe, layout.tp
    whole_parts = {"n_heads": cfg.attention.n_heads}
    if cfg.n_moe_layers < cfg.n_layers:
        whole_parts["inter_dim"] = cfg.inter_dim
    if moe is not None and moe.n_shared_experts:
        width = moe.n_shared_experts * moe.moe_inter_dim
        whole_parts["n_shared_experts * moe_inter_dim"] = width
    for name, size in whole_parts.items():
        if size % tp:
            raise ValueError(
                f"tp must divide {name}, because each rank takes an equal part; got "
                f"tp={tp} and {size}. Set tp={math.gcd(tp, size)}."
            )
    _require_kv_heads(cfg, layout)
    _require_experts(cfg, layout)


def _require_kv_heads(cfg: ModelConfig, layout: Layout) -> None:
    if not isinstance(cfg.attention, GQAConfig):
        return
    n_kv_heads, tp = cfg.attention.n_kv_heads, layout.tp
    if n_kv_heads % tp and tp % n_kv_heads:
        raise ValueError(
            "tp must divide n_kv_heads, or be a multiple of it so that ranks share a "
            f"head; got tp={tp} and {n_kv_heads}. Set tp={math.gcd(tp, n_kv_heads)}."
        )


def _require_experts(cfg: ModelConfig, layout: Layout) -> None:
    if cfg.moe is None and layout.ep > 1:
        raise ValueError(
            f"ep must be 1 for a model without experts; got ep={layout.ep}. Set ep=1."
        )
    if cfg.moe is not None and cfg.moe.n_routed_experts % layout.ep:
        n_experts = cfg.moe.n_routed_experts
        raise ValueError(
            "ep must divide n_routed_experts, because each rank takes as many whole "
            f"experts; got ep={layout.ep} and {n_experts}. "
            f"Set ep={math.gcd(layout.ep, n_experts)}."
        )


def _empty(layout: Layout, n_copies: int) -> Shards:
    n_dense = layout.dp * layout.cp * n_copies
    return Shards(
        split=Bucket(n_holders=n_dense),
        replicated=Bucket(n_holders=n_dense),
        expert=Bucket(n_holders=n_dense * layout.tp // layout.ep),
    )


def _parts(cfg: ModelConfig, contents: Contents) -> list[tuple[list[Weight], int]]:
    """Return the weights of each part that the stage holds, and how often."""
    parts = [
        (embedding_weights, contents.n_embeddings),
        (lambda cfg: layer_weights(cfg, is_dense=True), contents.n_dense),
        (lambda cfg: layer_weights(cfg, is_dense=False), contents.n_sparse),
        (head_weights, contents.n_output_heads),
        (mtp_weights, contents.n_mtp),
    ]
    return [(weights(cfg), times) for weights, times in parts if times]
