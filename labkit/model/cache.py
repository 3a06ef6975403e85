"""The cache of a decoder: one preallocated block, filled by position."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from labkit.config import ModelConfig


class LatentCache:
    """Entries of all tokens so far, a row per layer, sequence and position."""

    def __init__(
        self,
        cfg: ModelConfig,
        batch: int,
        max_seq: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        shape = (cfg.n_layers, batch, max_seq, cfg.attention.cache_width)
        self.entries = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * batch

    def reserve(self, batch: int, n_new: int) -> "Window":
        """Return the window into which the next `n_new` tokens go."""
        start = torch.tensor(self.lengths)
        positions = start.unsqueeze(-1) + torch.arange(n_new)
        return Window(self, positions, self.lengths[0], n_new)


@dataclass
class Window:
    cache: LatentCache
    positions: Tensor
    start: int
    n_new: int

    def layer(self, index):
        return LayerWindow(self.cache.entries[index], self.start, self.n_new)

    def commit(self):
        self.cache.lengths = [n + self.n_new for n in self.cache.lengths]


@dataclass
class LayerWindow:
    entries: Tensor
    start: int
    n_new: int

    mask = None

    def extend(self, new):
        end = self.start + self.n_new
        self.entries[:, self.start : end] = new
        return self.entries[:, :end]
