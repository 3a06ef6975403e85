"""What a pass computes and moves: FLOPs of products, bytes of all the rest, by part.

Beside the tape, which says what operators keep, this says what they take: each product
its FLOPs and the bytes that it reads and writes, everything else its bytes alone. On a
CPU the FLOPs are, to the last one, those that `FlopCounterMode` counts in FP32. Bytes
are counted operator by operator, as if no cache held what one leaves to the next.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from labkit.config import Layout, MLAConfig, ModelConfig, MoEConfig
from labkit.config.parts import AttentionConfig
from labkit.memory.kept_ffn import expected_rows
from labkit.memory.tape import EXACT_BYTES, Pass
from labkit.model.attention_core import BLOCK_QUERIES

WHOLE = ("wq_a", "wkv_a", "q_norm", "kv_norm")
"""Parts that each tensor-parallel rank computes for all tokens: latents."""

NORM_PASSES = {"cpu": (5, 13), "gpu": (2, 3)}
"""How often a norm reads or writes vectors, forward and backward; fused on a GPU."""

SWIGLU_PASSES = 5, 9
EXPERT_PASSES = 7, 22
"""The same of the hidden layer of routed experts, routing weights included."""

SCORE_PASSES = 4, 11
"""Of a CPU's scores; a GPU's kernel keeps them to itself."""

ROUTER_PASSES = {"cpu": (90, 40), "gpu": (16, 6)}
"""Of affinities: sigmoid, bias, and the best of groups and experts. A CPU sorts for the
time of 45 to 120 and 15 to 70 passes, measured with 8 to 256 experts."""

LOSS_PASSES = 5, 3
"""Of logits in FP32."""


class Work(NamedTuple):
    """One operator, or a few in a row; the backward includes both gradients."""

    part: str
    """Its name within a block, or within the model for what lies outside of blocks."""

    flops: float
    """Of the forward, a multiply-add counting 2."""

    n_bytes: float
    """Read and written by the forward."""

    backward_flops: float
    backward_bytes: float

    def forward_time(self, balance: float) -> float:
        """Return what the forward takes, in the time of one FLOP."""
        return max(self.flops, balance * self.n_bytes)

    def backward_time(self, balance: float) -> float:
        """Return what the backward takes, in the time of one FLOP."""
        return max(self.backward_flops, balance * self.backward_bytes)

    def over(self, n_ranks: int) -> "Work":
        """Return the share of one of so many ranks."""
        return Work(self.part, *(amount / n_ranks for amount in self[1:]))


def moved(part: str, n_bytes: float, passes: tuple[float, float]) -> Work:
    """Return what reads or writes the same bytes so often, forward and backward."""
    return Work(part, 0, n_bytes * passes[0], 0, n_bytes * passes[1])


def product(part: str, step: Pass, widths: tuple[int, int], *, n: float = 0) -> Work:
    """Return a linear layer; autocast first makes a copy of its weight.

    Args:
        part: its name.
        step: the pass.
        widths: of its input and of its output.
        n: rows; 0 takes the tokens of the pass.
    """
    n, size = n or step.n_tokens, step.compute.itemsize
    n_weights = widths[0] * widths[1]
    n_bytes = n * sum(widths) * size + n_weights * _weight_bytes(step)
    flops = 2 * n * n_weights
    return Work(part, flops, n_bytes, 2 * flops, 2 * n_bytes)


def _weight_bytes(step: Pass) -> int:
    """Return what is moved per weight to use it once."""
    size = step.compute.itemsize
    return size + (EXACT_BYTES + size if step.is_mixed else 0)


def norm(part: str, step: Pass, width: int) -> Work:
    """Return an RMS norm."""
    is_exact = step.device == "cpu" or step.is_mixed
    size = EXACT_BYTES if is_exact else step.compute.itemsize
    return moved(part, step.n_tokens * width * size, NORM_PASSES[step.device])


def block_work(cfg: ModelConfig, step: Pass, *, is_dense: bool) -> Iterator[Work]:
    """Yield the work of one layer, in the order of the forward."""
    stream = step.n_tokens * cfg.dim * step.compute.itemsize
    yield norm("attn_norm", step, cfg.dim)
    for work in attention_work(cfg.attention, cfg.dim, step):
        yield work._replace(part=f"attn.{work.part}")
    yield moved("attn_residual", stream, (3, 3))
    yield norm("ffn_norm", step, cfg.dim)
    if is_dense or cfg.moe is None:
        ffn = mlp_work((cfg.dim, cfg.inter_dim), step)
    else:
        ffn = moe_work(cfg.moe, cfg.dim, step)
    for work in ffn:
        yield work._replace(part=f"ffn.{work.part}")
    yield moved("ffn_residual", stream, (3, 3))


def attention_work(attention: AttentionConfig, dim: int, step: Pass) -> Iterator[Work]:
    """Yield the work of an attention layer; "heads" is between projections and core."""
    n_heads, u = attention.n_heads, attention.v_head_dim
    query_width = n_heads * attention.qk_head_dim
    size, n = step.compute.itemsize, step.n_tokens
    if isinstance(attention, MLAConfig):
        rank, latent = attention.q_lora_rank, attention.kv_lora_rank
        if rank is None:
            yield product("wq", step, (dim, query_width))
        else:
            yield product("wq_a", step, (dim, rank))
            yield norm("q_norm", step, rank)
            yield product("wq_b", step, (rank, query_width))
        yield product("wkv_a", step, (dim, attention.cache_width))
        yield norm("kv_norm", step, latent)
        up_width = n_heads * (attention.qk_nope_head_dim + u)
        yield product("wkv_b", step, (latent, up_width))
        n_rotated = n_heads + 1
        joined = n_heads * (2 * attention.qk_head_dim + u)
    else:
        n_keys = attention.n_kv_heads
        yield product("wq", step, (dim, query_width))
        for name in ("wk", "wv"):
            yield product(name, step, (dim, n_keys * attention.head_dim))
        n_rotated = n_heads + n_keys
        joined = 2 * n_heads * attention.head_dim if n_keys < n_heads else 0
    # Copied to FP32, turned there, and cast back.
    turned = n * n_rotated * attention.rope_dim
    n_bytes = turned * (3 * EXACT_BYTES + size) + n * joined * 2 * size
    yield moved("heads", n_bytes, (1, 2))
    yield from _core_work(attention, step)
    yield product("wo", step, (n_heads * u, dim))


def _core_work(attention: AttentionConfig, step: Pass) -> Iterator[Work]:
    """Yield the attention core: scores of a causal sequence, and sums of values."""
    u, w = attention.v_head_dim, attention.qk_head_dim
    n_heads, size = step.batch * attention.n_heads, step.compute.itemsize
    n_vectors = n_heads * step.seq_len
    ends = n_vectors * (2 * w + 2 * u) * size
    # The result is copied, heads side by side.
    yield moved("core", n_vectors * u * size, (2, 2))
    if step.device == "cpu":
        blocks = _blocks(step.seq_len)
        n_pairs = n_heads * sum(n * end for n, end in blocks)
        n_masked = n_heads * sum(n * n for n, _ in blocks)
        yield moved("core", n_pairs * size, SCORE_PASSES)
        yield moved("core", n_masked * size, (2, 2))
    else:
        n_pairs = n_heads * step.seq_len * (step.seq_len + 1) / 2
        u = w = max(u, w)  # what is narrower is padded
    # The backward computes the scores again: three products over keys' width.
    flops, again = 2 * n_pairs * (w + u), 2 * n_pairs * (3 * w + 2 * u)
    yield Work("core", flops, ends, again, 2 * ends)


def _blocks(seq_len: int) -> list[tuple[int, int]]:
    """Return the blocks of one head on a CPU: their queries, and the keys they see."""
    starts = range(0, seq_len, BLOCK_QUERIES)
    ends = [min(start + BLOCK_QUERIES, seq_len) for start in starts]
    return [(end - start, end) for start, end in zip(starts, ends, strict=True)]


def mlp_work(widths: tuple[int, int], step: Pass) -> Iterator[Work]:
    """Yield the work of a SwiGLU network of these widths: stream, and hidden layer."""
    dim, hidden = widths
    yield product("w1", step, (dim, hidden))
    yield product("w3", step, (dim, hidden))
    n_bytes = step.n_tokens * hidden * step.compute.itemsize
    yield moved("swiglu", n_bytes, SWIGLU_PASSES)
    yield product("w2", step, (hidden, dim))


def moe_work(moe: MoEConfig, dim: int, step: Pass) -> Iterator[Work]:
    """Yield the work of router, routed and shared experts."""
    n, n_experts = step.n_tokens, moe.n_routed_experts
    yield Work(
        "gate",
        *(2 * n * dim * n_experts, n * dim * EXACT_BYTES),
        *(4 * n * dim * n_experts, 3 * n * dim * EXACT_BYTES),
    )
    yield moved("gate", n * n_experts * EXACT_BYTES, ROUTER_PASSES[step.device])
    rows = expected_rows(moe, step) if step.n_rows is None else step.n_rows
    hidden, size = moe.moe_inter_dim, step.compute.itemsize
    n_weights = 3 * dim * hidden
    flops = 2 * rows * n_weights
    n_bytes = rows * (2 * dim + 3 * hidden) * size
    n_bytes += n_experts / step.ep * n_weights * _weight_bytes(step)
    yield Work("experts", flops, n_bytes, 2 * flops, 2 * n_bytes)
    yield moved("experts", rows * hidden * size, EXPERT_PASSES)
    # Rows are gathered, in the backward with their gradients, and summed per token.
    yield moved("experts", rows * dim * size, (3, 5))
    if moe.n_shared_experts:
        shared = moe.n_shared_experts * hidden
        for work in mlp_work((dim, shared), step):
            yield work._replace(part=f"shared_experts.{work.part}")


def mtp_work(cfg: ModelConfig, step: Pass) -> Iterator[Work]:
    """Yield the work of an MTP module, its norm included; the pass is its own."""
    yield norm("enorm", step, cfg.dim)
    yield norm("hnorm", step, cfg.dim)
    row = 2 * step.n_tokens * cfg.dim * step.compute.itemsize
    yield moved("joined", row, (2, 1))
    yield product("eh_proj", step, (2 * cfg.dim, cfg.dim))
    yield from block_work(cfg, step, is_dense=cfg.moe is None)
    yield norm("norm", step, cfg.dim)


def embedding_work(cfg: ModelConfig, step: Pass) -> Work:
    """Return the look-up; its gradient is as large as the table."""
    size = step.weights.itemsize
    rows, table = (n * cfg.dim * size for n in (step.n_tokens, cfg.vocab_size))
    return Work("embed", 0, 2 * rows, 0, 2 * rows + table)


def head_work(cfg: ModelConfig, step: Pass) -> Iterator[Work]:
    """Yield the head and the loss, whose norm is the model's or an MTP module's."""
    yield product("head", step, (cfg.dim, cfg.vocab_size))
    n_bytes = step.n_tokens * cfg.vocab_size * EXACT_BYTES
    yield moved("loss", n_bytes, LOSS_PASSES)


def rank_work(works: Iterable[Work], layout: Layout) -> Iterator[Work]:
    """Yield the same as one tensor-parallel rank does it; rows are its own already."""
    for work in works:
        is_whole = work.part.rpartition(".")[2] in WHOLE
        yield work if is_whole else work.over(layout.tp)
