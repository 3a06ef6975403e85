"""A tape in brief, so that equal layers are priced once: for tapes of many layers.

Played back, a run of layers starts with all of its storages and ends with all of its
gradients. Between two equal layers the sum changes by the same amount each time, so
the fullest instant lies in the first or in the last of them.
"""

from collections import Counter
from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

from labkit.config import Layout, ModelConfig
from labkit.memory.activations import (
    balance_tape,
    block_tape,
    embedding,
    last_tape,
)
from labkit.memory.kept_attention import rotations
from labkit.memory.playback import fullest_instant, gradient_bytes, kept_by_part
from labkit.memory.ranks import rank_tape
from labkit.memory.stages import Chunk
from labkit.memory.tape import Op, Pass


class Segment(NamedTuple):
    """What a run of operators keeps, and how many bytes live while it is played."""

    kept: Counter[str]
    """By part, at the end of its forward."""

    before: Counter[str]
    """By part, before its backward begins: also what waits for it already."""

    fullest: Counter[str]
    """By part, when most live at once."""

    after: Counter[str]
    """By part, when its backward has ended: gradients."""

    def then(self, later: "Segment") -> "Segment":
        """Return this and what runs after it, which the backward plays before it."""
        return Segment(
            self.kept + later.kept,
            self.before + later.before,
            max(
                later.fullest + self.before,
                self.fullest + later.after,
                key=Counter.total,
            ),
            self.after + later.after,
        )

    def times(self, n: int) -> "Segment":
        """Return so many of these in a row."""
        if n == 0:
            return NOTHING
        first, last = _scaled(self.after, n - 1), _scaled(self.before, n - 1)
        return Segment(
            _scaled(self.kept, n),
            _scaled(self.before, n),
            self.fullest + max(first, last, key=Counter.total),
            _scaled(self.after, n),
        )


NOTHING = Segment(Counter(), Counter(), Counter(), Counter())


def _scaled(parts: Counter[str], n: int) -> Counter[str]:
    return Counter({part: n * n_bytes for part, n_bytes in parts.items()})


def segment(ops: Iterable[Op], *, has_gradients: bool = False) -> Segment:
    """Return a tape in brief.

    Args:
        ops: of the forward pass, in its order.
        has_gradients: as for `fullest_instant`.
    """
    ops = list(ops)
    kept, gradients = Counter(kept_by_part(ops)), gradient_bytes(ops)
    waiting = sum(op.early_bytes for op in ops)
    held = gradients if has_gradients else 0
    return Segment(
        kept,
        kept + Counter(temporaries=waiting, gradients=held),
        Counter(fullest_instant(ops, has_gradients=has_gradients)),
        Counter(gradients=gradients),
    )


def chunk_segment(
    cfg: ModelConfig,
    step: Pass,
    chunk: Chunk,
    *,
    layout: Layout | None = None,
    has_gradients: bool = False,
) -> Segment:
    """Return what one rank keeps of consecutive layers, for one micro-batch.

    Args:
        cfg: the model.
        step: the pass, over all tensor-parallel ranks.
        chunk: the layers; the first includes the embedding, the last MTP and loss.
        layout: degrees of parallelism; None is one rank.
        has_gradients: as for `fullest_instant`.
    """
    layout = layout or Layout()

    def brief(ops: Iterable[Op]) -> Segment:
        return segment(rank_tape(ops, layout), has_gradients=has_gradients)

    def layers(*, is_dense: bool) -> Segment:
        return brief(block_tape(cfg, step, is_dense=is_dense, stream=step.weights))

    n_first_dense = cfg.n_layers if cfg.moe is None else cfg.n_dense_layers
    n_dense = max(min(chunk.layers.stop, n_first_dense) - chunk.layers.start, 0)
    n_sparse = len(chunk.layers) - n_dense
    n_mtp = cfg.n_mtp if chunk.is_last else 0
    parts = [brief([rotations(cfg.attention, step)])]
    if chunk.is_first:
        first = _first_embedding(cfg, step, n_mtp=n_mtp, has_gradients=has_gradients)
        parts.insert(0, brief([first]))
    if n_dense:
        parts.append(layers(is_dense=True).times(n_dense))
    if n_sparse:
        parts.append(layers(is_dense=False).times(n_sparse))
    if chunk.is_last:
        parts.append(brief(last_tape(cfg, step)))
    parts.append(brief(balance_tape(cfg, step, n_sparse, n_mtp)))
    return reduce(Segment.then, parts)


def _first_embedding(
    cfg: ModelConfig, step: Pass, *, n_mtp: int, has_gradients: bool
) -> Op:
    """Return the look-up, whose gradient is the first, or is added to MTP's."""
    op = embedding(cfg, step)
    if not n_mtp:
        return op
    # Another's gradient is counted already, if not as one to add to: own, and sum.
    n_others = 3 if has_gradients else 2
    return op.beside(n_others * op.gradient_bytes)._replace(gradient_bytes=0)
