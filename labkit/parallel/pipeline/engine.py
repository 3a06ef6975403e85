"""PyTorch's pipeline schedules, by our names and for our stages.

The schedules, their messages and their order of work are PyTorch's. Where it needs
help, it gets it here: shapes known beforehand, so that no trial run finds them out;
forward passes alone under V-shaped schedules, which stumble without backward passes;
and overlapped pairs (`overlap`), which it runs one after the other. Written against
PyTorch 2.13, some of whose private names it needs.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineContext,
    get_schedule_class,
)

from labkit.parallel.pipeline import parted
from labkit.parallel.pipeline.orders import V_SHAPED, name_in_torch
from labkit.parallel.pipeline.overlap import Overlap
from labkit.parallel.pipeline.stage import Terms

_BACKWARD = (
    _ComputationType.FULL_BACKWARD,
    _ComputationType.BACKWARD_INPUT,
    _ComputationType.BACKWARD_WEIGHT,
    _ComputationType.REDUCE_GRAD,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a schedule is built for; other shapes need another schedule."""

    n_micro_batches: int

    n_sequences: int
    """Of a micro-batch."""

    seq_len: int


class StaticStage(PipelineStage):
    """A stage of PyTorch's whose shapes are given."""

    def backward_maybe_with_nosync(
        self,
        backward_type: str,
        bwd_kwargs: dict[str, Any],
        last_backward: bool = False,
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        groups = bwd_kwargs.get("param_groups", ())
        with self.submod.differentiated():
            if parted.has_shared_weights(groups):
                _sum_at_the_end(self.submod)
                parted.accumulate(self.submod.parameters(), groups)
                return (), None
            return super().backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward
            )

    def _post_metadata_inference_cleanup(self) -> None:
        # PyTorch drops the gradients of sharded parameters here, as remains of a trial
        # run. There was no trial run, and the gradients may be wanted.
        return


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """The stages on a rank, and where they belong."""

    modules: Sequence[nn.Module]
    indices: Sequence[int]
    n_stages: int
    group: ProcessGroup
    hidden: Tensor
    """What stages send each other, without values."""

    device: torch.device


class Schedule:
    """One of PyTorch's schedules, built for stages and the shapes of their messages.

    Args:
        name: PyTorch's.
        chunks: the stages on this rank.
        shape: of what the schedule takes.
        overlap: what runs overlapped pairs; None has PyTorch run one after the other.
    """

    def __init__(
        self,
        name: str,
        chunks: Chunks,
        shape: Shape,
        *,
        overlap: Overlap | None = None,
    ) -> None:
        self.stages = _stages(chunks, shape)
        schedule = get_schedule_class(name)
        is_single = issubclass(schedule, PipelineScheduleSingle)
        self.schedule = schedule(
            self.stages[0] if is_single else self.stages,
            shape.n_micro_batches,
            loss_fn=_output_as_loss,
            scale_grads=False,
        )
        self.overlap = overlap
        if overlap is not None:
            kind = _ComputationType.OVERLAP_F_B
            self.schedule.register_custom_function(kind, overlap)

    def run(
        self, batch: tuple[Int[Tensor, "b s"], Int[Tensor, "b s"]], terms: Terms
    ) -> None:
        """Run one step; without gradients, its forward passes.

        Args:
            batch: tokens and targets of all micro-batches.
            terms: of the step; figures gather in it.
        """
        for stage in self.stages:
            _sum_at_the_end(stage.submod)
        tokens, targets = batch
        arguments = (tokens,) if self.stages[0].is_first else ()
        is_end = self.stages[-1].is_last
        # PyTorch asks for a target of each micro-batch; the stage itself reads another.
        ends = {"targets": targets, "target": targets} if is_end else {}
        is_training = torch.is_grad_enabled()
        advance = self.schedule.step if is_training else self.schedule.eval
        with self.overlap.thread() if self.overlap else nullcontext():
            advance(*arguments, **ends, terms=terms, return_outputs=False)


def build(
    schedule: str, chunks: Chunks, shape: Shape, *, overlaps: bool = False
) -> Schedule:
    """Return one of our `SCHEDULES` for these stages.

    Args:
        schedule: our name.
        chunks: the stages on this rank.
        shape: of what the schedule takes.
        overlaps: whether pairs run at the same time.
    """
    name = name_in_torch(schedule, len(chunks.modules))
    return Schedule(name, chunks, shape, overlap=Overlap() if overlaps else None)


def build_forward(schedule: str, chunks: Chunks, shape: Shape) -> Schedule:
    """Return a schedule of forward passes, whose stages lie where the other's do."""
    name = "ZBVZeroBubble" if schedule in V_SHAPED else "LoopedBFS"
    built = Schedule(name, chunks, shape)
    for kind in _BACKWARD:
        built.schedule.register_custom_function(kind, _skip)
    return built


def _skip(action: _Action, context: _PipelineContext) -> None:
    """Do nothing but forget that a gradient was expected."""
    place = action.stage_index, action.microbatch_index
    context.schedule_ref.bwd_recv_ops.pop(place, None)


def _sum_at_the_end(module: nn.Module) -> None:
    """Keep gradients of shards whole until the schedule has them summed.

    PyTorch says so to each stage before its own backward passes. The embedding gets
    gradients in those of another stage, which may come first.
    """
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)


def _stages(chunks: Chunks, shape: Shape) -> list[StaticStage]:
    tokens = torch.empty(
        shape.n_sequences, shape.seq_len, dtype=torch.int64, device="meta"
    )
    loss = torch.empty((), device="meta", requires_grad=True)
    last = chunks.n_stages - 1
    return [
        StaticStage(
            module,
            index,
            chunks.n_stages,
            chunks.device,
            input_args=tokens if index == 0 else chunks.hidden,
            output_args=loss if index == last else chunks.hidden,
            group=chunks.group,
        )
        for module, index in zip(chunks.modules, chunks.indices, strict=True)
    ]


def _output_as_loss(
    output: Float[Tensor, ""], target: Int[Tensor, "b s"]
) -> Float[Tensor, ""]:
    return output
