"""What pipeline ranks keep of the micro-batches that are on their way.

Equal layers are priced once, and so are equal chunks. This is arithmetic, and has been
compared with no run of several ranks.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby

from labkit.config import Layout, ModelConfig
from labkit.memory.activations import balance_tape, embedding, last_tape
from labkit.memory.kept_attention import rotations
from labkit.memory.ranks import rank_tape
from labkit.memory.replay import replay_layer, replay_tape
from labkit.memory.segments import Segment, segment
from labkit.memory.stages import Chunk
from labkit.memory.tape import Op, Pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPrices:
    """Prices chunks of one model, each kind of layer once."""

    cfg: ModelConfig
    step: Pass
    layout: Layout

    policies: Sequence[str]
    """Of each block, as from `block_policies`."""

    has_gradients: bool
    """Whether earlier micro-batches left gradients to add to."""

    has_buffer: bool
    """Whether gradients are added to a buffer as soon as each is made."""

    layers: dict[tuple[bool, str], Segment] = field(default_factory=dict)
    """Those priced so far."""

    chunks: dict[Hashable, Segment] = field(default_factory=dict)

    def of(self, chunk: Chunk) -> Segment:
        """Return what a rank keeps of a chunk, for one micro-batch."""
        cfg = self.cfg
        n_dense = cfg.n_layers if cfg.moe is None else cfg.n_dense_layers
        kinds = tuple((index < n_dense, self.policies[index]) for index in chunk.layers)
        key = kinds, chunk.is_first, chunk.is_last
        if key not in self.chunks:
            self.chunks[key] = self._chunk(chunk, kinds)
        return self.chunks[key]

    def _chunk(self, chunk: Chunk, kinds: Sequence[tuple[bool, str]]) -> Segment:
        cfg, step = self.cfg, self.step
        parts = [self._ranked([rotations(cfg.attention, step)])]
        if chunk.is_first:
            parts.insert(0, self._ranked([embedding(cfg, step)]))
        for (is_dense, policy), group in groupby(kinds):
            layer = self._layer(policy, is_dense=is_dense)
            parts.append(layer.times(len(list(group))))
        if chunk.is_last:
            parts.append(self._brief(self._last()))
        n_mtp = cfg.n_mtp if chunk.is_last else 0
        n_sparse = sum(not is_dense for is_dense, _ in kinds)
        balance = balance_tape(cfg, step, n_sparse, n_mtp)
        if balance:
            parts.append(self._ranked(balance))
        return reduce(Segment.then, parts)

    def _layer(self, policy: str, *, is_dense: bool) -> Segment:
        kind = is_dense, policy
        if kind not in self.layers:
            self.layers[kind] = self._brief(
                replay_layer(
                    self.cfg, self.step, policy, is_dense=is_dense, layout=self.layout
                )
            )
        return self.layers[kind]

    def _last(self) -> list[Op]:
        """Return what follows the layers, as a model of a single one has it."""
        if {*self.policies} == {"none"}:
            return list(rank_tape(last_tape(self.cfg, self.step), self.layout))
        single = replace(self.cfg, n_layers=1, n_dense_layers=0)
        policies = self.policies[self.cfg.n_layers - 1 :]
        tape = replay_tape(single, self.step, policies, layout=self.layout)
        start = next(i for i, op in enumerate(tape) if op.module == "norm")
        balance = balance_tape(single, self.step, single.n_moe_layers, single.n_mtp)
        return tape[start : len(tape) - len(balance)]

    def _ranked(self, ops: list[Op]) -> Segment:
        return self._brief(list(rank_tape(ops, self.layout)))

    def _brief(self, ops: list[Op]) -> Segment:
        if self.has_buffer:
            ops = [adding_to_buffer(op) for op in ops]
        return segment(ops, has_gradients=self.has_gradients and not self.has_buffer)


def adding_to_buffer(op: Op) -> Op:
    """Return the operator where its gradient goes as soon as it is added."""
    return op.beside(op.gradient_bytes)._replace(gradient_bytes=0)


def at_once(
    segments: Sequence[Segment], n_kept: Sequence[int], gradients: Counter[str]
) -> tuple[Counter[str], Counter[str]]:
    """Return what several chunks keep, and what lives when one's backward is fullest.

    Args:
        segments: of a rank's chunks.
        n_kept: micro-batches that each keeps, as from `in_flight`.
        gradients: that live throughout the backward.
    """
    kept: Counter[str] = Counter()
    for chunk, n in zip(segments, n_kept, strict=True):
        for part, n_bytes in chunk.kept.items():
            kept[part] += n * n_bytes
    candidates = [
        kept - chunk.kept + chunk.fullest + (gradients - chunk.after)
        for chunk, n in zip(segments, n_kept, strict=True)
        if n
    ]
    return kept, max(candidates, key=Counter.total)
