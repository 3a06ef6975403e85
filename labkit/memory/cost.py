"""What a recompute policy costs in time: the share of a step that runs again.

A product takes as long as its FLOPs, or as the bytes it moves if these take longer; all
else takes as long as its bytes, and everything comes after everything else. How many
FLOPs a device computes while it moves a byte is its *balance*. Nothing more of a device
is needed, because a share has no unit: a matrix product of any size is taken to run at
one rate, and any byte to come from memory.

So it does not know that small products are slower, that what lies in a cache is there
sooner, that each operator takes time to start, nor of links between ranks: rows that
are sent to other ranks' experts again are not counted, nor other ranks' context, and
FP8 products take as long as BF16's. A pipeline's step is that of 1F1B under every
schedule: all micro-batches through the slowest stage, one through the others too.

On a CPU, tests count the FLOPs, which agree to the last one, and the bytes that run
again, which agree within a quarter; `tests/benchmarks/bench_recompute.py` prints times
beside measured ones. In BF16 "selective" was measured to cost twice what is predicted,
since the products that it runs again are small. Nothing was timed on a GPU.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from types import MappingProxyType
from typing import NamedTuple

import torch

from labkit.config import Layout, MLAConfig, ModelConfig, TrainConfig
from labkit.config.checks import require_above
from labkit.hardware import accelerator
from labkit.memory.formats import formats_of
from labkit.memory.persistent import persistent_by_stage, states_of
from labkit.memory.predict import predict, rank_pass, with_rows
from labkit.memory.recompute import RECOMPUTE_POLICIES, block_policies
from labkit.memory.stages import Stage, stage_layers
from labkit.memory.tape import Pass
from labkit.memory.work import (
    Work,
    block_work,
    embedding_work,
    head_work,
    mtp_work,
    norm,
    rank_work,
)

CPU_BALANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 6.3, torch.bfloat16: 14.0}
)
"""FLOPs per byte by dtype, as `hardware.measure` found them on two cores of a cloud
machine: 196 and 437 GFLOP/s, 31 GB/s."""

GPU = "h800"
"""The accelerator that "gpu" stands for, DeepSeek-V3's own."""

SELECTIVE = frozenset(
    {
        *("attn_norm", "ffn_norm", "enorm", "hnorm", "norm", "joined"),
        *("ffn.gate", "ffn.swiglu", "ffn.shared_experts.swiglu"),
    }
)
"""Parts that run again under "selective"."""

SELECTIVE_MLA = frozenset(
    {"attn.q_norm", "attn.wq_b", "attn.wq", "attn.kv_norm", "attn.wkv_b", "attn.heads"}
)
"""And those of MLA."""

BLOCK_POLICIES = tuple(name for name in RECOMPUTE_POLICIES if name != "every_k")


def recompute_cost(  # noqa: PLR0913, as `predict`
    cfg: ModelConfig,
    train: TrainConfig,
    recompute: str | Sequence[str],
    layout: Layout | None = None,
    device: str = "cpu",
    *,
    balance: float | None = None,
    **as_predict: object,
) -> float:
    """Return a policy's extra time, as a share of the step's without recompute.

    Args:
        cfg: the model.
        train: batch, sequence and precision.
        recompute: the policy, as for `apply_recompute`.
        layout: degrees of parallelism; None is one rank alone.
        device: "cpu", "gpu" or an accelerator of `data/hardware.csv`.
        balance: FLOPs that the device computes while it moves a byte, as
            `Roofline.ridge` of a machine that was measured; None takes the data
            sheet's, or `CPU_BALANCE`.
        **as_predict: as for `predict`; of these, what decides no time changes nothing,
            and `load` neither: experts are timed as if routing were even.

    >>> from labkit.config import PRESETS
    >>> small, train = PRESETS["small"], TrainConfig(micro_batch=4)
    >>> f"{recompute_cost(small, train, 'full'):.0%}"
    '29%'

    Raises:
        ValueError: as `predict`, or a balance that is not above 0.
    """
    require_known(as_predict)
    # For what it refuses: a step that cannot be predicted has no price.
    predict(cfg, train, layout, device, recompute=recompute, **as_predict)
    times = step_times(cfg, train, layout, device, balance=balance, **as_predict)
    policies = block_policies(recompute, cfg.n_layers + cfg.n_mtp)
    return times.cost(policies)


class BlockTime(NamedTuple):
    """What a layer or an MTP module takes in one micro-batch, in the time of a FLOP."""

    plain: float
    """Forward and backward without recompute."""

    again: Mapping[str, float]
    """What runs again, by policy."""


class StageTime(NamedTuple):
    """What one pipeline rank takes."""

    blocks: tuple[int, ...]
    """Indices of its layers and, after all layers', of its MTP modules."""

    share: float
    """Of the micro-batches that pass these blocks here."""

    ends: float
    """What embedding, final norm, head and losses take in a micro-batch."""

    norm: float
    """What the final norm takes to run again, if any block is "selective"."""

    update: float
    """What clipping and the optimizer take, once in a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """The times of a step's parts, of which policies are priced."""

    blocks: tuple[BlockTime, ...]
    stages: tuple[StageTime, ...]
    n_micro_batches: int

    def cost(self, policies: Sequence[str]) -> float:
        """Return the extra time of these policies, one per block, as a share."""
        plain = self.total(["none"] * len(self.blocks))
        return self.total(policies) / plain - 1

    def total(self, policies: Sequence[str]) -> float:
        """Return the time of a step: of its slowest stage, and a fill of the others."""
        stages = [self._stage(stage, policies) for stage in self.stages]
        update = max(stage.update for stage in self.stages)
        return sum(stages) + (self.n_micro_batches - 1) * max(stages) + update

    def _stage(self, stage: StageTime, policies: Sequence[str]) -> float:
        time = stage.ends + stage.norm * ("selective" in policies)
        for index in stage.blocks:
            block = self.blocks[index]
            time += block.plain + block.again[policies[index]]
        return time * stage.share


def step_times(  # noqa: PLR0913, as `predict`
    cfg: ModelConfig,
    train: TrainConfig,
    layout: Layout | None = None,
    device: str = "cpu",
    *,
    balance: float | None = None,
    **as_predict: object,
) -> StepTimes:
    """Return the times of a step's parts; arguments as for `recompute_cost`."""
    layout = layout or Layout()
    step = planned_pass(cfg, train, layout, device, as_predict)
    balance = device_balance(device, step.compute) if balance is None else balance
    require_above({"balance": balance}, 0)
    stages = stage_layers(cfg, layout, **split_of(layout, as_predict))
    lasting = persistent_by_stage(
        cfg,
        layout,
        stages,
        states=as_predict.get("states") or states_of(train),
        zero=as_predict.get("zero", 0),
    )
    clock = _Clock(cfg, step, layout, balance)
    return StepTimes(
        blocks=clock.blocks(),
        stages=tuple(
            clock.stage(stage, sum(held.values()))
            for stage, held in zip(stages, lasting, strict=True)
        ),
        n_micro_batches=-(-train.global_batch // (train.micro_batch * layout.dp)),
    )


ROWS = {"routing": "physical", "imbalance": 1.0}
"""Arguments of `predict` that decide how many rows experts compute."""

SPLIT = ("schedule", "layers_per_stage")
"""Those that decide where layers lie."""


def split_of(layout: Layout, as_predict: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of `predict` for `stage_layers`; one has no schedule."""
    names = SPLIT if layout.pp > 1 else ("layers_per_stage",)
    return {name: as_predict[name] for name in names if name in as_predict}


def require_known(as_predict: Iterable[str]) -> None:
    """Raise TypeError for names of arguments that `predict` does not have."""
    known = signature(predict).parameters
    for name in as_predict:
        if name not in known:
            raise TypeError(f"predict() has no keyword argument {name!r}")


def planned_pass(
    cfg: ModelConfig,
    train: TrainConfig,
    layout: Layout,
    device: str,
    as_predict: Mapping[str, object],
) -> Pass:
    """Return a rank's pass over a micro-batch, as `predict` plans it.

    Raises:
        TypeError: an argument that `predict` does not have.
    """
    require_known(as_predict)
    states = as_predict.get("states") or states_of(train)
    step = rank_pass(cfg, train, layout, device, states=states)
    formats = formats_of(cfg, as_predict.get("cached", "compute"))
    step = replace(step, formats=formats)
    rows = {name: as_predict[name] for name in ROWS if name in as_predict}
    if layout.n_ranks > 1 or rows:
        step = with_rows(cfg, step, layout, **(ROWS | rows))
    return step


def device_balance(device: str, dtype: torch.dtype) -> float:
    """Return the FLOPs of products in this dtype that a device computes per byte moved.

    >>> round(device_balance("h800", torch.bfloat16))
    296
    """
    if device == "cpu":
        return CPU_BALANCE[dtype]
    sheet = accelerator(GPU if device == "gpu" else device)
    name = str(dtype).removeprefix("torch.")
    return sheet.flops(name) / sheet.memory_bytes_per_second


def runs_again(works: Sequence[Work], policy: str, *, is_mla: bool) -> Iterator[Work]:
    """Yield what of a block's work a policy runs again.

    PyTorch runs a checkpointed module until it has all that autograd saved in it: not
    its last product, nor what comes after.

    Args:
        works: of the block.
        policy: of the block; "moe" leaves a dense one as it is.
        is_mla: whether its attention is.
    """
    parts = {work.part for work in works}
    is_sparse = "ffn.experts" in parts
    unneeded = {"ffn_residual", "ffn.w2", "ffn.shared_experts.w2", "norm"}
    for work in works:
        part, branch = work.part, work.part.split(".")[0].removesuffix("_norm")
        match policy:
            case "full":
                is_again = part not in unneeded
            case "attention":
                is_again = branch == "attn" and part != "attn.wo"
            case "moe":
                is_again = is_sparse and branch == "ffn" and part not in unneeded
            case "selective":
                is_again = part in SELECTIVE or (is_mla and part in SELECTIVE_MLA)
            case _:
                is_again = False
        if is_again:
            yield work


class _Clock(NamedTuple):
    """Times work of one model on one device; equal blocks once."""

    cfg: ModelConfig
    step: Pass
    layout: Layout
    balance: float

    def blocks(self) -> tuple[BlockTime, ...]:
        """Return the times of all layers, then of MTP modules."""
        cfg, step = self.cfg, self.step
        n_dense = cfg.n_layers if cfg.moe is None else cfg.n_dense_layers
        times = []
        for is_dense, n in ((True, n_dense), (False, cfg.n_layers - n_dense)):
            if n:
                times += [self._block(block_work(cfg, step, is_dense=is_dense))] * n
        for depth in range(1, cfg.n_mtp + 1):
            times.append(self._block(mtp_work(cfg, self._shorter(depth))))
        return tuple(times)

    def stage(self, stage: Stage, lasting_bytes: int) -> StageTime:
        """Return the times of one pipeline rank, which holds so many lasting bytes."""
        cfg = self.cfg
        blocks = [index for chunk in stage.chunks for index in chunk.layers]
        ends = []
        if any(chunk.is_first for chunk in stage.chunks):
            ends.append(embedding_work(cfg, self.step))
        has_head = any(chunk.is_last for chunk in stage.chunks)
        if has_head:
            blocks += range(cfg.n_layers, cfg.n_layers + cfg.n_mtp)
            for depth in range(cfg.n_mtp + 1):
                ends += head_work(cfg, self._shorter(depth))
                if depth:
                    ends.append(embedding_work(cfg, self._shorter(depth)))
        final = [norm("norm", self.step, cfg.dim)] if has_head else []
        ends += final
        return StageTime(
            blocks=tuple(blocks),
            share=1 / stage.n_copies,
            ends=self._plain(ends),
            norm=self._forward(final),
            # Clipping and the optimizer read and write all that lasts.
            update=2 * self.balance * lasting_bytes,
        )

    def _shorter(self, depth: int) -> Pass:
        """Return the pass of an MTP module, which sees fewer positions."""
        return replace(self.step, seq_len=self.step.seq_len - depth)

    def _block(self, works: Iterable[Work]) -> BlockTime:
        works = list(works)
        is_mla = isinstance(self.cfg.attention, MLAConfig)
        again = {
            policy: self._forward(runs_again(works, policy, is_mla=is_mla))
            for policy in BLOCK_POLICIES
        }
        return BlockTime(self._plain(works), again)

    def _plain(self, works: Iterable[Work]) -> float:
        return sum(
            work.forward_time(self.balance) + work.backward_time(self.balance)
            for work in rank_work(works, self.layout)
        )

    def _forward(self, works: Iterable[Work]) -> float:
        ranked = rank_work(works, self.layout)
        return sum(work.forward_time(self.balance) for work in ranked)
