"""What a training step will need, by arithmetic: bytes by part, instant by instant.

On a CPU, one rank alone is compared with steps of a real Trainer, as `measure` counts
them. What is said of GPUs and of several ranks has been compared with no run. Not
counted are what kernels use inside themselves, and what allocators add by rounding and
fragments.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.hardware import ACCELERATORS
from labkit.memory.activations import Load, bytes_by_module
from labkit.memory.measure import AFTER_BACKWARD, BACKWARD, FORWARD, OPTIMIZER
from labkit.memory.persistent import (
    STATES,
    States,
    persistent,
    persistent_by_stage,
)
from labkit.memory.pipeline import ChunkPrices, adding_to_buffer, at_once
from labkit.memory.playback import fullest_instant, kept_by_part
from labkit.memory.ranks import rank_tape, rows_to_plan
from labkit.memory.recompute import block_policies
from labkit.memory.recompute_kept import kept_tape
from labkit.memory.replay import rebuilt_casts, replay_tape
from labkit.memory.report import Instant, MemoryReport
from labkit.memory.stages import in_flight, stage_layers
from labkit.memory.tape import EXACT_BYTES, INDEX_BYTES, Kept, Op, Pass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What `TrainConfig.precision` names."""


def predict(  # noqa: PLR0913, each decides alone
    cfg: ModelConfig,
    train: TrainConfig,
    layout: Layout | None = None,
    device: str = "cpu",
    *,
    recompute: str | Sequence[str] = "none",
    zero: int = 0,
    states: States = STATES["trainer"],
    schedule: str = "1f1b",
    layers_per_stage: Sequence[int] | None = None,
    routing: Literal["paper", "physical"] = "physical",
    imbalance: float = 1.0,
    load: Load | None = None,
    cached: Literal["compute", "fp8"] = "compute",
) -> MemoryReport:
    """Return what a rank holds over a step of training that is not its first.

    Instants have the names that `measure` gives them. With several micro-batches they
    are those of the last one, which finds the gradients of the others. Clipping and
    fused AdamW work in place, and so need no bytes of their own. With pipeline stages
    the report is that of the stage with the highest peak, without bytes by module.

    Assumed of several ranks: gradients in another dtype than the weights, or shared
    out by ZeRO, lie in one buffer, to which each is added once it is made; others are
    copied into one message when they are summed, as `Trainer` does. Rows on their way
    to experts of other ranks lie in one buffer. Weights that ZeRO shares out are
    not counted while they are gathered.

    Args:
        cfg: the model.
        train: batch, sequence and precision; BF16 weights compute in BF16.
        layout: degrees of parallelism; None is one rank alone.
        device: whose kernels run: "cpu", "gpu", or the name of an accelerator of
            `labkit.hardware`, which means those of a GPU.
        recompute: the policy, as for `apply_recompute`.
        zero: as for `persistent`.
        states: dtypes of what lasts.
        schedule: of the pipeline, as for `stage_layers`.
        layers_per_stage: as for `stage_layers`.
        routing: as for `routed_rows`.
        imbalance: as for `routed_rows`.
        load: tokens of each expert in a micro-batch, a row per router, as
            `LossParts.load.tolist()` gives it; None takes even routing. For one
            rank alone.
        cached: how linear layers in blocks keep what they read: as they compute, or
            "fp8" as DeepSeek-V3 does, which `fp8_tape` describes. That takes BF16
            products, and is arithmetic on any device: no kernel here does it yet.

    >>> from labkit.config import PRESETS
    >>> report = predict(PRESETS["tiny"], TrainConfig(micro_batch=4))
    >>> report.peak_instant.name, f"{report.peak / 2**20:.0f} MiB"
    ('backward', '82 MiB')

    Raises:
        ValueError: the layout, the schedule or the policy does not fit the model, no
            device has this name, FP8 is to be kept of FP32, or a load is given for
            several ranks.
    """
    layout = layout or Layout()
    if load is not None and layout.n_ranks > 1:
        raise ValueError(
            "load is that of one rank alone; got a layout of "
            f"{layout.n_ranks} ranks. Leave load out, and give imbalance instead."
        )
    step = rank_pass(cfg, train, layout, device, states=states)
    if cached != "compute":
        step = replace(step, cached=cached)
    if layout.n_ranks > 1 or routing != "physical" or imbalance != 1:
        step = with_rows(cfg, step, layout, routing=routing, imbalance=imbalance)
    ranks = _Ranks(
        cfg=cfg, train=train, layout=layout, step=step, states=states, zero=zero
    )
    if layout.pp == 1:
        return ranks.alone(recompute, load)
    return ranks.pipeline(recompute, schedule, layers_per_stage)


def rank_pass(
    cfg: ModelConfig,
    train: TrainConfig,
    layout: Layout,
    device: str,
    *,
    states: States,
) -> Pass:
    """Return a rank's pass over a micro-batch, of which context ranks take a part each.

    Raises:
        ValueError: `cp` does not divide the sequence, or no device has this name.
    """
    if train.seq_len % layout.cp:
        raise ValueError(
            "cp must divide seq_len, because each rank takes an equal part; got "
            f"cp={layout.cp} and {train.seq_len}. "
            f"Set cp={math.gcd(layout.cp, train.seq_len)}."
        )
    is_exact = states.weights == "float32"
    return Pass(
        batch=train.micro_batch,
        seq_len=train.seq_len // layout.cp,
        weights=torch.float32 if is_exact else torch.bfloat16,
        compute=DTYPES[train.precision] if is_exact else torch.bfloat16,
        device=kernels_of(device),
        ep=layout.ep,
    )


def kernels_of(device: str) -> Literal["cpu", "gpu"]:
    """Return whose kernels run on a device.

    >>> kernels_of("cpu"), kernels_of("H800")
    ('cpu', 'gpu')

    Raises:
        ValueError: it is neither of these, nor an accelerator's name.
    """
    if device == "cpu":
        return "cpu"
    if device == "gpu" or device.lower() in ACCELERATORS:
        return "gpu"
    raise ValueError(
        f"device must be 'cpu', 'gpu' or one of {', '.join(ACCELERATORS)}; got "
        f"{device!r}. Set device='gpu', or add a row to data/hardware.csv."
    )


def with_rows(
    cfg: ModelConfig,
    step: Pass,
    layout: Layout,
    *,
    routing: Literal["paper", "physical"],
    imbalance: float,
) -> Pass:
    """Return the pass with the rows that its experts compute; see `routed_rows`."""
    if cfg.moe is None:
        return step
    rows = rows_to_plan(
        cfg.moe, step.n_tokens, layout, routing=routing, imbalance=imbalance
    )
    return replace(step, n_rows=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ranks:
    """The ranks of a step, of which a report is made."""

    cfg: ModelConfig
    train: TrainConfig
    layout: Layout
    step: Pass
    states: States
    zero: int

    @property
    def n_micro_batches(self) -> int:
        """Of one step on one rank."""
        per_round = self.train.micro_batch * self.layout.dp
        return -(-self.train.global_batch // per_round)

    @property
    def has_buffer(self) -> bool:
        """Whether gradients lie in a buffer, to which each is added once made."""
        return self.states.gradients != self.states.weights or self.zero >= 2

    def alone(self, recompute: str | Sequence[str], load: Load | None) -> MemoryReport:
        """Return the report of a rank that has all layers."""
        cfg, step, layout = self.cfg, self.step, self.layout
        tape = replay_tape(cfg, step, recompute, layout=layout, load=load)
        tape += copied_targets(step)
        left = rank_tape(kept_tape(cfg, step, recompute, load=load), layout)
        if self.has_buffer:
            tape = [adding_to_buffer(op) for op in tape]
        has_gradients = self.n_micro_batches > 1 and not self.has_buffer
        lasting = Counter(persistent(cfg, layout, states=self.states, zero=self.zero))
        played = Counter(fullest_instant(tape, has_gradients=has_gradients))
        if self.has_buffer:
            played["gradients"] = lasting["gradients"]
        timeline = self._timeline(
            lasting,
            kept=Counter(kept_by_part(tape)),
            unkept=Counter(
                logits=-(-unkept_logits(cfg, step) // layout.tp),
                temporaries=rebuilt_casts(tape),
            ),
            played=played,
        )
        by_module = bytes_by_module([*left, *copied_targets(step)])
        return MemoryReport(timeline=timeline, by_module=by_module)

    def pipeline(
        self,
        recompute: str | Sequence[str],
        schedule: str,
        layers_per_stage: Sequence[int] | None,
    ) -> MemoryReport:
        """Return the report of the fullest stage, with those of all."""
        cfg, layout, n = self.cfg, self.layout, self.n_micro_batches
        stages = stage_layers(
            cfg, layout, schedule=schedule, layers_per_stage=layers_per_stage
        )
        prices = ChunkPrices(
            cfg=cfg,
            step=self.step,
            layout=layout,
            policies=block_policies(recompute, cfg.n_layers + cfg.n_mtp),
            has_gradients=n > 1,
            has_buffer=self.has_buffer,
        )
        lasting = persistent_by_stage(
            cfg, layout, stages, states=self.states, zero=self.zero
        )
        reports = []
        for rank, (stage, held) in enumerate(zip(stages, lasting, strict=True)):
            held = Counter(held)
            own = Counter(gradients=held["gradients"])
            waits = self.has_buffer or n > 1
            kept, played = at_once(
                [prices.of(chunk) for chunk in stage.chunks],
                in_flight(layout, rank, n, schedule=schedule),
                own if waits else Counter(),
            )
            has_head = any(chunk.is_last for chunk in stage.chunks)
            n_logits = unkept_logits(cfg, self.step) if has_head else 0
            unkept = Counter(logits=-(-n_logits // layout.tp))
            timeline = self._timeline(held, kept=kept, unkept=unkept, played=played)
            reports.append(MemoryReport(timeline=timeline))
        fullest = max(reports, key=lambda report: report.peak)
        return replace(fullest, by_stage=tuple(reports))

    def _timeline(
        self,
        lasting: Counter[str],
        *,
        kept: Counter[str],
        unkept: Counter[str],
        played: Counter[str],
    ) -> tuple[Instant, ...]:
        """Return the instants of a step.

        Args:
            lasting: parts that last, gradients among them.
            kept: what autograd keeps at the end of the forward.
            unkept: what lives beside it just before.
            played: gradients and what else lives at the fullest of the backward.
        """
        others = {part: n for part, n in lasting.items() if part != "gradients"}
        gradients = {"gradients": lasting["gradients"]}
        batch = {"temporaries": batch_bytes(self.train, self.layout)}
        sent = {"communication": self._sent_rows()}
        is_summed = self.layout.dp * self.layout.cp > 1 and not self.has_buffer
        message = {"communication": gradients["gradients"] * is_summed}
        start = (others, gradients) if self.has_buffer else (others,)
        before = (others, gradients) if self.n_micro_batches > 1 else start
        return (
            _instant("start", *start),
            _instant(FORWARD, *before, batch, kept, unkept, sent),
            _instant("end of forward", *before, batch, kept),
            _instant(BACKWARD, others, batch, played, sent),
            _instant(AFTER_BACKWARD, others, gradients, batch, message),
            _instant(OPTIMIZER, others, gradients, batch),
        )

    def _sent_rows(self) -> int:
        """Return the bytes of one layer's rows on their way to other ranks."""
        if self.layout.ep == 1 or self.step.n_rows is None:
            return 0
        n_values = self.step.n_rows / self.layout.tp * self.cfg.dim
        return round(n_values * self.step.compute.itemsize)


def _instant(name: str, *lives: Mapping[str, int]) -> Instant:
    """Return the instant at which all of these live; sums of Counters take longer."""
    by_part: dict[str, int] = {}
    for parts in lives:
        for part, n_bytes in parts.items():
            if n_bytes:
                by_part[part] = by_part.get(part, 0) + n_bytes
    return Instant(name=name, by_part=by_part)


def batch_bytes(train: TrainConfig, layout: Layout) -> int:
    """Return the bytes of a step's tokens, whose targets are a view one further."""
    n_sequences = -(-train.global_batch // layout.dp)
    return n_sequences * (train.seq_len + 1) * INDEX_BYTES


def copied_targets(step: Pass) -> list[Op]:
    """Return what the loss keeps of targets that it copies, to have them in a row.

    They are views of windows one token longer: those of a single window are in a row.
    """
    if step.batch == 1:
        return []
    return [Op("loss", (Kept("targets", step.n_tokens * INDEX_BYTES),))]


def unkept_logits(cfg: ModelConfig, step: Pass) -> int:
    """Return the bytes of logits that live beside the log-probabilities made of them.

    Those of the last loss, which is computed when most is kept already: the head's
    result and, unless that is FP32, a copy which is.
    """
    n_logits = step.batch * (step.seq_len - cfg.n_mtp) * cfg.vocab_size
    copy = EXACT_BYTES if step.compute != torch.float32 else 0
    return n_logits * (step.compute.itemsize + copy)
