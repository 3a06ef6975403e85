"""What quantization does to a tensor, as numbers.

The relative error of a whole tensor is that of its largest values. What befalls the
small ones shows in the share that became zero, and in the row (a token's activations
or gradients) that lost most of itself.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from labkit.precision.formats import Format, decode
from labkit.precision.quantize import QTensor


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class QuantizationReport:
    """What a tensor lost; errors are infinite where a tile, or a value, is not finite.

    A share counts values of the whole tensor, from 0 to 1, an error is a norm of what
    was lost, by the norm of what was there.
    """

    relative_error: float
    """Of the whole tensor, by Frobenius norm."""

    underflow: float
    """Share, among values other than zero, of those that became zero."""

    saturated: float
    """Share of values beyond the largest of their tile. Scales that are found from the
    tensor itself leave none; scales from an earlier step do."""

    worst_row: float
    """Of the row that lost most of itself."""

    median_row: float

    n_nonfinite_tiles: int
    """Tiles that held an infinity or NaN; of BF16, which has no tiles, 0."""

    @property
    def sqnr_db(self) -> float:
        """Signal over quantization noise in decibels; infinite where nothing is lost.

        >>> error = QuantizationReport(relative_error=0.1, underflow=0, saturated=0,
        ...     worst_row=0.2, median_row=0.1, n_nonfinite_tiles=0)
        >>> error.sqnr_db
        20.0
        """
        if self.relative_error == 0:
            return math.inf
        return -20 * math.log10(self.relative_error)

    def __repr__(self) -> str:
        n_bad = self.n_nonfinite_tiles
        bad = f"; {n_bad} tiles not finite" if n_bad else ""
        return (
            f"QuantizationReport({self.sqnr_db:.1f} dB: {self.relative_error:.2%} of "
            f"the tensor, {self.median_row:.2%} of its median row, "
            f"{self.worst_row:.2%} of its worst; {self.underflow:.2%} became zero, "
            f"{self.saturated:.2%} saturated{bad})"
        )


def quantization_error(x: Float[Tensor, "*b r c"], q: QTensor) -> QuantizationReport:
    """Return what `q` lost of the tensor that it was made from.

    >>> from labkit.precision.quantize import QuantSpec, quantize
    >>> x = torch.tensor([[448.0, 17.0, 0.0005, 0.0]])
    >>> error = quantization_error(x, quantize(x, QuantSpec()))
    >>> round(error.sqnr_db, 1), round(error.underflow, 3)  # 17 -> 16, 0.0005 -> 0
    (53.0, 0.333)

    Raises:
        ValueError: the shapes differ.
    """
    if x.shape != q.shape:
        raise ValueError(
            f"x must have the shape of what was quantized, {tuple(q.shape)}; got "
            f"{tuple(x.shape)}. Pass the tensor that q was made from."
        )
    x = x.detach().float()
    kept = q.dequantize()
    n_beyond = _n_beyond(x, kept, q)
    n_values = torch.count_nonzero(x).item()
    n_underflows = torch.count_nonzero((x != 0) & (kept == 0)).item()
    # By each row's largest value, whose square may be beyond FP32.
    unit = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    rows = (x / unit).norm(dim=-1).double()
    lost = kept.sub_(x).div_(unit).norm(dim=-1).double().nan_to_num(math.inf, math.inf)
    by_row = _quotient(lost, rows).flatten()
    sizes = unit.squeeze(-1).double()
    return QuantizationReport(
        relative_error=_quotient((lost * sizes).norm(), (rows * sizes).norm()).item(),
        underflow=n_underflows / max(1, n_values),
        saturated=n_beyond / x.numel(),
        worst_row=by_row.max().item(),
        median_row=by_row.median().item(),
        n_nonfinite_tiles=q.n_nonfinite_tiles(),
    )


def _quotient(
    lost: Float[Tensor, "*r"], whole: Float[Tensor, "*r"]
) -> Float[Tensor, "*r"]:
    """Return what was lost, by what was there; nothing of nothing is nothing."""
    quotient = torch.where(lost == 0, 0.0, lost / whole)
    return quotient.nan_to_num(math.inf, math.inf)


def _n_beyond(
    x: Float[Tensor, "*b r c"], kept: Float[Tensor, "*b r c"], q: QTensor
) -> int:
    """Return how many values a wider exponent would have taken higher."""
    fmt = q.spec.numbers
    codes = decode(q.data, fmt, q.n_columns, torch.float32)
    is_largest = codes.abs_() >= fmt.largest
    values, limits = x[is_largest].abs(), kept[is_largest].abs()
    if fmt.needs_scale:
        return torch.count_nonzero(values >= limits * _next_share(fmt)).item()
    return torch.count_nonzero(values < limits).item()  # an infinity, of none


def _next_share(fmt: Format) -> float:
    """Return from where on a value would round to one beyond the largest, by that.

    >>> from labkit.precision.formats import FORMATS
    >>> round(448 * _next_share(FORMATS["e4m3"]))
    464
    """
    step = 2.0 ** (math.floor(math.log2(fmt.largest)) - fmt.mantissa_bits)
    return 1 + step / 2 / fmt.largest
