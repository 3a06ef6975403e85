"""Models that have sizes and kernels, but no bytes: to measure what does not fit."""

from typing import TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

ModelT = TypeVar("ModelT", bound=nn.Module)


def faked(model: ModelT) -> ModelT:
    """Give a model that was built on "meta" fake weights on a CPU, and return it.

    Build it outside `FakeTensorMode(allow_non_fake_inputs=True)`; call this, and run
    the model, within. Operators then run as they do on that device, and compute
    nothing but shapes. On "meta" itself other kernels run, which keep other things.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> layer = nn.Linear(1 << 20, 1 << 20, device="meta")
    >>> with FakeTensorMode(allow_non_fake_inputs=True):
    ...     out = faked(layer)(torch.ones(1, 1 << 20))
    >>> out.device, out.shape
    (device(type='cpu'), torch.Size([1, 1048576]))
    """
    fakes = {
        parameter: nn.Parameter(_like(parameter), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # One that modules share stays one.
            module.register_parameter(name, fakes[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _like(buffer))
    return model


def _like(tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
