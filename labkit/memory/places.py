"""The ranks of a step as rows of choices: what each block needs under each policy.

Bytes of single blocks come from `ChunkPrices`, which prices equal layers once; times
from `StepTimes`. What lives beside them on a rank is what its prediction without
recompute has more.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.memory.cost import BLOCK_POLICIES, StepTimes, planned_pass, split_of
from labkit.memory.measure import BACKWARD, FORWARD
from labkit.memory.mixtures import Choice, Chunk, Mixture, Row, mixtures, piled
from labkit.memory.persistent import states_of
from labkit.memory.pipeline import ChunkPrices
from labkit.memory.predict import predict
from labkit.memory.replay import rebuilt_casts, replay_tape
from labkit.memory.report import MemoryReport
from labkit.memory.segments import Segment
from labkit.memory.stages import Chunk as Layers
from labkit.memory.stages import in_flight, stage_layers
from labkit.memory.step_report import StepReport

MOST_MIXED = 2
"""MTP modules that may have different policies; more of them share one."""


class Step(NamedTuple):
    """A step to be predicted under many policies."""

    cfg: ModelConfig
    train: TrainConfig
    layout: Layout
    device: str
    as_predict: Mapping[str, object]

    @property
    def plain(self) -> tuple[str, ...]:
        """No recompute: a policy for each layer and MTP module."""
        return ("none",) * (self.cfg.n_layers + self.cfg.n_mtp)

    def report(self, policies: Sequence[str]) -> MemoryReport:
        """Return the prediction under these policies."""
        cfg, train, layout, device, as_predict = self
        return predict(cfg, train, layout, device, recompute=policies, **as_predict)

    def stages(self, policies: Sequence[str]) -> tuple[MemoryReport, ...]:
        """Return the prediction of each pipeline rank, or of the only one."""
        report = self.report(policies)
        return report.by_stage or (report,)

    def counted(self) -> StepReport:
        """Return what knows the pass, its micro-batches, and of a gradient buffer."""
        cfg, train, layout, device, as_predict = self
        return StepReport(
            cfg=cfg,
            train=train,
            layout=layout,
            step=planned_pass(cfg, train, layout, device, as_predict),
            states=as_predict.get("states") or states_of(train),
            zero=as_predict.get("zero", 0),
            policies=self.plain,
        )


class Place(NamedTuple):
    """A rank, whose blocks can be chosen whatever the others do."""

    blocks: tuple[int, ...]
    """Indices of its blocks, in the order in which mixtures name their policies."""

    fitting: tuple[Callable[[int, int], Iterable[Mixture]], ...]
    """Return mixtures, the cheapest first, that need no more than so many bytes at the
    end of the forward, and when the backward is fullest. The second, on the rank that
    has the head, prices it beside "selective" blocks, for which its norm runs again."""

    beside: tuple[int, int]
    """Bytes that live beside then and then."""

    def cheapest(self, n_bytes: int) -> Mixture | None:
        """Return the cheapest mixture that fits, if any does."""
        forward, backward = (n_bytes - others for others in self.beside)
        found = []
        for is_selective, fitting in enumerate(self.fitting):
            for mixture in fitting(forward, backward):
                if not is_selective or "selective" in mixture.policies:
                    found.append(mixture)
                    break
        return min(found, default=None)


def _alone(row: Row, forward: int, backward: int) -> Iterator[Mixture]:
    """Yield mixtures of the only rank, which keeps one micro-batch."""
    found = mixtures(row, limit=backward)
    return (mixture for mixture in found if mixture.other <= forward)


def _piled(found: Sequence[Mixture], forward: int, backward: int) -> Iterator[Mixture]:
    """Yield mixtures of a rank that keeps several micro-batches."""
    for mixture in found:
        if mixture.kept <= forward and mixture.kept + mixture.other <= backward:
            yield mixture


def places(step: Step, times: StepTimes) -> list[Place]:
    """Return the ranks of a step; of two with the same chunks, the first."""
    cfg, layout, choices = step.cfg, step.layout, _Choices(step, times, step.counted())
    reports = step.stages(step.plain)
    if layout.pp == 1:
        whole = Layers(layers=range(cfg.n_layers), is_first=True, is_last=True)
        return [choices.place([whole], [1], reports[0])]
    split = split_of(layout, step.as_predict)
    schedule = split.get("schedule", "1f1b")
    stages, found = stage_layers(cfg, layout, **split), []
    for rank in range(layout.pp // stages[0].n_copies):
        n = choices.counted.n_micro_batches
        n_kept = in_flight(layout, rank, n, schedule=schedule)
        found.append(choices.place(stages[rank].chunks, n_kept, reports[rank]))
    return found


def _choice(
    policies: tuple[str, ...], cost: float, segment: Segment, casts: int = 0
) -> Choice:
    return Choice(
        policies,
        cost,
        kept=sum(segment.before),
        held=sum(segment.kept) + casts,
        fullest=sum(segment.fullest),
        after=segment.after,
    )


def _waiting(row: Row, gradients: int) -> int:
    """Return the bytes of other gradients, and of those that `kept` counts as own."""
    plain = [choices[0] for choices in row]
    own = sum(choice.after for choice in plain)
    return max(gradients - own, 0) + sum(x.kept - x.held for x in plain)


class _Choices:
    """Makes the choices of blocks, those of equal blocks once."""

    def __init__(self, step: Step, times: StepTimes, counted: StepReport) -> None:
        self.cfg, self.layout = step.cfg, step.layout
        self.times, self.counted = times, counted
        self.names = [x for x in BLOCK_POLICIES if x != "moe" or step.cfg.moe]
        self.plain = step.plain
        self.prices: dict[tuple[str, ...], ChunkPrices] = {}
        self.layers: dict[bool, list[Choice]] = {}

    def place(
        self, chunks: Sequence[Layers], n_kept: Sequence[int], plain: MemoryReport
    ) -> Place:
        """Return a rank.

        Args:
            chunks: that it holds.
            n_kept: micro-batches that each keeps.
            plain: its prediction without recompute.
        """
        cfg, counted = self.cfg, self.counted
        has_head = any(chunk.is_last for chunk in chunks)
        is_waiting = counted.has_buffer or counted.n_micro_batches > 1
        gradients = plain.by_part.get("gradients", 0) if is_waiting else 0
        variants = []
        for is_selective in (False, True) if has_head else (False,):
            rows = [self._row(chunk, is_selective) for chunk in chunks]
            variants.append(
                tuple(
                    Chunk(row, n, _waiting(row, gradients))
                    for row, n in zip(rows, n_kept, strict=True)
                )
            )
        blocks = [index for chunk in chunks for index in chunk.layers]
        blocks += range(cfg.n_layers, cfg.n_layers + cfg.n_mtp) if has_head else ()
        lives = {instant.name: instant.total for instant in plain.timeline}
        if self.layout.pp == 1:
            rows = [chunks[0].row for chunks in variants]
            fitting = [partial(_alone, row) for row in rows]
            held = sum(choices[0].held for choices in rows[0])
            fullest = mixtures([choices[:1] for choices in rows[0]])[0].other
        else:
            fitting = [partial(_piled, piled(chunks)) for chunks in variants]
            (mixture,) = piled(chunk.plain for chunk in variants[0])
            held, fullest = mixture.kept, mixture.kept + mixture.other
        return Place(
            blocks=tuple(blocks),
            fitting=tuple(fitting),
            beside=(lives[FORWARD] - held, lives[BACKWARD] - fullest),
        )

    def _row(self, chunk: Layers, is_selective: bool) -> list[list[Choice]]:
        """Return the choices of a chunk's parts, "none" first."""
        first, *_, balance = self._parts(chunk, self.plain)
        row = [[_choice((), 0.0, first)]]
        row += [self._layer(chunk, place) for place in range(len(chunk.layers))]
        if chunk.is_last:
            row.append(self._last(chunk, is_selective))
        return [*row, [_choice((), 0.0, balance)]]

    def _layer(self, chunk: Layers, place: int) -> list[Choice]:
        cfg, index = self.cfg, chunk.layers[place]
        is_dense = cfg.moe is None or index < cfg.n_dense_layers
        if is_dense not in self.layers:
            single = replace(cfg, n_layers=1, n_dense_layers=int(is_dense), mtp=None)
            self.layers[is_dense] = [
                _choice(
                    (name,),
                    self.times.blocks[index].again[name],
                    self._parts(chunk, (name,) * len(self.plain))[1 + place],
                    casts=self._casts(single, [name]),
                )
                for name in self.names
                if name != "moe" or not is_dense
            ]
        return self.layers[is_dense]

    def _last(self, chunk: Layers, is_selective: bool) -> list[Choice]:
        """Return the choices of all MTP modules together, with norm and head."""
        cfg, choices = self.cfg, []
        main = ("selective" if is_selective else "none",) * cfg.n_layers
        again = sum(stage.norm for stage in self.times.stages) * is_selective
        n_free = cfg.n_mtp if cfg.n_mtp <= MOST_MIXED else 1
        for free in product(self.names, repeat=n_free):
            names = free if n_free == cfg.n_mtp else free * cfg.n_mtp
            modules = zip(self.times.blocks[cfg.n_layers :], names, strict=True)
            cost = again + sum(block.again[name] for block, name in modules)
            single = replace(cfg, n_layers=1, n_dense_layers=1)
            casts = self._casts(single, ["none", *names])
            segment = self._parts(chunk, main + names)[-2]
            choices.append(_choice(names, cost, segment, casts=casts))
        return choices

    def _parts(self, chunk: Layers, policies: tuple[str, ...]) -> list[Segment]:
        """Return what comes first, layers, what follows all, and balance losses."""
        counted = self.counted
        if policies not in self.prices:
            self.prices[policies] = ChunkPrices(
                cfg=self.cfg,
                step=counted.step,
                layout=self.layout,
                policies=policies,
                has_gradients=counted.n_micro_batches > 1,
                has_buffer=counted.has_buffer,
            )
        return [part.segment for part in self.prices[policies].of(chunk).parts]

    def _casts(self, cfg: ModelConfig, policies: Sequence[str]) -> int:
        """Return the bytes of weights' copies that autocast holds in the forward.

        Mixtures of pipeline ranks are not told apart by them, though they need them.
        """
        step = self.counted.step
        if not step.is_mixed or self.layout.pp > 1:
            return 0
        return rebuilt_casts(replay_tape(cfg, step, policies, layout=self.layout))
