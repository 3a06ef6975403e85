"""A hard tensor, and which tiles keep it: what the quantization explorer computes.

Rows are tokens. One channel is an outlier, as activations have them; a share of the
tokens is tiny, as gradients have them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from labkit.precision import (
    FORMATS,
    QTensor,
    QuantizationReport,
    QuantSpec,
    quantization_error,
    quantize,
)
from labkit.precision.quantize import Tile

N_TOKENS, N_CHANNELS = 256, 512

OUTLIER = 77
"""The channel whose values are large."""

TINY = 1e-5
"""Size of the small tokens, by that of the others."""

MOST_LOST = 0.01
"""Share of values that may become zero."""

TILES: Mapping[str, Tile] = MappingProxyType(
    {
        "1×128 (of a token)": (1, 128),
        "128×1 (of a channel)": (128, 1),
        "128×128": (128, 128),
        "a row (a token)": "row",
        "the whole tensor": "tensor",
    }
)

SCALES = MappingProxyType({"power of two": "po2", "FP32": "fp32"})

NARROW = MappingProxyType({"E4M3": "e4m3", "E5M2": "e5m2", "E5M6": "e5m6"})
"""Formats by name, that with the fewest bits and the finest steps first."""


def most_error(name: str) -> float:
    """Return the share of itself that a token loses by rounding at most: half a step.

    A token that loses more has values below the format's smallest normal one.

    >>> most_error("e4m3")
    0.0625
    """
    return 2.0 ** -(FORMATS[name].mantissa_bits + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A tensor in tiles of one kind, and what became of it."""

    q: QTensor
    report: QuantizationReport

    @property
    def n_scales(self) -> int:
        return self.q.scale.numel()

    @property
    def keeps_tokens(self) -> bool:
        """Whether no token loses more than by rounding."""
        return self.report.worst_row <= most_error(self.q.spec.format)

    @property
    def keeps_values(self) -> bool:
        """Whether hardly any value becomes zero."""
        return self.report.underflow <= MOST_LOST

    @property
    def will_do(self) -> bool:
        return self.keeps_tokens and self.keeps_values


@dataclass(frozen=True, kw_only=True)
class HardTensor:
    """A tensor that is hard to quantize, and the ways that were chosen to do it."""

    outlier: float
    """Size of the outlier channel, by that of the others."""

    tiny_percent: float
    """Share of tokens that are `TINY`."""

    format: str
    """A name of `NARROW`."""

    scale: str
    """A name of `SCALES`."""

    @cached_property
    def x(self) -> Float[Tensor, "tokens channels"]:
        """The tensor; the same values each time, but for what is scaled."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(N_TOKENS, N_CHANNELS, generator=generator)
        order = torch.randperm(N_TOKENS, generator=generator)
        x[:, OUTLIER] *= self.outlier
        x[order[: round(N_TOKENS * self.tiny_percent / 100)]] *= TINY
        return x

    def try_tile(self, tile: str) -> Trial:
        """Return the tensor in tiles of a name of `TILES`."""
        spec = QuantSpec(
            format=NARROW[self.format], tile=TILES[tile], scale=SCALES[self.scale]
        )
        q = quantize(self.x, spec)
        return Trial(q=q, report=quantization_error(self.x, q))

    @cached_property
    def trials(self) -> dict[str, Trial]:
        """What became of it in each kind of tile."""
        return {name: self.try_tile(name) for name in TILES}

    @property
    def cheapest(self) -> str | None:
        """The tiles that will do with the fewest scales."""
        will_do = {name: each for name, each in self.trials.items() if each.will_do}
        return min(will_do, key=lambda name: will_do[name].n_scales, default=None)

    @property
    def least_bad(self) -> str:
        """The tiles that leave most of the values, and of the tokens, where none do."""

        def harm(name: str) -> tuple[bool, float]:
            trial = self.trials[name]
            return not trial.keeps_tokens, trial.report.underflow

        return min(TILES, key=harm)

    @cached_property
    def wider(self) -> tuple[str, str] | None:
        """Return another format in which some tiles will do, and those tiles."""
        for name in NARROW:
            other = replace(self, format=name)
            if name != self.format and other.cheapest is not None:
                return name, other.cheapest
        return None


@lru_cache(maxsize=2)
def hard_tensor(
    outlier: float, tiny_percent: float, fmt: str, scale: str
) -> HardTensor:
    """Return a tensor with what was found out about it; the last ones are remembered.

    A figure and the sentence beside it ask for the same.
    """
    return HardTensor(
        outlier=outlier, tiny_percent=tiny_percent, format=fmt, scale=scale
    )
