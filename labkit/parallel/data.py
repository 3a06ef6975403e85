"""Data parallelism: who keeps weights, gradients and moments whole, and who a share.

Every data-parallel rank computes with whole weights on sequences of its own. What a
rank *keeps* is another matter (ZeRO, arXiv 1910.02054). Of each parameter, N ranks keep

    zero    weights              gradients            moments    by
    0       whole                whole                whole      DDP
    1       whole in the step    whole in the step    1/N        FSDP2
    2       whole in the step    1/N                  1/N        FSDP2
    3       1/N                  1/N                  1/N        FSDP2

"In the step" is from the first forward pass to the last backward pass; between steps
it is 1/N. With zero=3 the weights of a block are whole only while the block computes,
and are gathered twice; embedding, head and what else lies outside of blocks is in use
from end to end, and whole in the step. `labkit.parallel.held` counts the bytes.

The loss is normalised by the counts of the whole step, so a gradient is the plain sum
over ranks and micro-batches, never a mean. Experts are summed over `mesh.edp`, the
ranks that hold the same ones: what other ranks' tokens contribute came back through the
all-to-all. Everything else is summed over `mesh.dp`.

On GPUs and with NCCL this has not been run.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from labkit.config.checks import require_whole
from labkit.model.moe import MoE
from labkit.model.transformer import Block
from labkit.parallel.mesh import Mesh
from labkit.parallel.replicas import replicate


@runtime_checkable
class DataParallel(Protocol):
    """What is told when micro-batches begin, and sees that gradients are summed."""

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one forward and backward pass of the step."""
        ...

    def finish(self) -> None:
        """Sum what is not yet summed, after the last backward pass of the step."""
        ...


def apply_data_parallel(
    model: nn.Module,
    mesh: Mesh,
    *,
    zero: int = 0,
    mixed: torch.dtype | None = None,
) -> DataParallel:
    """Make a model, or a stage of one, compute as one rank of many; return the handle.

    The model is changed in place. Parameters keep their names; with `zero` above 0 they
    become DTensors, whose `full_tensor()` is the serial parameter. Every rank must have
    built the same model. Whoever runs micro-batches enters `micro_batch(is_last=…)` of
    the handle for each, and calls its `finish()` after the last.

    Args:
        model: a `Transformer` or what holds some of its blocks, after the transforms
            that cut tensors and experts.
        mesh: the processes. If it has copies, weights are cut within each copy, and
            gradients summed over copies too (HSDP).
        zero: what is cut, see the table above. Stages of a pipeline sum gradients once
            a step, so that 2 keeps no less than 1 there.
        mixed: the dtype to compute in; weights, summed gradients and moments keep the
            dtype of the parameters. None computes in that.

    Raises:
        ValueError: no such level, or copies of shards where nothing is cut.
    """
    require_whole({"zero": zero}, at_least=0)
    if zero > 3:
        raise ValueError(f"zero must be 0, 1, 2 or 3; got {zero}. Set zero=3 or less.")
    if zero == 0 and mesh.replicate > 1:
        raise ValueError(
            "replicate must be 1 with zero=0, because copies of shards need shards; "
            f"got replicate={mesh.replicate}. Set zero=1 or more."
        )
    if zero == 0:
        return replicate(model, mesh, mixed)
    return _shard(model, mesh, zero, mixed)


@dataclass(frozen=True, slots=True)
class Shards:
    """A model whose parameters FSDP2 cuts."""

    model: FSDPModule
    zero: int

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Say what is kept whole until the next micro-batch."""
        self.model.set_is_last_backward(is_last)
        self.model.set_requires_all_reduce(is_last)
        self.model.set_requires_gradient_sync(is_last or self.zero > 1)
        self.model.set_reshard_after_backward(is_last or self.zero > 2)
        yield

    def finish(self) -> None:
        """Do nothing: gradients were summed in the backward pass."""


def _shard(
    model: nn.Module, mesh: Mesh, zero: int, mixed: torch.dtype | None
) -> Shards:
    """Cut the experts over their copies, then each block, then what is left."""
    copies = ("replicate", "shard") if mesh.replicate > 1 else None
    dense = mesh.dense[copies] if copies else mesh.dp
    expert = mesh.expert[copies] if copies else mesh.edp
    options = {
        "reshard_after_forward": zero == 3,
        # Activations have the dtype of the weights they come from, and sums that pass
        # through with them keep theirs.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=mixed, reduce_dtype=_dtype(model), cast_forward_inputs=False
        ),
    }
    for module in model.modules():
        if isinstance(module, MoE):
            _sum_shards(fully_shard(module.experts, mesh=expert, **options))
    for module in model.modules():
        if isinstance(module, Block):
            _sum_shards(fully_shard(module, mesh=dense, **options))
    options["reshard_after_forward"] = False  # its backward pass comes next
    _sum_shards(fully_shard(model, mesh=dense, **options))
    if hasattr(model, "loss"):
        register_fsdp_forward_method(model, "loss")
    return Shards(model, zero)


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _sum_shards(module: Any) -> None:  # noqa: ANN401, an FSDPModule by now
    module.set_gradient_divide_factor(1.0)
    # gloo has no product with a factor, which is what a divisor asks for otherwise.
    module.set_force_sum_reduction_for_comms(True)
