"""Every operator of a model that has a precision: where it is, what it weighs.

Names are those of the modules of `labkit.model`. Four have none of their own: `core`
is the product of queries, keys and values, `swiglu` that of gate and up projection,
`dispatch` and `combine` send tokens to their experts and the results back.

Classes say how much rounding an operator bears, after the plans that sort layers so:

    critical  attention core, router, norms, embedding, head, SwiGLU's product
    dense     linear layers that every token passes
    sparse    routed experts, dispatch, combine
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from labkit.config import MLAConfig, ModelConfig, MoEConfig
from labkit.config.checks import require_whole

CLASSES = ("critical", "dense", "sparse")

PARTS = (
    *("layers", "mtp", "block", "attn", "ffn", "experts", "shared_experts"),
    *("embed", "attn_norm", "q_norm", "kv_norm", "ffn_norm", "enorm", "hnorm", "norm"),
    *("wq", "wq_a", "wq_b", "wkv_a", "wkv_b", "wk", "wv", "core", "wo"),
    *("gate", "w1", "w3", "swiglu", "w2", "dispatch", "combine", "eh_proj", "head"),
)
"""All words that names of operators are made of, besides numbers."""


class Matrices(NamedTuple):
    """So many weight matrices of one shape."""

    n: int
    n_rows: int
    """Outputs."""

    n_columns: int
    """Inputs."""

    @property
    def n_params(self) -> int:
        return self.n * self.n_rows * self.n_columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator, and what a token costs it."""

    name: str
    """Dotted, as modules are: `layers.3.attn.wq_a`."""

    precision_class: Literal["critical", "dense", "sparse"]

    kind: Literal["product", "router", "norm", "lookup", "core", "pointwise", "send"]
    """What it does: `product` multiplies by weights, `send` moves rows to other ranks.
    """

    depth: int | None = None
    """Its layer; those of MTP follow the main ones. None: outside of layers."""

    matrices: tuple[Matrices, ...] = ()

    n_vector_params: int = 0
    """Gains of a norm; of a router its bias, which stays in FP32."""

    is_shared: bool = False
    """Whether the weights are counted elsewhere, as the head is that MTP uses."""

    flops_per_token: int = 0
    """Of the forward; a training step takes three times as many. As
    `cfg.flops_per_token` has it: 2 per parameter that a token passes, gains of norms
    included, and no look-up."""

    n_rows_sent: int = 0
    """Rows per token that go to other ranks, where every expert is on another."""

    row_width: int = 0

    @property
    def part(self) -> str:
        """Last word of its name."""
        return self.name.rpartition(".")[2]

    @property
    def words(self) -> list[str]:
        """Words and numbers of its name."""
        return self.name.split(".")

    @property
    def n_params(self) -> int:
        """Parameters of its own."""
        if self.is_shared:
            return 0
        return sum(m.n_params for m in self.matrices) + self.n_vector_params


PRETRAINED_SEQ_LEN = 4096
"""Tokens of a sequence in the first phase of published runs."""


def operators(cfg: ModelConfig, *, seq_len: int | None = None) -> tuple[Operator, ...]:
    """Return every operator of a model, in the order of the forward, MTP's last.

    Args:
        cfg: the model.
        seq_len: tokens of a sequence, half of which a token sees on average; None takes
            4096, or `cfg.max_seq_len` where that is less.

    >>> from labkit.config import PRESETS
    >>> v3 = operators(PRESETS["v3-671b"])
    >>> len(v3), [op.name for op in v3[:3]]
    (1171, ['embed', 'layers.0.attn_norm', 'layers.0.attn.wq_a'])

    Raises:
        ValueError: `seq_len` is not a whole number of at least 1.
    """
    if seq_len is None:
        seq_len = min(PRETRAINED_SEQ_LEN, cfg.max_seq_len)
    require_whole({"seq_len": seq_len})
    table = Matrices(1, cfg.vocab_size, cfg.dim)
    embed = Operator(
        name="embed", precision_class="critical", kind="lookup", matrices=(table,)
    )
    head = _linear("head", cfg.dim, cfg.vocab_size, "critical")
    dense, sparse, module = (
        tuple(ops)
        for ops in (
            _block(cfg, seq_len, is_dense=True),
            _block(cfg, seq_len, is_dense=False),
            _mtp(cfg, seq_len, head),
        )
    )
    layers = (
        _placed(f"layers.{i}", dense if i < cfg.n_dense_layers else sparse, i)
        for i in range(cfg.n_layers)
    )
    modules = (_placed(f"mtp.{k}", module, cfg.n_layers + k) for k in range(cfg.n_mtp))
    return (
        embed,
        *(op for layer in layers for op in layer),
        _norm("norm", cfg.dim),
        head,
        *(op for module in modules for op in module),
    )


def _placed(name: str, inner: Iterable[Operator], depth: int) -> Iterator[Operator]:
    """Yield the operators of a layer of that name."""
    return (replace(op, name=f"{name}.{op.name}", depth=depth) for op in inner)


def _within(name: str, inner: Iterable[Operator]) -> Iterator[Operator]:
    """Yield the operators of a module of that name."""
    return (replace(op, name=f"{name}.{op.name}") for op in inner)


def _linear(
    name: str,
    n_inputs: int,
    n_outputs: int,
    precision_class: Literal["critical", "dense", "sparse"] = "dense",
) -> Operator:
    weight = Matrices(1, n_outputs, n_inputs)
    return Operator(
        name=name,
        precision_class=precision_class,
        kind="product",
        matrices=(weight,),
        flops_per_token=2 * weight.n_params,
    )


def _norm(name: str, width: int) -> Operator:
    return Operator(
        name=name,
        precision_class="critical",
        kind="norm",
        n_vector_params=width,
        flops_per_token=2 * width,
    )


def _swiglu(name: str) -> Operator:
    return Operator(name=name, precision_class="critical", kind="pointwise")


def _block(cfg: ModelConfig, seq_len: int, *, is_dense: bool) -> Iterator[Operator]:
    yield _norm("attn_norm", cfg.dim)
    yield from _within("attn", _attention(cfg, seq_len))
    yield _norm("ffn_norm", cfg.dim)
    if is_dense or cfg.moe is None:
        yield from _within("ffn", _mlp(cfg.dim, cfg.inter_dim))
    else:
        yield from _within("ffn", _moe(cfg.moe, cfg.dim))


def _attention(cfg: ModelConfig, seq_len: int) -> Iterator[Operator]:
    attention, dim, n_heads = cfg.attention, cfg.dim, cfg.attention.n_heads
    query_width = n_heads * attention.qk_head_dim
    if not isinstance(attention, MLAConfig):
        yield _linear("wq", dim, query_width)
        for name in ("wk", "wv"):
            yield _linear(name, dim, attention.n_kv_heads * attention.head_dim)
    else:
        rank, latent = attention.q_lora_rank, attention.kv_lora_rank
        if rank is None:
            yield _linear("wq", dim, query_width)
        else:
            yield _linear("wq_a", dim, rank)
            yield _norm("q_norm", rank)
            yield _linear("wq_b", rank, query_width)
        yield _linear("wkv_a", dim, attention.cache_width)
        yield _norm("kv_norm", latent)
        up_width = attention.qk_nope_head_dim + attention.v_head_dim
        yield _linear("wkv_b", latent, n_heads * up_width)
    widths = attention.qk_head_dim + attention.v_head_dim
    yield Operator(
        name="core",
        precision_class="critical",
        kind="core",
        flops_per_token=n_heads * widths * seq_len,  # 2 a pair, of half the sequence
    )
    yield _linear("wo", n_heads * attention.v_head_dim, dim)


def _mlp(dim: int, hidden: int) -> Iterator[Operator]:
    yield _linear("w1", dim, hidden)
    yield _linear("w3", dim, hidden)
    yield _swiglu("swiglu")
    yield _linear("w2", hidden, dim)


def _moe(moe: MoEConfig, dim: int) -> Iterator[Operator]:
    n, hidden = moe.n_routed_experts, moe.moe_inter_dim
    affinity = Matrices(1, n, dim)
    bias = n if moe.has_bias else 0
    yield Operator(
        name="gate",
        precision_class="critical",
        kind="router",
        matrices=(affinity,),
        n_vector_params=bias,
        flops_per_token=2 * (affinity.n_params + bias),
    )
    send = Operator(
        name="dispatch",
        precision_class="sparse",
        kind="send",
        n_rows_sent=moe.n_activated_experts,
        row_width=dim,
    )
    yield send
    yield Operator(
        name="experts",
        precision_class="sparse",
        kind="product",
        matrices=(Matrices(2 * n, hidden, dim), Matrices(n, dim, hidden)),
        flops_per_token=2 * moe.n_activated_experts * 3 * dim * hidden,
    )
    yield _swiglu("experts.swiglu")
    yield replace(send, name="combine")
    if moe.n_shared_experts:
        shared = moe.n_shared_experts * hidden
        yield from _within("shared_experts", _mlp(dim, shared))


def _mtp(cfg: ModelConfig, seq_len: int, head: Operator) -> Iterator[Operator]:
    yield _norm("enorm", cfg.dim)
    yield _norm("hnorm", cfg.dim)
    yield _linear("eh_proj", 2 * cfg.dim, cfg.dim)
    yield from _within("block", _block(cfg, seq_len, is_dense=cfg.moe is None))
    yield _norm("norm", cfg.dim)
    yield replace(head, is_shared=True)
