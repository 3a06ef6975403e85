"""Narrow floating-point formats: what they can say, and how a tensor is stored in them.

    format  bits  largest  smallest normal  smallest  used by DeepSeek-V3 for
    e4m3       8      448            2^-6      2^-9   operands of FP8 products
    e5m2       8    57344           2^-14     2^-16   nothing: its tiles need no range
    e5m6      12    65024           2^-14     2^-20   inputs of the output projection
    bf16      16   3.4e38          2^-126    2^-133   what stays high

E4M3 is the variant without infinity. E5M6 is taken to be like IEEE's, because the
report (section 3.3.3) prints the widths of its fields only. No processor stores 12
bits: two values lie in three bytes here.

Values beyond the largest become the largest, but in BF16, which has infinities as FP32
has. NaN stays NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from labkit.model.checks import has_values

PACKED_BYTES = 3
"""What two values of 12 bits take together."""

PAIRS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.bfloat16: torch.int32,
        torch.float16: torch.int32,
        torch.float32: torch.int64,
    }
)
"""What is as wide as two numbers of a dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A floating-point format of so many bits, one of them the sign."""

    name: str
    exponent_bits: int
    mantissa_bits: int

    largest: float
    """Largest finite value."""

    dtype: torch.dtype
    """In which values are stored; `uint8` where PyTorch has no such dtype."""

    @property
    def bits(self) -> int:
        """Width of a value.

        >>> {name: fmt.bits for name, fmt in FORMATS.items()}
        {'e4m3': 8, 'e5m2': 8, 'e5m6': 12, 'bf16': 16}
        """
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Smallest value with all bits of the mantissa."""
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1))

    @property
    def smallest(self) -> float:
        """Smallest value above zero.

        >>> FORMATS["e4m3"].smallest == 2**-9
        True
        """
        return self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def needs_scale(self) -> bool:
        """Whether its exponent has less range than FP32's."""
        return self.exponent_bits < 8

    @property
    def is_packed(self) -> bool:
        """Whether two values lie in three bytes."""
        return self.dtype == torch.uint8

    def stored_width(self, n_columns: int) -> int:
        """Return the entries of a stored row: its values, or bytes if it is packed.

        >>> FORMATS["e4m3"].stored_width(7), FORMATS["e5m6"].stored_width(7)
        (7, 12)
        """
        return -(-n_columns // 2) * PACKED_BYTES if self.is_packed else n_columns


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            Format(
                name="e4m3",
                exponent_bits=4,
                mantissa_bits=3,
                largest=448.0,
                dtype=torch.float8_e4m3fn,
            ),
            Format(
                name="e5m2",
                exponent_bits=5,
                mantissa_bits=2,
                largest=57344.0,
                dtype=torch.float8_e5m2,
            ),
            Format(
                name="e5m6",
                exponent_bits=5,
                mantissa_bits=6,
                largest=65024.0,
                dtype=torch.uint8,
            ),
            Format(
                name="bf16",
                exponent_bits=8,
                mantissa_bits=7,
                largest=torch.finfo(torch.bfloat16).max,
                dtype=torch.bfloat16,
            ),
        )
    }
)
"""Formats by name."""


def encode(x: Float[Tensor, "*b c"], fmt: Format) -> Shaped[Tensor, "*b k"]:
    """Return the values nearest to FP32 ones, ties to even, as they are stored.

    Args:
        x: in FP32: a cast from BF16 that is not widened first rounds twice.
        fmt: the format. A packed one takes 3 bytes for every 2 values of a row, an odd
            last one among them.

    >>> encode(torch.tensor([0.3, 1000.0, -1e-9]), FORMATS["e4m3"]).float().tolist()
    [0.3125, 448.0, -0.0]
    """
    if fmt.needs_scale:
        x = x.clamp(-fmt.largest, fmt.largest)
    return encode_in_range(x, fmt)


def encode_in_range(x: Float[Tensor, "*b c"], fmt: Format) -> Shaped[Tensor, "*b k"]:
    """Return `encode(x, fmt)` of values that round to none beyond the largest."""
    return _packed(_codes_e5m6(x)) if fmt.is_packed else x.to(fmt.dtype)


def decode(
    stored: Shaped[Tensor, "*b k"], fmt: Format, n_columns: int, dtype: torch.dtype
) -> Float[Tensor, "*b c"]:
    """Return what the stored values of rows of `n_columns` stand for.

    >>> kept = encode(torch.tensor([[0.3, 1000.0, -7.77]]), FORMATS["e5m6"])
    >>> kept.shape, decode(kept, FORMATS["e5m6"], 3, torch.float32).tolist()
    (torch.Size([1, 6]), [[0.30078125, 1000.0, -7.75]])
    """
    if fmt.is_packed:
        codes = _unpacked(stored)[..., :n_columns]
        half = (codes << 4).to(torch.int16).view(torch.float16)
        return half.to(dtype)
    is_byte = fmt.bits == 8 and stored.is_cpu and has_values(stored)
    if is_byte and not torch.compiler.is_compiling():
        return _looked_up(stored, dtype)
    return stored.to(dtype, copy=True)


def _looked_up(stored: Shaped[Tensor, "*b c"], dtype: torch.dtype) -> Tensor:
    """Return the values of bytes from a table: a CPU's cast takes six times as long.

    Two are looked up at once where they lie as numbers of 16 bits do.
    """
    codes = stored.contiguous().view(torch.uint8).flatten()
    pair = PAIRS.get(dtype)
    if pair is None or codes.numel() % 2 or codes.storage_offset() % 2:
        table = torch.arange(256, dtype=torch.uint8).view(stored.dtype).to(dtype)
        return table.index_select(0, codes.int()).view(stored.shape)
    table = _table_of_pairs(stored.dtype, dtype, pair)
    pairs = table.index_select(0, codes.view(torch.uint16).int())
    return pairs.view(dtype).view(stored.shape)


@cache
def _table_of_pairs(
    narrow: torch.dtype, dtype: torch.dtype, pair: torch.dtype
) -> Shaped[Tensor, "65536"]:
    """Return what any two bytes stand for: two numbers, as one of twice the width."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    return codes.view(narrow).to(dtype).view(pair)


def _codes_e5m6(x: Float[Tensor, "*b c"]) -> Int[Tensor, "*b c"]:
    """Return the 12 bits of each value: the upper ones of its nearest FP16 number."""
    dropped = 23 - 6  # bits of FP32's mantissa
    bits = x.abs().contiguous().view(torch.int32)
    half_step = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    normal = ((bits + half_step) >> dropped << dropped).view(torch.float32)
    steps = FORMATS["e5m6"].smallest
    subnormal = (x.abs() / steps).round() * steps
    small = x.abs() < FORMATS["e5m6"].smallest_normal
    magnitude = torch.where(small, subnormal, normal)
    rounded = torch.where(x.isnan(), x, magnitude.copysign(x)).to(torch.float16)
    return (rounded.view(torch.int16).int() & 0xFFFF) >> 4


def _packed(codes: Int[Tensor, "*b c"]) -> UInt8[Tensor, "*b k"]:
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    first, second = codes[..., ::2], codes[..., 1::2]
    mixed = (first >> 8) | ((second & 0xF) << 4)
    return torch.stack((first & 0xFF, mixed, second >> 4), -1).flatten(-2).byte()


def _unpacked(stored: UInt8[Tensor, "*b k"]) -> Int[Tensor, "*b c"]:
    low, mixed, high = stored.unflatten(-1, (-1, PACKED_BYTES)).int().unbind(-1)
    first = low | ((mixed & 0xF) << 8)
    return torch.stack((first, (mixed >> 4) | (high << 4)), -1).flatten(-2)
