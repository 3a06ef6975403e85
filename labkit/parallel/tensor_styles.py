"""How one module of a plan for `parallelize_module` takes its place on the ranks.

Parameters become DTensors under the names they had: whoever lists, cuts, saves or
optimises them sees that. The module's own code reads the part that lies on this rank
and computes with plain tensors, in the kernels that it always used. PyTorch's own
styles instead compute with DTensors, which these kernels do not take, and expect parts
of equal size.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

Passage = Callable[[Any], Any]
"""What a module's first input, or its output, goes through."""


class Placed(ParallelStyle):
    """Place a module's own parameters; pass its input and output on.

    Args:
        placement: of its parameters; None leaves them alone.
        is_summed: whether ranks' gradients of whole parameters are parts of a sum.
        before: what the first input goes through.
        after: what the output goes through.
    """

    def __init__(
        self,
        placement: Placement | None = None,
        *,
        is_summed: bool = False,
        before: Passage | None = None,
        after: Passage | None = None,
    ) -> None:
        self.placement, self.is_summed = placement, is_summed
        self.before, self.after = before, after

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.placement is not None:
            place(module, device_mesh, self.placement)
            read_locally(module, is_summed=self.is_summed)
        before, after = self.before, self.after
        if before is not None:
            module.register_forward_pre_hook(
                lambda _, inputs: (before(inputs[0]), *inputs[1:])
            )
        if after is not None:
            module.register_forward_hook(lambda _, inputs, output: after(output))
        return module


def columns(**passages: Passage) -> Placed:
    """Return the style of a projection whose outputs are cut."""
    return Placed(Shard(0), **passages)


def rows(**passages: Passage) -> Placed:
    """Return the style of a projection whose inputs are cut."""
    return Placed(Shard(1), **passages)


def whole(*, is_summed: bool, **passages: Passage) -> Placed:
    """Return the style of parameters that every rank holds."""
    return Placed(Replicate(), is_summed=is_summed, **passages)


def place(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a module's own parameters DTensors, with the first rank's values."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placed = distribute_tensor(parameter.detach(), mesh, [placement])
        needs = parameter.requires_grad
        module.register_parameter(name, nn.Parameter(placed, requires_grad=needs))


def read_locally(module: nn.Module, *, is_summed: bool) -> None:
    """Let a module's own code read its parameters' local parts.

    Its class gets a property for each, over the parameter's name. Apply it after what
    else changes the class, as recomputation and FP8 do. While FSDP2 has a parameter cut
    once more, nothing computes with it, and FSDP2 itself reads it by its name.
    """
    cls = type(module)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    reads = {name: _local_part(name, is_summed) for name in names}
    module.__class__ = type(f"Local{cls.__name__}", (cls,), reads)


def _local_part(name: str, is_summed: bool) -> property:
    def read(module: nn.Module) -> Tensor:
        parameter = module._parameters[name]
        assert isinstance(parameter, DTensor)
        if parameter.device_mesh.ndim > 1:
            return parameter
        if not is_summed:
            return parameter.to_local()
        # The same placement twice: its gradient is brought to it, by an all-reduce.
        parameter = parameter.redistribute(placements=parameter.placements)
        return parameter.to_local(grad_placements=[Partial()])

    return property(read)
