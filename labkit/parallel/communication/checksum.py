"""Whether replicas are still the same, bit for bit.

A hook that sums wrongly lets ranks drift apart while every rank's loss looks healthy.
So their parameters are compared, 8 bytes each.
"""

from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

DIGEST_BYTES = 8


def diverged(
    model: nn.Module, group: dist.ProcessGroup | None = None
) -> tuple[str, ...]:
    """Return the parameters and buffers that are not the same bits on all ranks.

    Every rank calls it and gets the same answer. Of a DTensor only what this rank holds
    is compared, so `group` must be ranks that hold the same share.

    Args:
        model: with tensors of the same names on all ranks.
        group: the replicas; None is everyone.
    """
    tensors = model.state_dict()
    mine = torch.tensor([_digest(tensor) for tensor in tensors.values()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    differs = torch.stack([theirs != everyone[0] for theirs in everyone]).any(dim=0)
    return tuple(
        name for name, is_apart in zip(tensors, differs, strict=True) if is_apart
    )


def _digest(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    data = local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    digest = blake2b(data, digest_size=DIGEST_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)
