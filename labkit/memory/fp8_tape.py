"""What a BF16 tape keeps when activations are cached in FP8 (DeepSeek-V3, 3.3.3).

Inputs of linear layers are kept in E4M3, a scale per token and 128 channels; that of
the attention's output projection in E5M6, because it is read by attention's backward
too, for which PyTorch's fused kernel keeps it in BF16 beside. SwiGLU keeps what it
reads in E4M3, and computes its product again. Norms, the router, the attention core,
embedding, head and the projection of MTP stay as they are. Arithmetic on a published
recipe: nothing here has been compared with a run.
"""

from collections.abc import Iterable, Iterator

from labkit.memory.tape import E5M6_BITS, Kept, Op, fp8_bytes

LINEARS = ("wq", "wq_a", "wq_b", "wk", "wv", "wkv_b", "w1", "experts")
"""Layers whose inputs are kept; others read the same ones."""

SWIGLU = ("gate", "up", "gates and ups")


def fp8_tape(ops: Iterable[Op]) -> Iterator[Op]:
    """Yield a block's BF16 operators with activations cached in FP8.

    What SwiGLU computes again lives, in BF16, while an operator that reads it does.
    """
    for op in ops:
        name = op.module.rpartition(".")[2]
        again = sum(x.n_bytes for x in op.kept if _is_computed_again(x, name))
        kept = (x for x in op.kept if not _is_computed_again(x, name))
        yield op._replace(kept=tuple(_in_fp8(x, name) for x in kept)).beside(again)


def _is_computed_again(storage: Kept, layer: str) -> bool:
    what = storage.what
    return what == "silu" or (what == "input" and layer == "w2")


def _in_fp8(storage: Kept, layer: str) -> Kept:
    """Return what is kept of a layer's storage."""
    what, n_bytes = storage.what, storage.n_bytes
    if what == "input" and layer == "wo":
        return storage._replace(n_bytes=fp8_bytes(n_bytes, bits=E5M6_BITS))
    is_input = what in ("input", "received rows") and layer in LINEARS
    if is_input or what in SWIGLU:
        return storage._replace(n_bytes=fp8_bytes(n_bytes))
    return storage
