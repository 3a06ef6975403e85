"""What pipeline ranks keep of the micro-batches that are on their way.

Equal layers are priced once, and so are equal chunks. What a policy does not keep of a
part of a layer is owed by it, and back when the backward reaches that part. This is
arithmetic, and has been compared with no run of several ranks.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from labkit.config import Layout, ModelConfig
from labkit.memory.activations import (
    attention_half,
    balance_tape,
    bytes_by_module,
    copied_targets,
    embedding,
    ffn_half,
    last_tape,
)
from labkit.memory.formats import Formats
from labkit.memory.kept_attention import rotations
from labkit.memory.playback import kept_by_part
from labkit.memory.ranks import rank_tape
from labkit.memory.recompute_kept import kept_ops, under_policy
from labkit.memory.replay import debt_of, rebuilt_casts, with_debts
from labkit.memory.segments import Parts, Segment, chain, segment, sums
from labkit.memory.stages import Chunk
from labkit.memory.tape import Op, Pass


class Price(NamedTuple):
    """What a micro-batch needs of some modules."""

    segment: Segment

    by_module: Mapping[str, int] = MappingProxyType({})
    """Bytes that each keeps, as `bytes_by_module` gives them."""

    casts: int = 0
    """Bytes that autocast holds to the end of the forward, as `rebuilt_casts`."""


class ChunkPrice(NamedTuple):
    """What a micro-batch needs of a chunk."""

    segment: Segment

    parts: list[Price]
    """What comes first, each layer, what follows all layers, and balance losses."""

    casts: int = 0
    """Bytes that autocast holds to the end of the forward."""


class _Layer(NamedTuple):
    """What tells a layer from another."""

    is_dense: bool
    policy: str
    formats: Formats


class _Half(NamedTuple):
    """Attention and its norm, or the feed-forward network and its own."""

    plain: Segment
    """Without recompute."""

    debt: Parts
    """What its policy does not keep of it."""

    by_module: dict[str, int]
    casts: int


BRANCHES = {"attention": "attention", "moe": "experts"}
"""The half that a policy runs again, where it is one alone."""

Made = TypeVar("Made")


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

    known: dict[Hashable, object] = field(default_factory=dict)
    """What was worked out so far, by what made it of what."""

    def of(self, chunk: Chunk) -> ChunkPrice:
        """Return what a rank keeps of a chunk, for one micro-batch."""
        n_dense = self.cfg.n_layers - self.cfg.n_moe_layers
        layers = [
            _Layer(
                index < n_dense,
                self.policies[index],
                self.step.within(f"layers.{index}").formats,
            )
            for index in chunk.layers
        ]
        return self._once(self._chunk, tuple(layers), chunk.is_first, chunk.is_last)

    def _once(self, make: Callable[..., Made], *kind: Hashable) -> Made:
        """Return `make(*kind)`, worked out the first time."""
        key = make.__name__, *kind
        if key not in self.known:
            self.known[key] = make(*kind)
        return self.known[key]

    def _chunk(
        self, layers: Sequence[_Layer], is_first: bool, is_last: bool
    ) -> ChunkPrice:
        """Price layers, and what comes before and after them."""
        n_sparse = sum([not layer.is_dense for layer in layers])
        parts = [
            self._once(self._first, is_first, len(layers) > 0),
            *[self._once(self._layer, *layer) for layer in layers],
            self._once(self._balance, n_sparse, self.cfg.n_mtp if is_last else 0),
        ]
        if is_last:
            parts.insert(-1, self._once(self._last))
        casts = sum([part.casts for part in parts])
        return ChunkPrice(chain([part.segment for part in parts]), parts, casts)

    def _first(self, is_first: bool, has_layers: bool) -> Price:
        """Price the embedding, and turns of RoPE that the layers share."""
        ops = [embedding(self.cfg, self.step)] if is_first else []
        if has_layers:
            ops.append(rotations(self.cfg.attention, self.step))
        return Price(self._brief(self._ranked(ops)))

    def _layer(self, is_dense: bool, policy: str, formats: Formats) -> Price:
        names = "attention", "dense" if is_dense else "experts"
        halves = [
            # A policy of the other half leaves this one as it is.
            self._once(
                *(self._half, x, formats),
                policy if BRANCHES.get(policy, x) == x else "none",
            )
            for x in names
        ]
        if policy == "full":  # both come back together
            debt = sums([half.debt for half in halves])
            layer = chain([half.plain for half in halves]).owing(debt)
        else:
            layer = chain([half.plain.owing(half.debt) for half in halves])
        attention, ffn = (half.by_module for half in halves)
        kept_casts = attention.get("casts", 0) + ffn.get("casts", 0)
        by_module = {**attention, **ffn, "casts": kept_casts}
        return Price(layer, by_module, sum([half.casts for half in halves]))

    def _half(self, name: str, formats: Formats, policy: str) -> _Half:
        ops, plain = self._once(self._plain, name, formats)
        left = ops
        if policy != "none":
            left = [under_policy(policy, op, self.cfg, self.step) for op in ops]
        debt = plain.kept.minus(Parts(**kept_by_part(left)))
        casts = 0
        if self.step.is_mixed:
            casts = rebuilt_casts(debt_of(name, ops, left))
        return _Half(plain, debt, bytes_by_module(left), casts)

    def _plain(self, name: str, formats: Formats) -> tuple[list[Op], Segment]:
        cfg, step = self.cfg, replace(self.step, formats=formats)
        if name == "attention":
            ops = attention_half(cfg, step, step.weights)
        else:
            is_dense = name == "dense"
            ops = ffn_half(cfg, step, is_dense=is_dense, stream=step.weights)
        ops = self._ranked(ops)
        return ops, self._brief(ops)

    def _last(self) -> Price:
        """Price what follows all layers."""
        ops = self._ranked(last_tape(self.cfg, self.step))
        left = kept_ops(ops, self.cfg, self.step, self.policies)
        targets = copied_targets(self.step)
        tape = with_debts(ops, left, self.cfg, self.policies) + targets
        by_module = bytes_by_module([*left, *targets])
        casts = rebuilt_casts(tape) if self.step.is_mixed else 0
        return Price(self._brief(tape), by_module, casts)

    def _balance(self, n_main: int, n_mtp: int) -> Price:
        ops = self._ranked(balance_tape(self.cfg, self.step, n_main, n_mtp))
        return Price(self._brief(ops), bytes_by_module(ops))

    def _ranked(self, ops: Iterable[Op]) -> list[Op]:
        return list(rank_tape(ops, self.layout))

    def _brief(self, ops: Sequence[Op]) -> Segment:
        return segment(
            ops, has_gradients=self.has_gradients, has_buffer=self.has_buffer
        )


def kept_by_module(
    chunks: Sequence[Chunk], prices: Sequence[ChunkPrice], n_kept: Sequence[int]
) -> dict[str, int]:
    """Return the bytes of activations that a rank's chunks keep, by module.

    Args:
        chunks: of the rank.
        prices: of each.
        n_kept: micro-batches that each keeps, as from `in_flight`.
    """
    by_module = {"casts": 0}
    for chunk, price, n in zip(chunks, prices, n_kept, strict=True):
        if n == 0:
            continue
        first, *others = price.parts
        n_layers = len(chunk.layers)
        for index, layer in zip(chunk.layers, others, strict=False):
            prefix = f"layers.{index}."
            for name, x in layer.by_module.items():
                by_module[prefix + name] = n * x
            by_module["casts"] += by_module.pop(prefix + "casts", 0)
        if n_layers:  # the first of which keeps what they share
            name = f"layers.{chunk.layers.start}.attn"
            by_module[name] = by_module.get(name, 0) + n * sum(first.segment.kept)
        for part in others[n_layers:]:
            for name, x in part.by_module.items():
                by_module[name] = by_module.get(name, 0) + n * x
    if not by_module["casts"]:
        del by_module["casts"]
    return by_module


def at_once(
    prices: Sequence[ChunkPrice], n_kept: Sequence[int], gradients: int
) -> tuple[Parts, Parts]:
    """Return what several chunks keep, and what lives when one's backward is fullest.

    That is when most micro-batches are kept. Where one chunk is much larger, as the one
    with the head, as many in a mix with more of it may take more bytes.

    Args:
        prices: of a rank's chunks.
        n_kept: micro-batches that each keeps, as from `in_flight`.
        gradients: bytes of those that live throughout the backward.
    """
    pairs = [(x.segment, n) for x, n in zip(prices, n_kept, strict=True)]
    kept = reduce(Parts.plus, [chunk.kept.times(n) for chunk, n in pairs])
    candidates = []
    for chunk, n in pairs:
        if n:
            waiting = Parts(gradients=max(gradients - chunk.after, 0))
            fullest = chunk.fullest.plus(waiting)
            candidates.append(kept.minus(chunk.kept).plus(fullest))
    return kept, max(candidates, key=sum)
