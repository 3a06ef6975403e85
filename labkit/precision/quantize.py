"""Tiles of narrow numbers with a scale each (DeepSeek-V3, section 3.3.2).

A tile's largest magnitude is mapped to the format's largest value, or below it where
scales are powers of two (UE8M0, one byte each). Such a scale moves the exponent alone:
values that are tiled anew stay as they are, and a product of dequantized BF16 operands
is the product of the FP8 ones. The value divided by is the scale as it is stored.

A tile that holds an infinity or NaN becomes NaN as a whole, scale and values: an FP8
cast by itself would hide an infinity as 448.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from labkit.config.checks import require_above, require_choice
from labkit.model.checkpoint_fp8 import up_to_power_of_two
from labkit.model.checks import has_values
from labkit.precision.formats import FORMATS, Format, decode, encode, encode_in_range

TILES = ((1, 128), (128, 1), (128, 128), "row", "tensor")
"""Rows and columns that share a scale: activations, their wgrad, weights; and coarser
ones, a row of any length or a whole matrix."""

SCALES = ("po2", "fp32")
"""Kinds of scales: powers of two, stored as UE8M0, or any number of FP32."""

Tile = tuple[int, int] | Literal["row", "tensor"]

WIDE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of what is quantized."""

BLOCK = 1 << 18
"""Values that a CPU quantizes, or reads, at a time: with what is computed from them
they stay in its cache."""


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

    @property
    def scale_dtype(self) -> torch.dtype:
        """In which scales are stored."""
        return torch.float8_e8m0fnu if self.scale == "po2" else torch.float32

    def tile_of(self, n_rows: int, n_columns: int) -> tuple[int, int]:
        """Return rows and columns of a tile in such a matrix."""
        if self.tile == "tensor":
            return n_rows, n_columns
        return (1, n_columns) if self.tile == "row" else self.tile


@dataclass(frozen=True, slots=True, eq=False)
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
        numbers, n_columns = self.spec.numbers, self.n_columns
        if not numbers.needs_scale:
            return decode(self.data, numbers, n_columns, dtype)
        scale = self.scale.to(dtype)
        tile = self.spec.tile_of(*self.shape[-2:])
        if _is_one_block(self.data):
            values = decode(self.data, numbers, n_columns, dtype)
            return _scale_back(values, scale, tile)
        out = scale.new_empty(self.shape)
        for target, stored, scales in _blocks(tile, out, self.data, scale):
            values = decode(stored, numbers, n_columns, dtype)
            target.copy_(_scale_back(values, scales, tile))
        return out

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
        ValueError: no matrix, one without values, or values that FP32 does not hold.
    """
    if x.dtype not in WIDE:
        raise ValueError(
            "x must be in FP32, BF16 or FP16, which FP32 holds exactly; got "
            f"{str(x.dtype).removeprefix('torch.')}. Pass x.float()."
        )
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(
            "x must be a matrix, or a stack of them, with one value at least; got "
            f"shape {tuple(x.shape)}. Pass a vector as x.unsqueeze(0)."
        )
    x = x.detach()
    if not spec.numbers.needs_scale:
        no_scale = x.new_empty(0, 0, dtype=torch.float32)
        return QTensor(encode(x, spec.numbers), no_scale, spec, x.shape[-1])
    run = _in_whole_tiles if is_compiled else _in_blocks
    return QTensor(*run(x, spec), spec, x.shape[-1])


def dequantize(
    q: QTensor, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*b r c"]:
    """Return `q.dequantize(dtype)`."""
    return q.dequantize(dtype)


def _in_blocks(
    x: Float[Tensor, "*b r c"], spec: QuantSpec
) -> tuple[Shaped[Tensor, "*b r k"], Shaped[Tensor, "*b tr tc"]]:
    """Return values and scales as they are stored, computed while they are cached."""
    tile = _cut(spec.tile_of(*x.shape[-2:]), x)
    if _is_one_block(x):
        return _in_one_piece(x, tile, spec)
    n_tiles = (-(-x.shape[-2] // tile[0]), -(-x.shape[-1] // tile[1]))
    width = spec.numbers.stored_width(x.shape[-1])
    data = x.new_empty(*x.shape[:-1], width, dtype=spec.numbers.dtype)
    scale = x.new_empty(*x.shape[:-2], *n_tiles, dtype=spec.scale_dtype)
    for part, *stored in _blocks(tile, x, data, scale):
        for target, values in zip(stored, _in_one_piece(part, tile, spec), strict=True):
            target.copy_(values)
    return data, scale


def _in_one_piece(
    x: Float[Tensor, "*b r c"], tile: tuple[int, int], spec: QuantSpec
) -> tuple[Shaped[Tensor, "*b r k"], Shaped[Tensor, "*b tr tc"]]:
    scaled, scale = _scaled(_filled_up(x.float(), tile), tile, spec)
    inner = scaled[..., : x.shape[-2], : x.shape[-1]].contiguous()
    data = encode_in_range(inner, spec.numbers)
    return data, scale.to(spec.scale_dtype).contiguous()


def _in_whole_tiles(
    x: Float[Tensor, "*b r c"], spec: QuantSpec
) -> tuple[Shaped[Tensor, "*b r k"], Shaped[Tensor, "*b tr tc"]]:
    """Return values and scales, computed by compiled code."""
    n_rows, n_columns = x.shape[-2:]
    tile = spec.tile_of(n_rows, n_columns)
    # Never compiled: PyTorch 2.13 was seen to store wrong bytes at such edges.
    data, scale = _compiled()(_filled_up(x, tile), tile, spec)
    width = spec.numbers.stored_width(n_columns)
    return data[..., :n_rows, :width].contiguous(), scale.to(spec.scale_dtype)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_values_and_scales, dynamic=False)


def _values_and_scales(
    x: Float[Tensor, "*b r c"], tile: tuple[int, int], spec: QuantSpec
) -> tuple[Shaped[Tensor, "*b r k"], Float[Tensor, "*b tr tc"]]:
    """Return the values of whole tiles as they are stored, and scales in FP32."""
    scaled, scale = _scaled(x.float(), tile, spec)
    return encode_in_range(scaled, spec.numbers), scale


def _scaled(
    x: Float[Tensor, "*b r c"], tile: tuple[int, int], spec: QuantSpec
) -> tuple[Float[Tensor, "*b r c"], Float[Tensor, "*b tr tc"]]:
    """Return the values of whole tiles over their scales, and these."""
    tiles = _tiled(x, tile)
    magnitudes = tiles.abs()
    # One axis after the other: both at once take half as long again.
    scale = tile_scales(magnitudes.amax(-1).amax(-2), spec)
    scaled = torch.div(tiles, _over_tiles(scale), out=magnitudes)
    return scaled.reshape(x.shape), scale


def tile_scales(largest: Float[Tensor, "*t"], spec: QuantSpec) -> Float[Tensor, "*t"]:
    """Return the scales of tiles by their largest magnitude, in FP32.

    >>> largest = torch.tensor([448.0, 449.0, 0.0, torch.inf])
    >>> tile_scales(largest, QuantSpec()).tolist()
    [1.0, 2.0, 3.552713678800501e-15, nan]
    """
    scale = largest.clamp_min(spec.least).div_(spec.numbers.largest)
    if spec.scale == "po2":
        scale = up_to_power_of_two(scale)
    return torch.where(largest < torch.inf, scale, torch.nan)


def _is_one_block(x: Shaped[Tensor, "..."]) -> bool:
    """Return whether a tensor is one block; on devices other than a CPU, all are."""
    return x.numel() <= BLOCK or not x.is_cpu or not has_values(x)


def _blocks(
    tile: tuple[int, int], *tensors: Shaped[Tensor, "..."]
) -> Iterator[tuple[Shaped[Tensor, "m r c"], ...]]:
    """Yield whole matrices of stacks, or rows of one, `BLOCK` values or so a time.

    Args:
        tile: rows and columns of a tile.
        tensors: some with as many rows as the first, and last the tiles' scales.
    """
    *tensors, scale = (each.reshape(-1, *each.shape[-2:]) for each in tensors)
    n_rows, n_columns = tensors[0].shape[-2:]
    n_matrices = max(BLOCK // (n_rows * n_columns), 1)
    n_tiles = max(BLOCK // (tile[0] * n_columns), 1)
    for *stacks, scales in zip(
        *(each.split(n_matrices) for each in (*tensors, scale)), strict=True
    ):
        rows = (each.split(n_tiles * tile[0], dim=-2) for each in stacks)
        yield from zip(*rows, scales.split(n_tiles, dim=-2), strict=True)


def _cut(tile: tuple[int, int], x: Tensor) -> tuple[int, int]:
    """Return the tile, or what of it such a matrix has: it needs no zeros then."""
    return min(tile[0], x.shape[-2]), min(tile[1], x.shape[-1])


def _filled_up(
    x: Float[Tensor, "*b r c"], tile: tuple[int, int]
) -> Float[Tensor, "*b r1 c1"]:
    """Return whole tiles, with zeros beyond the edges."""
    edges = (0, -x.shape[-1] % tile[1], 0, -x.shape[-2] % tile[0])
    return F.pad(x, edges) if any(edges) else x


def _scale_back(
    values: Float[Tensor, "*b r c"],
    scale: Float[Tensor, "*b tr tc"],
    tile: tuple[int, int],
) -> Float[Tensor, "*b r c"]:
    """Multiply values by the scales of their tiles in place, and return them."""
    for rows, row_scale in _whole_and_cut(values, scale, tile[0], -2):
        for part, part_scale in _whole_and_cut(rows, row_scale, tile[1], -1):
            _tiled(part, _cut(tile, part)).mul_(_over_tiles(part_scale))
    return values


def _whole_and_cut(
    values: Float[Tensor, "*b r c"],
    scale: Float[Tensor, "*b tr tc"],
    size: int,
    dim: int,
) -> Iterator[tuple[Float[Tensor, "*b r2 c2"], Float[Tensor, "*b tr2 tc2"]]]:
    """Yield the whole tiles along an axis, and the cut ones, with their scales."""
    n_tiles, rest = divmod(values.shape[dim], size)
    if not n_tiles or not rest:
        yield values, scale
        return
    parts = values.split([n_tiles * size, rest], dim)
    yield from zip(parts, scale.split([n_tiles, 1], dim), strict=True)


def _tiled(
    x: Float[Tensor, "*b r c"], tile: tuple[int, int]
) -> Float[Tensor, "*b tr r1 tc c1"]:
    """Return rows and columns by tile, and within tiles."""
    *stack, n_rows, n_columns = x.shape
    n_tiles = n_rows // tile[0], n_columns // tile[1]
    return x.view(*stack, n_tiles[0], tile[0], n_tiles[1], tile[1])


def _over_tiles(scale: Float[Tensor, "*b tr tc"]) -> Float[Tensor, "*b tr 1 tc 1"]:
    return scale.unsqueeze(-1).unsqueeze(-3)
