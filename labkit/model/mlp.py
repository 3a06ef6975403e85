"""The SwiGLU feed-forward network: w2(silu(w1 x) · w3 x)."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from labkit.model.linear import Linear


class MLP(nn.Module):
    """A dense SwiGLU network; also the shared experts, as one of their joint width."""

    def __init__(self, dim: int, inter_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, inter_dim)
        self.w2 = Linear(inter_dim, dim)
        self.w3 = Linear(dim, inter_dim)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
