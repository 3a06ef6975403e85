"""Rows of gradients as fewer bytes: BF16, FP8, int8, or the largest values alone.

    codec     bytes of n values            what is lost
    fp32      4 n                          nothing; the measure of the others
    bf16      2 n                          16 of 24 bits of the mantissa
    fp8       n + n / 128                  all but 4 bits, and what is 2^-15 of a tile's
                                           largest value or less
    int8      n + 4 n / 128                what is 1 / 254 of a tile's largest value
    top-k     8 s n, with a share of s     all but the largest values

Tiles are 128 values long. The parts of a row of the first three begin at multiples of 8
bytes.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from labkit.config.checks import require_above, require_choice
from labkit.parallel.communication.payload import FORMATS, RowFormat

TILE = 128
"""Values that share a scale."""

LARGEST = 127
"""Of int8; -128 is not used, so that signs are alike."""

LEAST = 1e-30
"""Magnitude below which a tile of int8 counts as zero."""


@runtime_checkable
class Codec(Protocol):
    """A way to write rows of FP32 values as bytes."""

    @property
    def name(self) -> str:
        """What it is called in tables."""
        ...

    def n_bytes(self, n_values: int) -> int:
        """Return the bytes of a row."""
        ...

    def encode(self, rows: Float[Tensor, "p n"]) -> UInt8[Tensor, "p bytes"]:
        """Return rows as bytes."""
        ...

    def decode(
        self, rows: UInt8[Tensor, "p bytes"], n_values: int
    ) -> Float[Tensor, "p n"]:
        """Return the values that the bytes stand for."""
        ...


@dataclass(frozen=True, slots=True)
class Narrow:
    """Values in a narrower format; FP8 with a power of two as scale of each tile.

    >>> Narrow("bf16").n_bytes(1024), Narrow("fp8").n_bytes(1024)
    (2048, 1032)
    """

    format: str = "bf16"

    def __post_init__(self) -> None:
        require_choice({"format": self.format}, FORMATS)

    @property
    def name(self) -> str:
        """The format."""
        return self.format

    def n_bytes(self, n_values: int) -> int:
        """Return the bytes of a row."""
        return self._rows(n_values).n_bytes

    def encode(self, rows: Float[Tensor, "p n"]) -> UInt8[Tensor, "p bytes"]:
        """Return rows as bytes."""
        return self._rows(rows.shape[1]).pack(rows)

    def decode(
        self, rows: UInt8[Tensor, "p bytes"], n_values: int
    ) -> Float[Tensor, "p n"]:
        """Return the values that the bytes stand for."""
        return self._rows(n_values).values(rows)

    def _rows(self, n_values: int) -> RowFormat:
        return RowFormat(dim=n_values, format=self.format)


@dataclass(frozen=True, slots=True)
class Int8:
    """Whole numbers from -127 to 127, with an FP32 scale for each tile.

    A tile with an infinity or NaN becomes NaN as a whole.

    >>> Int8().n_bytes(1024)
    1056
    """

    @property
    def name(self) -> str:
        """The format."""
        return "int8"

    def n_bytes(self, n_values: int) -> int:
        """Return the bytes of a row."""
        return n_values + 4 * -(-n_values // TILE)

    def encode(self, rows: Float[Tensor, "p n"]) -> UInt8[Tensor, "p bytes"]:
        """Return rows as bytes: scales, then values."""
        n_values = rows.shape[1]
        tiles = F.pad(rows, (0, -n_values % TILE)).unflatten(1, (-1, TILE))
        scales = tiles.abs().amax(dim=-1, keepdim=True).clamp_min(LEAST) / LARGEST
        scales = torch.where(scales < torch.inf, scales, torch.nan)
        # What a NaN becomes is of no account: its scale is NaN.
        whole = (tiles / scales).round().nan_to_num(0).to(torch.int8)
        values = whole.flatten(1)[:, :n_values]
        return torch.cat([_bytes(scales.flatten(1)), _bytes(values)], dim=1)

    def decode(
        self, rows: UInt8[Tensor, "p bytes"], n_values: int
    ) -> Float[Tensor, "p n"]:
        """Return the values that the bytes stand for."""
        scales, values = rows.split([rows.shape[1] - n_values, n_values], dim=1)
        factors = _read(scales, torch.float32)
        factors = factors.repeat_interleave(TILE, dim=1)[:, :n_values]
        return _read(values, torch.int8) * factors


@dataclass(frozen=True, slots=True)
class TopK:
    """The largest magnitudes of a row with their places; all others count as zero.

    >>> TopK(0.01).n_bytes(1000)
    80
    """

    share: float = 0.01
    """Of the values of a row; at least one is sent."""

    def __post_init__(self) -> None:
        require_above({"share": self.share}, 0)
        if self.share > 1:
            raise ValueError(
                f"share is a part of the values and must be at most 1; got "
                f"{self.share}. Set share=0.01 to send one of a hundred."
            )

    @property
    def name(self) -> str:
        """The share that is sent."""
        return f"top {100 * self.share:g}%"

    def n_bytes(self, n_values: int) -> int:
        """Return the bytes of a row."""
        return 8 * self._count(n_values)

    def encode(self, rows: Float[Tensor, "p n"]) -> UInt8[Tensor, "p bytes"]:
        """Return rows as bytes: values, then places."""
        places = rows.abs().topk(self._count(rows.shape[1]), dim=1).indices
        values = rows.gather(1, places)
        return torch.cat([_bytes(values), _bytes(places.int())], dim=1)

    def decode(
        self, rows: UInt8[Tensor, "p bytes"], n_values: int
    ) -> Float[Tensor, "p n"]:
        """Return the values that the bytes stand for."""
        values, places = rows.chunk(2, dim=1)
        out = torch.zeros(len(rows), n_values, device=rows.device)
        places = _read(places, torch.int32).long()
        return out.scatter_(1, places, _read(values, torch.float32))

    def _count(self, n_values: int) -> int:
        return max(1, math.ceil(self.share * n_values))


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _read(rows: Tensor, dtype: torch.dtype) -> Tensor:
    # A copy, because numbers of 4 bytes must begin at multiples of 4.
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)
