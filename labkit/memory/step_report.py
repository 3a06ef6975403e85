"""The report of a rank's step, made of what lasts and of what its tape needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.memory.activations import Load, bytes_by_module, copied_targets, model_tape
from labkit.memory.gathered import Gathered, gathered_weights
from labkit.memory.measure import AFTER_BACKWARD, BACKWARD, FORWARD, OPTIMIZER
from labkit.memory.persistent import States, persistent_by_stage
from labkit.memory.pipeline import (
    ChunkPrice,
    ChunkPrices,
    at_once,
    kept_by_module,
)
from labkit.memory.playback import fullest_instant, kept_by_part
from labkit.memory.ranks import rank_tape
from labkit.memory.recompute_kept import kept_ops
from labkit.memory.replay import rebuilt_casts, with_debts
from labkit.memory.report import Instant, MemoryReport
from labkit.memory.stages import Chunk, Stage, in_flight, stage_layers
from labkit.memory.tape import EXACT_BYTES, INDEX_BYTES, Pass


class _Held(NamedTuple):
    """What a stage holds whatever the batch."""

    stage: Stage
    lasting: dict[str, int]
    gathered: Gathered

    has_experts: bool
    is_idle: bool
    """Whether it has no part of the model, and so no use for a batch."""

    @property
    def gradients(self) -> int:
        """Bytes of gradients, which a stage without weights does not have."""
        return self.lasting.get("gradients", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Makes the report of the ranks of a step."""

    cfg: ModelConfig
    train: TrainConfig
    layout: Layout
    step: Pass
    states: States
    zero: int
    policies: tuple[str, ...]
    """Of each block, as from `block_policies`."""

    @property
    def n_micro_batches(self) -> int:
        """Of one step on one rank."""
        per_round = self.train.micro_batch * self.layout.dp
        return -(-self.train.global_batch // per_round)

    @property
    def has_buffer(self) -> bool:
        """Whether gradients lie in a buffer, to which each is added once made."""
        states = self.states
        return states.has_buffer or states.gradients != states.weights or self.zero >= 2

    def alone(
        self, load: Load | None, layers_per_stage: tuple[int, ...] | None
    ) -> MemoryReport:
        """Return the report of a rank that has all layers."""
        cfg, step, layout, policies = self.cfg, self.step, self.layout, self.policies
        plain = list(rank_tape(model_tape(cfg, step, load=load), layout))
        left, targets = kept_ops(plain, cfg, step, policies), copied_targets(step)
        tape = with_debts(plain, left, cfg, policies) + targets
        cut = cfg, layout, "1f1b", layers_per_stage
        (held,) = _by_stage(*cut, self.states, self.zero)
        played = fullest_instant(
            tape,
            has_gradients=self.n_micro_batches > 1,
            has_buffer=self.has_buffer,
        )
        if self.has_buffer:
            played["gradients"] = held.gradients
        logits = unkept_logits(cfg, step, layout)
        timeline = self._timeline(
            held,
            kept=kept_by_part(tape),
            unkept={"logits": logits, "temporaries": rebuilt_casts(tape)},
            played=played,
        )
        by_module = bytes_by_module([*left, *targets])
        return MemoryReport(timeline=timeline, by_module=by_module)

    def pipeline(
        self, schedule: str, layers_per_stage: tuple[int, ...] | None
    ) -> MemoryReport:
        """Return the report of the fullest stage, with those of all."""
        cut = self.cfg, self.layout, schedule, layers_per_stage
        prices = ChunkPrices(
            cfg=self.cfg,
            step=self.step,
            layout=self.layout,
            policies=self.policies,
            has_gradients=self.n_micro_batches > 1,
            has_buffer=self.has_buffer,
        )
        reports = tuple(
            self._stage(held, prices, self._n_kept(rank, schedule))
            for rank, held in enumerate(_by_stage(*cut, self.states, self.zero))
        )
        fullest = max(reports, key=lambda report: report.peak)
        return replace(fullest, by_stage=reports)

    def _n_kept(self, rank: int, schedule: str) -> tuple[int, ...]:
        n = self.n_micro_batches
        return in_flight(self.layout, rank, n, schedule=schedule)

    def _stage(
        self,
        held: _Held,
        prices: ChunkPrices,
        n_kept: Sequence[int],
    ) -> MemoryReport:
        """Return the report of a rank, given micro-batches that each chunk keeps."""
        is_waiting = self.has_buffer or self.n_micro_batches > 1
        gradients = held.gradients if is_waiting else 0
        chunks = held.stage.chunks
        priced = [prices.of(chunk) for chunk in chunks]
        kept, played = at_once(priced, n_kept, gradients)
        timeline = self._timeline(
            held,
            kept=kept._asdict(),
            unkept=self._most_unkept(chunks, priced),
            played=played._asdict(),
        )
        by_module = kept_by_module(chunks, priced, n_kept)
        return MemoryReport(timeline=timeline, by_module=by_module)

    def _most_unkept(
        self, chunks: Sequence[Chunk], priced: Sequence[ChunkPrice]
    ) -> dict[str, int]:
        """Return what the chunk with most of it has beside what it keeps."""
        whole = self.cfg, self.step, self.layout
        pairs = [
            (unkept_logits(*whole) if chunk.is_last else 0, price.casts)
            for chunk, price in zip(chunks, priced, strict=True)
        ]
        logits, casts = max(pairs, key=sum)
        return {"logits": logits, "temporaries": casts}

    def _timeline(
        self,
        held: _Held,
        *,
        kept: Mapping[str, int],
        unkept: Mapping[str, int],
        played: Mapping[str, int],
    ) -> tuple[Instant, ...]:
        """Return the instants of a step.

        Args:
            held: what lasts, gradients among it, and what ranks gather.
            kept: what autograd keeps at the end of the forward.
            unkept: what lives beside it just before.
            played: gradients and what else lives at the fullest of the backward.
        """
        lasting, gathered = held.lasting, held.gathered
        others = {part: n for part, n in lasting.items() if part != "gradients"}
        n_batch = 0 if held.is_idle else batch_bytes(self.train, self.layout)
        batch = {"temporaries": n_batch}
        outside = {"communication": gathered.outside}
        rows = self._sent_rows() if held.has_experts else 0
        sent = {"communication": sum(gathered) + rows}
        is_summed = self.layout.dp * self.layout.cp > 1 and not self.has_buffer
        message = {"communication": held.gradients * is_summed}
        start = lasting if self.has_buffer else others
        before = lasting if self.n_micro_batches > 1 else start
        end_of_forward, optimizer = _sums(before, batch, kept), _sums(lasting, batch)
        instants = {
            "start": dict(start),
            FORWARD: _sums(end_of_forward, unkept, sent),
            "end of forward": _sums(end_of_forward, outside),
            BACKWARD: _sums(others, batch, played, sent),
            AFTER_BACKWARD: _sums(optimizer, message),
            OPTIMIZER: optimizer,
        }
        return tuple([Instant(name=x, by_part=y) for x, y in instants.items()])

    def _sent_rows(self) -> int:
        """Return the bytes of one layer's rows on their way to other ranks."""
        if self.layout.ep == 1 or self.step.n_rows is None:
            return 0
        n_values = self.step.n_rows / self.layout.tp * self.cfg.dim
        return round(n_values * self.step.compute.itemsize)


@lru_cache(maxsize=64)
def _by_stage(  # noqa: PLR0913, each decides alone
    cfg: ModelConfig,
    layout: Layout,
    schedule: str,
    layers_per_stage: tuple[int, ...] | None,
    states: States,
    zero: int,
) -> tuple[_Held, ...]:
    """Return what each stage holds.

    Remembered, because a slider that changes the batch does not change it.
    """
    stages = stage_layers(
        cfg, layout, schedule=schedule, layers_per_stage=layers_per_stage
    )
    lasting = persistent_by_stage(cfg, layout, stages, states=states, zero=zero)
    found = []
    for stage, parts in zip(stages, lasting, strict=True):
        gathered = Gathered()
        if zero == 3:
            gathered = gathered_weights(cfg, layout, stage, states)
        contents = stage.contents(cfg)
        found.append(
            _Held(
                stage,
                parts,
                gathered,
                has_experts=contents.n_routers > 0,
                is_idle=not any(contents),
            )
        )
    return tuple(found)


def _sums(first: Mapping[str, int], *others: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each part that has any, when all of these live."""
    by_part = dict(first)
    for parts in others:
        for part, n_bytes in parts.items():
            if n_bytes:
                by_part[part] = by_part.get(part, 0) + n_bytes
    return by_part


def batch_bytes(train: TrainConfig, layout: Layout) -> int:
    """Return the bytes of a step's tokens, whose targets are a view one further."""
    n_sequences = -(-train.global_batch // layout.dp)
    return n_sequences * (train.seq_len + 1) * INDEX_BYTES


def unkept_logits(cfg: ModelConfig, step: Pass, layout: Layout) -> int:
    """Return the bytes of a rank's logits beside log-probabilities made of them.

    Those of the last loss, which is computed when most is kept already: the head's
    result and, unless that is FP32, a copy which is.
    """
    n_logits = step.batch * (step.seq_len - cfg.n_mtp) * cfg.vocab_size
    copy = EXACT_BYTES if step.compute != torch.float32 else 0
    return -(-n_logits * (step.compute.itemsize + copy) // layout.tp)
