"""Whole weights on every data-parallel rank, whose gradients are summed (ZeRO-0)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from labkit.model.moe import MoE
from labkit.parallel.mesh import Mesh


def replicate(
    model: nn.Module, mesh: Mesh, mixed: torch.dtype | None
) -> "Replicas | SummedLater":
    """Make every rank's gradients the sum over ranks; return the handle.

    A model that nothing else cuts is given to DDP, which sums buckets of gradients
    while the backward pass goes on. DDP knows neither DTensors nor stages of a
    pipeline: these are summed after the last backward pass.
    """
    if mixed is not None:
        _compute_in(model, mixed)
    layout = mesh.layout
    if layout.pp == layout.tp == layout.ep == 1:
        return Replicas(model, _unchecked_group())
    return SummedLater(model, mesh)


class _Loss(nn.Module):
    """A model whose forward pass is another method of it: DDP wraps only `forward`."""

    def __init__(self, model: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self.method(*args, **kwargs)


class Replicas:
    """A model whose `loss` DDP sees.

    Attributes:
        ddp: what holds the buckets. Its hook sums them; a mean is what it would make
            by itself.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.ddp = DistributedDataParallel(
            _Loss(model, model.loss),
            process_group=group,
            forward_sync_buffers=False,  # router biases move alike on all ranks
            gradient_as_bucket_view=True,
        )
        # Without annotations: DDP knows no others than its own.
        self.ddp.register_comm_hook(
            group, lambda state, bucket: sum_bucket(state, bucket)
        )
        # A function, for a module would be taken for a part of the model.
        model.loss = self._loss

    def _loss(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, the model's
        return self.ddp(*args, **kwargs)

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Let DDP sum gradients in the last backward pass only."""
        with nullcontext() if is_last else self.ddp.no_sync():
            yield

    def finish(self) -> None:
        """Do nothing: gradients were summed in the backward pass."""


def _unchecked_group() -> dist.ProcessGroup:
    """Return a group of all ranks whose collectives PyTorch does not check.

    Given a group that is checked (TORCH_DISTRIBUTED_DEBUG=DETAIL), the constructor of
    DDP ends the process by SIGSEGV (PyTorch 2.13, gloo).
    """
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    group = dist.new_group()
    dist.set_debug_level(level)
    return group


def sum_bucket(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[Shaped[Tensor, "n"]]:
    """Return the sum over ranks of a bucket of DDP, when it is there."""
    handle = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return handle.get_future().then(lambda done: done.value()[0])


@dataclass(frozen=True, slots=True)
class SummedLater:
    """A model, or a stage, whose gradients are summed when all are there."""

    model: nn.Module
    mesh: Mesh

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Let gradients add up on this rank."""
        yield

    def finish(self) -> None:
        """Sum the gradients of experts over their copies, all others over `dp`."""
        experts = expert_parameters(self.model)
        apart = set(experts)
        others = [p for p in self.model.parameters() if p not in apart]
        sum_gradients(experts, self.mesh.edp.get_group())
        sum_gradients(others, self.mesh.dp.get_group())


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of all routed experts, in the same order on every rank."""
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    return [weight for moe in mixtures for weight in moe.experts.parameters()]


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up, in place, this rank's cuts of gradients over a group, in one message.

    The message is a copy: for the length of the call all is held twice.
    """
    if dist.get_world_size(group) == 1:
        return
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    message = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(message, group=group)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, total in zip(gradients, message.split(sizes), strict=True):
        gradient.copy_(total.view_as(gradient))


def local(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return the part of a tensor that lies on this rank; it shares the storage."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model compute with weights rounded to `dtype`, and keep its own."""
    name = "loss" if hasattr(model, "loss") else "forward"
    method = getattr(model, name)

    def rounded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, the method's
        weights = {
            f"model.{name}": parameter.to(dtype)
            for name, parameter in model.named_parameters()
        }
        whole = _Loss(model, method)
        return torch.func.functional_call(whole, weights, args, kwargs)

    setattr(model, name, rounded)
