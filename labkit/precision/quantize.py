"""Tiles of narrow numbers with a scale each (DeepSeek-V3, section 3.3.2).

A tile's largest magnitude is mapped to the format's largest value, or below it where
scales are powers of two (UE8M0, one byte each). Such a scale moves the exponent alone:
values that are tiled anew stay as they are, and a product of dequantized BF16 operands
is the product of the FP8 ones. The value divided by is the scale as it is stored.

A tile that holds an infinity or NaN becomes NaN as a whole, scale and values: an FP8
cast by itself would hide an infinity as 448.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from labkit.config.checks import require_above, require_choice
from labkit.precision.formats import FORMATS, Format, decode, encode

TILES = ((1, 128), (128, 1), (128, 128), "row", "tensor")
"""Rows and columns that share a scale: activations, their wgrad, weights; and coarser
ones, a row of any length or a whole matrix."""

SCALES = ("po2", "fp32")
"""Kinds of scales: powers of two, stored as UE8M0, or any number of FP32."""

Tile = tuple[int, int] | Literal["row", "tensor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantSpec:
    """How a matrix is quantized."""

    format: str = "e4m3"

    tile: Tile = (1, 128)
    """One of `TILES`, or rows and columns of another; those at the edges are cut."""

    scale: str = "po2"
    """One of `SCALES`. BF16 has the range of FP32, and so no scales and no tiles."""

    least: float = 1e-12
    """Magnitude below which a tile counts as zero. The published kernels take 1e-4,
    which leaves nothing of small gradients."""

    def __post_init__(self) -> None:
        require_choice({"format": self.format}, tuple(FORMATS))
        require_choice({"scale": self.scale}, SCALES)
        require_above({"least": self.least}, 1e-30)
        if self.tile in ("row", "tensor"):
            return
        is_pair = isinstance(self.tile, tuple) and len(self.tile) == 2
        if not is_pair or not all(type(n) is int and n > 0 for n in self.tile):
            raise ValueError(
                "tile must be (rows, columns), each 1 or more, 'row' or 'tensor'; got "
                f"{self.tile!r}. Set tile=(1, 128) for activations, (128, 128) for "
                "weights."
            )

    @property
    def numbers(self) -> Format:
        """The format of the values."""
        return FORMATS[self.format]

    def tile_of(self, n_rows: int, n_columns: int) -> tuple[int, int]:
        """Return rows and columns of a tile in such a matrix."""
        if self.tile == "tensor":
            return n_rows, n_columns
        return (1, n_columns) if self.tile == "row" else self.tile


@dataclass(frozen=True, slots=True)
class QTensor:
    """A matrix, or a stack of them, in narrow numbers with a scale per tile."""

    data: Shaped[Tensor, "*b r k"]
    """Values as they are stored; rows of packed formats are bytes."""

    scale: Shaped[Tensor, "*b tr tc"]
    """What the values of a tile are to be multiplied by, in FP32 or UE8M0; empty for
    BF16."""

    spec: QuantSpec

    n_columns: int

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that this stands for."""
        return torch.Size((*self.data.shape[:-1], self.n_columns))

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales.

        >>> quantize(torch.ones(256, 256), QuantSpec()).nbytes
        66048
        """
        return self.data.nbytes + self.scale.nbytes

    def n_nonfinite_tiles(self) -> int:
        """Return how many tiles held an infinity or NaN, and are NaN now.

        >>> quantize(torch.tensor([[1.0, torch.inf]]), QuantSpec()).n_nonfinite_tiles()
        1
        """
        return int(self.scale.float().isnan().sum())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*b r c"]:
        """Return what this stands for; exact in BF16 where scales are powers of two."""
        values = decode(self.data, self.spec.numbers, self.n_columns, dtype)
        if not self.spec.numbers.needs_scale:
            return values
        scale = self.scale.to(torch.float32).to(dtype)
        tile = self.spec.tile_of(*values.shape[-2:])
        if _is_even(values, tile):
            return _tiled(values, tile).mul_(_over_tiles(scale)).view(values.shape)
        for axis, size in ((-2, tile[0]), (-1, tile[1])):
            scale = scale.repeat_interleave(size, dim=axis)
        return values.mul_(scale[..., : values.shape[-2], : values.shape[-1]])

    def retile(self, tile: Tile) -> "QTensor":
        """Return the same values in other tiles.

        Exact with scales that are powers of two, but for values that a tile's largest
        one now pushes below the format's smallest. With others each is rounded again.
        """
        return quantize(self.dequantize(), replace(self.spec, tile=tile))


def quantize(
    x: Float[Tensor, "*b r c"], spec: QuantSpec, *, is_compiled: bool = False
) -> QTensor:
    """Return a matrix, or each of a stack, in tiles of narrow numbers.

    Args:
        x: rows are tokens or outputs; a batch of sequences is to be flattened first,
            or its tiles end with each sequence.
        spec: format, tiles and scales.
        is_compiled: whether to compile for this shape, which takes seconds once; the
            bytes are the same.

    >>> x = torch.tensor([[100.0, -7.0, 0.3, 0.0]])
    >>> quantize(x, QuantSpec()).dequantize().tolist()
    [[96.0, -7.0, 0.3125, 0.0]]

    Raises:
        ValueError: no matrix, or one without values.
    """
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(
            "x must be a matrix, or a stack of them, with one value at least; got "
            f"shape {tuple(x.shape)}. Pass a vector as x.unsqueeze(0)."
        )
    if not spec.numbers.needs_scale:
        no_scale = x.new_empty(0, 0, dtype=torch.float32)
        return QTensor(encode(x, spec.numbers), no_scale, spec, x.shape[-1])
    n_rows, n_columns = x.shape[-2:]
    tile = spec.tile_of(n_rows, n_columns)
    # Never compiled: PyTorch 2.13 was seen to store wrong bytes at such edges.
    edges = (0, -n_columns % tile[1], 0, -n_rows % tile[0])
    whole = F.pad(x, edges) if any(edges) else x
    run = _compiled() if is_compiled else _values_and_scales
    data, scale = run(whole, tile, spec)
    width = spec.numbers.stored_width(n_columns)
    return QTensor(data[..., :n_rows, :width].contiguous(), scale, spec, n_columns)


def dequantize(
    q: QTensor, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*b r c"]:
    """Return `q.dequantize(dtype)`."""
    return q.dequantize(dtype)


def _values_and_scales(
    x: Float[Tensor, "*b r c"], tile: tuple[int, int], spec: QuantSpec
) -> tuple[Shaped[Tensor, "*b r k"], Shaped[Tensor, "*b tr tc"]]:
    """Return the stored values and the scales of whole tiles."""
    tiles = _tiled(x.float(), tile)
    # One axis after the other: both at once take half as long again.
    scale = tile_scales(tiles.abs().amax(-1).amax(-2), spec)
    scaled = tiles / _over_tiles(scale.float())
    return encode(scaled.flatten(-4, -3).flatten(-2), spec.numbers), scale


def tile_scales(largest: Float[Tensor, "*t"], spec: QuantSpec) -> Shaped[Tensor, "*t"]:
    """Return the scales of tiles by their largest magnitude.

    >>> largest = torch.tensor([448.0, 449.0, 0.0, torch.inf])
    >>> tile_scales(largest, QuantSpec()).float().tolist()
    [1.0, 2.0, 3.552713678800501e-15, nan]
    """
    scale = largest.clamp_min(spec.least) / spec.numbers.largest
    if spec.scale == "po2":
        exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23  # rounded up
        scale = (exponent << 23).view(torch.float32)
    scale = scale.masked_fill(~largest.isfinite(), torch.nan)
    return scale.to(torch.float8_e8m0fnu) if spec.scale == "po2" else scale


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_values_and_scales, dynamic=False)


def _is_even(x: Tensor, tile: tuple[int, int]) -> bool:
    return x.shape[-2] % tile[0] == 0 and x.shape[-1] % tile[1] == 0


def _tiled(
    x: Float[Tensor, "*b r c"], tile: tuple[int, int]
) -> Float[Tensor, "*b tr r1 tc c1"]:
    """Return rows and columns by tile, and within tiles."""
    return x.unflatten(-1, (-1, tile[1])).unflatten(-3, (-1, tile[0]))


def _over_tiles(scale: Float[Tensor, "*b tr tc"]) -> Float[Tensor, "*b tr 1 tc 1"]:
    return scale.unsqueeze(-1).unsqueeze(-3)
