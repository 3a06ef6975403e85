"""What a BF16 tape keeps where layers compute in FP8.

A layer in FP8 keeps what it reads in the format that `Pass.formats` names, and layers
that read one tensor share it: once for each format among them. SwiGLU whose inputs are
cached in FP8 computes its product again. Norms, router and attention core stay as they
are; a fused kernel on a GPU keeps attention's result in BF16 beside.

On a CPU it equals what converted models of `labkit.precision` are measured to keep.
"""

from collections.abc import Iterable, Iterator

from labkit.config import ModelConfig
from labkit.memory.formats import READERS, Formats
from labkit.memory.tape import BF16_BYTES, Kept, Op, Pass

SHARED = frozenset(f"{half}.{name}" for half in READERS for name in READERS[half])
"""Layers that read a norm of their block, as the router does."""

ROUTER = "ffn.gate"


def fp8_tape(ops: Iterable[Op], cfg: ModelConfig, step: Pass) -> Iterator[Op]:
    """Yield the operators of one half of a block, some of its layers in FP8.

    What SwiGLU computes again lives, in BF16, while an operator that reads it does.

    Args:
        ops: in BF16, names relative to the block, as are the pass's formats.
        cfg: the model.
        step: the pass.
    """
    formats, shared = step.formats, _SharedInput(cfg, step)
    for op in ops:
        again = [x for x in op.kept if _is_computed_again(x, op.module, formats)]
        kept = [
            _narrowed(x, op.module, cfg, step)
            for x in op.kept
            if x not in again and not shared.has(x, op.module)
        ]
        yield op._replace(kept=(*shared.of(op), *kept)).beside(
            sum(x.n_bytes for x in again)
        )


class _SharedInput:
    """The result of a norm, which each format among its readers keeps once."""

    def __init__(self, cfg: ModelConfig, step: Pass) -> None:
        self.step = step
        self.width = cfg.dim
        self.seen: set[str] = set()

    def has(self, storage: Kept, module: str) -> bool:
        return storage.what == "input" and (module in SHARED or module == ROUTER)

    def of(self, op: Op) -> Iterator[Kept]:
        """Yield what an operator is the first to keep of it."""
        is_sent = op.module == "ffn.experts" and self.step.ep > 1
        if is_sent or not (op.module in SHARED or op.module == ROUTER):
            return
        kept = self.step.formats.of(op.module) or "bf16"
        if kept not in self.seen:
            self.seen.add(kept)
            n_tokens = self.step.n_tokens
            yield Kept("input", self.step.formats.n_bytes(kept, n_tokens, self.width))


def _is_computed_again(storage: Kept, module: str, formats: Formats) -> bool:
    owner = module.removesuffix(".w2")
    if formats.of(f"{owner}.swiglu") is None:
        return False
    return storage.what == ("silu" if owner == module else "input")


def _narrowed(storage: Kept, module: str, cfg: ModelConfig, step: Pass) -> Kept:
    """Return what is kept of a storage that its layer alone reads."""
    formats, n_rows = step.formats, step.n_tokens
    kept = formats.of(module)
    if storage.what in ("gate", "up", "gates and ups"):
        kept = formats.of(f"{module}.swiglu")
    elif storage.what not in ("input", "received rows"):
        kept = None
    if kept is None:
        return storage
    if storage.what == "gates and ups":
        n_rows = storage.n_bytes // (BF16_BYTES * 2 * cfg.moe.moe_inter_dim)
    elif storage.what == "received rows":
        n_rows, kept = storage.n_bytes // (BF16_BYTES * cfg.dim), "e4m3"
    width = storage.n_bytes // (BF16_BYTES * n_rows)
    return storage._replace(n_bytes=formats.n_bytes(kept, n_rows, width))
