"""One layer of latent attention, matrix by matrix: what a count may have left out."""

from collections.abc import Callable, Iterator

from labkit.config import MLAConfig
from labkit.config.counts import attention_params
from labkit.workbook.exercises.spec import Misconception

LEFT_OUT = {
    "wq": "the one matrix of the queries is missing: dim × n_heads × query width",
    "wq_a": "wq_a is missing, which takes queries down: dim × q_lora_rank",
    "q_norm": "the norm of the query rank is missing: q_lora_rank weights",
    "wq_b": "wq_b is missing, which takes queries up: q_lora_rank × n_heads × "
    "(qk_nope_head_dim + qk_rope_head_dim)",
    "wkv_a": "wkv_a is missing, which takes keys and values down: dim × "
    "(kv_lora_rank + qk_rope_head_dim)",
    "kv_norm": "the norm of the KV latent is missing: kv_lora_rank weights",
    "wkv_b": "wkv_b is missing, which takes keys and values up: kv_lora_rank × "
    "n_heads × (qk_nope_head_dim + v_head_dim)",
    "wo": "wo is missing, the output matrix: n_heads × v_head_dim × dim",
    "k_pe": "wkv_a must also make the rotary key: dim × qk_rope_head_dim is missing",
}
"""What to tell a learner who left one part out, by its name in the code."""

NO_RANK = "q_lora_rank is None in V2-Lite: queries come from one matrix, wq"
"""What to tell a learner whose count multiplies by None."""


def parts(attention: MLAConfig, dim: int) -> dict[str, int]:
    """Return the parameters of each matrix and norm, by its name in the code."""
    heads, rank = attention.n_heads, attention.q_lora_rank
    latent = attention.kv_lora_rank
    query_width = heads * attention.qk_head_dim
    query = {"wq": dim * query_width}
    if rank is not None:
        query = {"wq_a": dim * rank, "q_norm": rank, "wq_b": rank * query_width}
    return query | {
        "wkv_a": dim * attention.cache_width,
        "kv_norm": latent,
        "wkv_b": latent * heads * (attention.qk_nope_head_dim + attention.v_head_dim),
        "wo": heads * attention.v_head_dim * dim,
    }


def left_out() -> Iterator[Misconception]:
    """Yield a wrong turn for each part left out, by counts with and without wq."""
    yield Misconception(_without("", needs_rank=True), NO_RANK)
    for name, message in LEFT_OUT.items():
        yield Misconception(_without(name), message)
        if name != "wq":
            yield Misconception(
                _without(name, needs_rank=True), f"{message}; {NO_RANK}"
            )


def _without(name: str, *, needs_rank: bool = False) -> Callable[[MLAConfig, int], int]:
    """Return a count that leaves out one part, where the model has it.

    Args:
        name: of the part, "" for none.
        needs_rank: whether the count fails where queries are not compressed.
    """

    def count(attention: MLAConfig, dim: int) -> int:
        if needs_rank and attention.q_lora_rank is None:
            raise TypeError("None is no number")
        sizes = parts(attention, dim) | {"k_pe": dim * attention.qk_rope_head_dim}
        return attention_params(attention, dim) - sizes.get(name, 0)

    return count
