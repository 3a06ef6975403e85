"""The reduce-scatter of FSDP2 in fewer bytes.

FSDP2 sums gradients so that each rank has its shard, which is the first half of a sum
by owners: an all-to-all of bytes, added up in FP32. Weights are gathered as before.
PowerSGD has no place here, because what FSDP2 hands over is no matrix any more.

gloo has no reduce-scatter of its own and does an all-reduce; so beside it, even FP32
that is summed by owners sends half.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from labkit.config.checks import require_instance
from labkit.parallel.communication.compress import Coded, finish


def compress_shards(model: nn.Module, compression: Coded) -> int:
    """Let FSDP2 sum gradients that way; return how many modules it cuts.

    With copies of shards (HSDP) the sum over copies stays as it is. What was lost in a
    micro-batch is added to the next one.

    Args:
        model: after `fully_shard`, with sums instead of means
            (`set_gradient_divide_factor(1.0)`).
        compression: sums by owners.

    Raises:
        ValueError: PowerSGD, or nothing that FSDP2 cuts.
    """
    require_instance({"compression": compression}, Coded)
    cut = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not cut:
        raise ValueError(
            "compress_shards needs a model that FSDP2 has cut; got "
            f"{type(model).__name__} with no such module. Call it after "
            "apply_data_parallel(model, mesh, zero=3)."
        )
    for module in cut:
        module.set_custom_reduce_scatter(CompressedReduceScatter(compression))
    return len(cut)


class CompressedReduceScatter(ReduceScatter):
    """What FSDP2 calls for the gradients of one module.

    Args:
        compression: keeps what was lost under this object.
    """

    def __init__(self, compression: Coded) -> None:
        self.compression = compression

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Float[Tensor, "..."]:
        """Return memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Float[Tensor, "..."],
        input_tensor: Float[Tensor, "..."],
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum; it is there on return."""
        assert op == dist.ReduceOp.SUM, f"gradients are sums, not {op}"
        flat = input_tensor.flatten().float()
        if group.size() > 1:
            flat = finish(self.compression.scatter(flat, self, group))
        output_tensor.copy_(flat.view_as(output_tensor))
