"""Rows of tokens as the bytes that travel: exact, in BF16, or in FP8 with scales.

DeepSeek-V3 (section 3.3.3) sends tokens to their experts in FP8, tiles of 1 x 128 with
scales that are powers of two, and brings sums back in BF16. Its backward pass does
likewise, the other way round: gradients of results go to the experts in FP8, gradients
of tokens come back in BF16. So a payload names two formats, one for each *direction*,
whichever pass it is.

A row is one piece of bytes, so that a token, its routing weights and the experts it
chose are one message; FP8 travels as bytes because gloo refuses its dtypes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from labkit.config.checks import named, require_choice, require_instance
from labkit.model.checkpoint_fp8 import LARGEST, LEAST, up_to_power_of_two

FORMATS = ("fp32", "bf16", "fp8")
"""Of a row's values: "fp32" sends them as they are computed, also narrower ones."""

TILE = 128
"""Values of a row that share an FP8 scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """In what rows go to the experts, and in what they come back."""

    there: str = "bf16"
    """Tokens in the forward pass, gradients of results in the backward pass."""

    back: str = "bf16"
    """Results in the forward pass, gradients of tokens in the backward pass."""

    def __post_init__(self) -> None:
        require_choice(named(self, "there", "back"), FORMATS)


PAYLOADS: Mapping[str, Payload] = MappingProxyType(
    {
        "fp32": Payload(there="fp32", back="fp32"),
        "bf16": Payload(),
        "fp8": Payload(there="fp8"),
    }
)
"""Payloads by the name of what goes to the experts; "fp8" is DeepSeek-V3's."""


def payload_of(payload: str | Payload) -> Payload:
    """Return the payload of this name, or itself.

    Raises:
        ValueError: no such name, or another object.
    """
    if isinstance(payload, str):
        require_choice({"payload": payload}, tuple(PAYLOADS))
        return PAYLOADS[payload]
    require_instance({"payload": payload}, Payload)
    return payload


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """Where in the bytes of a row its parts lie.

    First routing weights and numbers of experts, 4 bytes each, then values, then their
    scales. Values and rows begin at multiples of 8 bytes.
    """

    dim: int

    dtype: torch.dtype = torch.float32
    """Of the values before and after the journey."""

    format: str = "fp32"
    """One of `FORMATS`."""

    n_weights: int = 0
    """Routing weights that travel with the values."""

    n_experts: int = 0
    """Numbers of experts that travel with the values."""

    @property
    def sent_dtype(self) -> torch.dtype:
        """Of the values on their way."""
        if self.format == "fp8":
            return torch.float8_e4m3fn
        return torch.bfloat16 if self.format == "bf16" else self.dtype

    @property
    def n_scales(self) -> int:
        """Scales of a row, one byte each."""
        return -(-self.dim // TILE) if self.format == "fp8" else 0

    @property
    def n_bytes(self) -> int:
        """Of one row.

        >>> RowFormat(dim=7168, format="fp8", n_weights=8, n_experts=8).n_bytes
        7288
        >>> RowFormat(dim=7168, dtype=torch.bfloat16).n_bytes
        14336
        """
        return self._values_end + _in_eights(self.n_scales)

    def pack(
        self,
        values: Float[Tensor, "p d"],
        weights: Float[Tensor, "p w"] | None = None,
        experts: Int[Tensor, "p e"] | None = None,
    ) -> UInt8[Tensor, "p bytes"]:
        """Return rows as bytes; parts that are not given are as memory has them."""
        rows = values.new_empty((len(values), self.n_bytes), dtype=torch.uint8)
        if weights is not None:
            self.weights(rows).copy_(weights)
        if experts is not None:
            self.experts(rows).copy_(experts)
        if self.format == "fp8":
            stored, scales = to_fp8(values)
            self._values(rows).copy_(stored.view(torch.uint8))
            self._scales(rows).copy_(scales)
        else:
            self._values(rows).view(self.sent_dtype).copy_(values)
        return rows

    def values(self, rows: UInt8[Tensor, "p bytes"]) -> Float[Tensor, "p d"]:
        """Return the values of rows, in the dtype they had."""
        stored = self._values(rows)
        if self.format == "fp8":
            return from_fp8(stored, self._scales(rows), self.dtype)
        return stored.view(self.sent_dtype).to(self.dtype)

    def weights(self, rows: UInt8[Tensor, "p bytes"]) -> Float[Tensor, "p w"]:
        """Return the routing weights of rows, where they lie; they are always exact."""
        return rows[:, : 4 * self.n_weights].view(torch.float32)

    def experts(self, rows: UInt8[Tensor, "p bytes"]) -> Int[Tensor, "p e"]:
        """Return the numbers of the experts that tokens chose, where they lie."""
        start = 4 * self.n_weights
        return rows[:, start : start + 4 * self.n_experts].view(torch.int32)

    @property
    def _values_start(self) -> int:
        return _in_eights(4 * (self.n_weights + self.n_experts))

    @property
    def _values_end(self) -> int:
        return self._values_start + _in_eights(self.dim * self.sent_dtype.itemsize)

    def _values(self, rows: UInt8[Tensor, "p bytes"]) -> UInt8[Tensor, "p v"]:
        start = self._values_start
        return rows[:, start : start + self.dim * self.sent_dtype.itemsize]

    def _scales(self, rows: UInt8[Tensor, "p bytes"]) -> UInt8[Tensor, "p t"]:
        return rows[:, self._values_end : self._values_end + self.n_scales]


def _in_eights(n_bytes: int) -> int:
    return -(-n_bytes // 8) * 8


def to_fp8(
    values: Float[Tensor, "p d"],
) -> tuple[Float[Tensor, "p d"], UInt8[Tensor, "p t"]]:
    """Return values in E4M3, and the exponents (UE8M0) of the scales of their tiles.

    The bytes are those of `labkit.precision.quantize` in tiles of 1 x 128. Values that
    made the journey once make it again unchanged, so that two hops lose no more.
    """
    n_values = values.shape[1]
    tiles = F.pad(values.float(), (0, -n_values % TILE)).unflatten(1, (-1, TILE))
    largest = tiles.abs().amax(dim=-1)  # (p, t)
    scales = up_to_power_of_two(largest.clamp_min(LEAST) / LARGEST)
    scales = torch.where(largest < torch.inf, scales, torch.nan)
    stored = (tiles / scales.unsqueeze(-1)).flatten(1)[:, :n_values]
    exponents = scales.to(torch.float8_e8m0fnu).view(torch.uint8)
    return stored.to(torch.float8_e4m3fn).contiguous(), exponents


def from_fp8(
    stored: UInt8[Tensor, "p d"], scales: UInt8[Tensor, "p t"], dtype: torch.dtype
) -> Float[Tensor, "p d"]:
    """Return the values that bytes of `to_fp8` stand for, exact in BF16 and FP32."""
    values = stored.contiguous().view(torch.float8_e4m3fn).to(dtype)
    factors = scales.contiguous().view(torch.float8_e8m0fnu).to(dtype)
    return values * factors.repeat_interleave(TILE, dim=1)[:, : values.shape[1]]
