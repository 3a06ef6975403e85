"""Root-mean-square normalisation, and the dtype that matrix products run in."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def compute_dtype(x: Float[Tensor, "..."]) -> torch.dtype:
    """Return the dtype in which matrix products on `x` run: autocast's, or its own."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class RMSNorm(nn.Module):
    """Scale vectors to unit root mean square, then by a learnt gain.

    Under autocast the result is cast once here, not by each linear that reads it.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        normed = F.rms_norm(x, self.weight.shape, self.weight.type_as(x), self.eps)
        return normed.to(compute_dtype(x))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps:g}"
