"""Every weight of a model with its shape, and how ranks share it; no tensors.

Ranks share weights in three ways. Tensor parallelism cuts the projections of heads
and of hidden layers, the embedding and the head (*split*). It leaves norms, router
and the down-projections of MLA whole on each of its ranks (*replicated*). Expert
parallelism deals out whole routed experts (*expert*).

Names and shapes are those of `labkit.model.Transformer`; a test keeps them equal.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from labkit.config import MLAConfig, ModelConfig


class Weight(NamedTuple):
    """A weight of the model, and how ranks share it."""

    name: str
    """Within its layer."""

    shape: tuple[int, ...]
    bucket: Literal["split", "replicated", "expert"] = "replicated"
    cut: int | None = None
    """Dimension that is cut: by `tp` if split, by `ep` if of experts."""

    grain: int = 1
    """Rows that stay together."""

    is_fp8: bool = False
    """Whether an FP8 model keeps it in FP8: all but the embedding, the head, routers,
    norms and the projection of MTP (DeepSeek-V3, section 3.3.1, and its checkpoint)."""


def layer_weights(cfg: ModelConfig, *, is_dense: bool) -> list[Weight]:
    """Return the weights of one layer, in the model's order."""
    return [
        _norm("attn_norm", cfg.dim),
        *_under("attn", _attention(cfg)),
        _norm("ffn_norm", cfg.dim),
        *_under("ffn", _dense(cfg) if is_dense or cfg.moe is None else _sparse(cfg)),
    ]


def mtp_weights(cfg: ModelConfig) -> list[Weight]:
    """Return the weights of one MTP module; embedding and head are the model's."""
    return [
        _norm("enorm", cfg.dim),
        _norm("hnorm", cfg.dim),
        _column("eh_proj", cfg.dim, 2 * cfg.dim)._replace(is_fp8=False),
        *_under("block", layer_weights(cfg, is_dense=False)),
        _norm("norm", cfg.dim),
    ]


def embedding_weights(cfg: ModelConfig) -> list[Weight]:
    """Return the input embedding, cut by tokens of the vocabulary."""
    return [Weight("embed.weight", (cfg.vocab_size, cfg.dim), "split", cut=0)]


def head_weights(cfg: ModelConfig) -> list[Weight]:
    """Return the final norm and the head, which is cut like the embedding."""
    head = Weight("head.weight", (cfg.vocab_size, cfg.dim), "split", cut=0)
    return [_norm("norm", cfg.dim), head]


def as_in_paper(weights: Iterable[Weight], cfg: ModelConfig) -> list[Weight]:
    """Return the weights with the cuts of arXiv 2502.07846, table 6.

    It keeps the rotary rows of the query projection whole on every tensor-parallel
    rank, and puts router and shared experts, whole, with the routed experts.
    """
    is_mla = isinstance(cfg.attention, MLAConfig)
    recut = []
    for weight in weights:
        if ".gate." in weight.name or ".shared_experts." in weight.name:
            recut.append(weight._replace(bucket="expert", cut=None))
        elif is_mla and weight.name.endswith((".wq.weight", ".wq_b.weight")):
            recut += _rotary_rows_whole(weight, cfg)
        else:
            recut.append(weight)
    return recut


def _rotary_rows_whole(query: Weight, cfg: ModelConfig) -> tuple[Weight, Weight]:
    n_out, n_in = query.shape
    n_rotary = cfg.attention.n_heads * cfg.attention.rope_dim
    split = query._replace(shape=(n_out - n_rotary, n_in))
    rotary = query._replace(shape=(n_rotary, n_in), bucket="replicated", cut=None)
    return split, rotary


def _attention(cfg: ModelConfig) -> list[Weight]:
    attention, dim = cfg.attention, cfg.dim
    n_heads = attention.n_heads
    query_width = n_heads * attention.qk_head_dim
    output = _row("wo", dim, n_heads * attention.v_head_dim)
    if not isinstance(attention, MLAConfig):
        head_dim = attention.head_dim
        kv_width = attention.n_kv_heads * head_dim
        keys, values = (_column(name, kv_width, dim) for name in ("wk", "wv"))
        return [
            _column("wq", query_width, dim),
            keys._replace(grain=head_dim),
            values._replace(grain=head_dim),
            output,
        ]
    rank, latent = attention.q_lora_rank, attention.kv_lora_rank
    query = [_column("wq", query_width, dim)]
    if rank is not None:
        up = _column("wq_b", query_width, rank)
        query = [_whole("wq_a", rank, dim), _norm("q_norm", rank), up]
    up_width = n_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    return [
        *query,
        _whole("wkv_a", attention.cache_width, dim),
        _norm("kv_norm", latent),
        _column("wkv_b", up_width, latent),
        output,
    ]


def _dense(cfg: ModelConfig) -> list[Weight]:
    return _swiglu(cfg.dim, cfg.inter_dim)


def _sparse(cfg: ModelConfig) -> list[Weight]:
    moe, dim = cfg.moe, cfg.dim
    n_experts, width = moe.n_routed_experts, moe.moe_inter_dim
    shared = _swiglu(dim, moe.n_shared_experts * width) if moe.n_shared_experts else []
    w13, w2 = (n_experts, 2 * width, dim), (n_experts, dim, width)
    return [
        Weight("gate.weight", (n_experts, dim)),
        Weight("experts.w13", w13, "expert", cut=0, is_fp8=True),
        Weight("experts.w2", w2, "expert", cut=0, is_fp8=True),
        *_under("shared_experts", shared),
    ]


def _swiglu(dim: int, width: int) -> list[Weight]:
    gate, up = _column("w1", width, dim), _column("w3", width, dim)
    return [gate, _row("w2", dim, width), up]


def _column(name: str, n_out: int, n_in: int) -> Weight:
    """Return a projection whose outputs are cut."""
    return Weight(f"{name}.weight", (n_out, n_in), "split", cut=0, is_fp8=True)


def _row(name: str, n_out: int, n_in: int) -> Weight:
    """Return a projection whose inputs are cut."""
    return Weight(f"{name}.weight", (n_out, n_in), "split", cut=1, is_fp8=True)


def _whole(name: str, n_out: int, n_in: int) -> Weight:
    return Weight(f"{name}.weight", (n_out, n_in), is_fp8=True)


def _norm(name: str, dim: int) -> Weight:
    return Weight(f"{name}.weight", (dim,))


def _under(prefix: str, weights: Iterable[Weight]) -> list[Weight]:
    return [weight._replace(name=f"{prefix}.{weight.name}") for weight in weights]
