"""The processes of a data-parallel run, and the sums they share.

Every rank holds the whole model and its share of the global batch. The loss is
normalised by the global token count before the backward pass, so gradients, losses
and expert loads are plain sums over ranks. Without a process group there is one
rank, and every function here returns at once. It is tested with gloo on CPUs; on GPUs
and with NCCL it has not been run.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Num
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which process this is, and how many take part."""

    rank: int = 0
    world: int = 1

    @classmethod
    def current(cls) -> "Ranks":
        """Return this process's place in the process group, if there is one."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def share(self, global_batch: int) -> int:
        """Return how many sequences of a global batch each rank takes."""
        if global_batch % self.world:
            raise ValueError(
                "global_batch must be a multiple of the number of ranks, because each "
                f"takes an equal share; got {global_batch} and {self.world}. "
                f"Set global_batch={-(-global_batch // self.world) * self.world}."
            )
        return global_batch // self.world

    def sum(self, values: Num[Tensor, "*shape"]) -> Num[Tensor, "*shape"]:
        """Return the sum over ranks of a small tensor, on every rank."""
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def count(self, n: int) -> int:
        """Return the sum of a number over ranks, on every rank."""
        return int(self.sum(torch.tensor(n)))

    def max(self, values: Num[Tensor, "*shape"]) -> Num[Tensor, "*shape"]:
        """Return the largest over ranks of each value, on every rank."""
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return flag if self.world == 1 else bool(self.sum(torch.tensor(int(flag))))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def share_weights(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of the first."""
        if self.world > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all ranks in place, in one message.

        The message is a copy of all gradients: for the length of the call they are
        held twice.
        """
        if self.world == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        message = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(message)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, message.split(sizes), strict=True):
            gradient.copy_(total.view_as(gradient))
