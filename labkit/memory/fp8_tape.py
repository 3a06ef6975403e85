"""What a BF16 tape keeps when activations are cached in FP8 (DeepSeek-V3, 3.3.3).

Inputs of linear layers are kept in E4M3, a scale per token and 128 channels; that of
the attention's output projection in E5M6, because it is read by attention's backward
too; SwiGLU keeps what it reads in E4M3, and computes its product again. Norms, the
router, the attention core, embedding and head stay as they are. Arithmetic on a
published recipe: nothing here has been compared with a run.
"""

from collections.abc import Iterable, Iterator

from labkit.memory.tape import EXACT_BYTES, Kept, Op

TILE = 128
"""Channels of a token that share a scale."""

E4M3_BITS, E5M6_BITS = 8, 12

BF16_BYTES = 2

LINEARS = ("wq", "wq_a", "wq_b", "wk", "wv", "wkv_b", "w1", "experts")
"""Layers whose inputs are kept; others read the same ones."""

SWIGLU = ("gate", "up", "gates and ups")


def fp8_bytes(n_bytes: int, *, bits: int = E4M3_BITS) -> int:
    """Return what a BF16 tensor takes in tiles of so many bits, scales in FP32.

    >>> fp8_bytes(2 * 128), fp8_bytes(2 * 128, bits=E5M6_BITS)
    (132, 196)
    """
    n_values = n_bytes // BF16_BYTES
    return -(-n_values * bits // 8) + -(-n_values // TILE) * EXACT_BYTES


def fp8_tape(ops: Iterable[Op]) -> Iterator[Op]:
    """Yield a BF16 tape's operators with activations cached in FP8."""
    for op in ops:
        name = op.module.rpartition(".")[2]
        kept = (_in_fp8(storage, name) for storage in op.kept)
        yield op._replace(kept=tuple(storage for storage in kept if storage))


def _in_fp8(storage: Kept, layer: str) -> Kept | None:
    """Return what is kept of a layer's storage, None if it is computed again."""
    what, n_bytes = storage.what, storage.n_bytes
    if what == "silu" or (what == "input" and layer == "w2"):
        return None
    if what == "input" and layer == "wo":
        return storage._replace(n_bytes=fp8_bytes(n_bytes, bits=E5M6_BITS))
    is_input = what in ("input", "received rows") and layer in LINEARS
    if is_input or what in SWIGLU:
        return storage._replace(n_bytes=fp8_bytes(n_bytes))
    return storage
