"""What one rank keeps of a model in training, counted from the tensors themselves."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.parallel.replicas import local


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on this rank."""

    weights: int
    gradients: int
    moments: int


def held(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Held:
    """Return the bytes of weights, gradients and moments that this rank keeps now.

    A weight that FSDP2 has gathered counts as whole; the share it was gathered from,
    which stays, is not counted a second time. Buffers of messages are not counted.

    Args:
        model: what the rank holds, transforms applied.
        optimizer: what has the moments. It also knows the shares while the model has
            the gathered weights, and gradients may belong to either.
    """
    parameters = list(model.parameters())
    groups = [] if optimizer is None else optimizer.param_groups
    known = {*parameters, *(p for group in groups for p in group["params"])}
    states = [] if optimizer is None else optimizer.state.values()
    return Held(
        weights=_bytes(parameters),
        gradients=_bytes(p.grad for p in known if p.grad is not None),
        moments=_bytes(
            moment
            for state in states
            for moment in state.values()
            if isinstance(moment, Tensor) and moment.ndim
        ),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)
