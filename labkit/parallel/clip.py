"""The norm of a gradient whose parts lie on many ranks, some of them several times."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit.parallel.mesh import Mesh
from labkit.parallel.replicas import local


def clip_gradients(
    parameters: Iterable[nn.Parameter], mesh: Mesh, max_norm: float
) -> float:
    """Scale all gradients to a global norm of at most `max_norm`; return the norm.

    It is the norm of the serial model's gradient, the same on every rank, though
    parameters are cut over different meshes, and stages hold different ones.
    (`torch.nn.utils.clip_grad_norm_` refuses tensors of different meshes.)

    Args:
        parameters: those this rank holds a part of. One that two stages hold must be
            given on one of them only.
        mesh: the processes.
        max_norm: infinity measures and changes nothing.
    """
    norm = gradient_norm(parameters := list(parameters), mesh)
    scale_gradients(parameters, norm, max_norm)
    return norm


def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> float:
    """Return the norm of the whole gradient, of which each rank holds some parts.

    Every rank of a stage holds one cut of each parameter. So it counts the square of
    what it holds by the number of ranks that hold the same, and the sum over all
    ranks of all stages is the square of the norm.
    """
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float64)
            n_holders = mesh.stage.size() // n_cuts(parameter.grad)
            squares += norm.cpu().square() / n_holders
    squares = squares.to(mesh.dense.device_type)
    dist.all_reduce(squares)
    return math.sqrt(squares.item())


def n_cuts(tensor: Shaped[Tensor, "..."]) -> int:
    """Return into how many different parts a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in tensor.placements)
    axes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    # What FSDP2 cuts once more than another does not count as `is_shard`.
    return math.prod(size for placement, size in axes if not placement.is_replicate())


def scale_gradients(
    parameters: Iterable[nn.Parameter], norm: float, max_norm: float
) -> None:
    """Scale gradients of this norm down to `max_norm`, as PyTorch does."""
    factor = max_norm / (norm + 1e-6)
    if factor >= 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)
