"""Linear layers without bias, and the product of a single row."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

SMALL = 1 << 14
"""Values below which a weight is not worth sharing between cores."""


def linear(
    x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"]
) -> Float[Tensor, "*b o"]:
    """Return `x` times the transposed weight, by the kernel that serves its shape.

    A single row costs the reading of the weight. On a CPU PyTorch's own product of one
    row reads FP32 weights on one core, at 7 GB/s when they are not in its cache, which
    in decoding they never are. As a batch of two products, one for each half of the
    outputs, it was measured to take 13 µs instead of 33 for 256 x 256 on two cores,
    63 instead of 228 for 1024 x 1024.
    """
    n_out, n_in = weight.shape
    is_row = x.numel() == n_in and x.dtype == weight.dtype == torch.float32
    if is_row and n_out % 2 == 0 and n_out * n_in >= SMALL and x.is_cpu:
        column = x.mT.expand(2, -1, -1)
        halves = torch.bmm(weight.view(2, -1, n_in), column)
        return halves.view(*x.shape[:-1], n_out)
    return F.linear(x, weight)


class Linear(nn.Linear):
    """A linear layer without bias, fast for one row too."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        return linear(x, self.weight)
