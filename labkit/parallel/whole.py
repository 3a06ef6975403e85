"""The serial model's tensors, put together from what many ranks hold."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def whole(tensor: Shaped[Tensor, "*part"]) -> Shaped[Tensor, "*whole"]:
    """Return the serial tensor of which each rank has a part; all of them call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def from_all_stages(
    tensors: dict[str, Tensor], names: Iterable[str], pp: DeviceMesh
) -> dict[str, Tensor]:
    """Return whole tensors of all stages on every rank, in the order of `names`.

    Args:
        tensors: those of the stages on this rank; no two ranks have the same name.
        names: of the serial model; those that no rank has are left out.
        pp: the ranks of the pipeline.
    """
    group = pp.get_group()
    forms = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    of_ranks: list[dict] = [{} for _ in range(pp.size())]
    dist.all_gather_object(of_ranks, forms, group=group)
    gathered = {}
    for owner, forms in enumerate(of_ranks):
        for name, (shape, dtype) in forms.items():
            tensor = tensors.get(name)
            if tensor is None:
                tensor = torch.empty(shape, dtype=dtype, device=pp.device_type)
            gathered[name] = tensor.contiguous()
            dist.broadcast(gathered[name], group=group, group_src=owner)
    return {name: gathered[name] for name in names if name in gathered}
