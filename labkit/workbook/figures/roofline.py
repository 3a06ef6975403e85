"""Rooflines: the speed a product can reach, against its arithmetic intensity."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from labkit.hardware.gemm import Gemm, TimedGemm
from labkit.hardware.units import rate
from labkit.workbook.figures.style import COLOURS, SERIES, canvas
from labkit.workbook.spelling import spell_ratio

ROOF, PRODUCT, GREY = SERIES[0], SERIES[1], COLOURS["idle"]

APART = 1.8
"""Least ratio between the heights of two names, so that they do not overlap."""

PLATE: Mapping[str, Any] = MappingProxyType(
    {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
)
"""Behind a name that lines may cross."""

X_LABEL = "arithmetic intensity (FLOP per byte moved)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """A machine's two ceilings, for products of one dtype."""

    name: str
    peak_flops: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte where the two ceilings meet.

        >>> Ceiling(name="H800", peak_flops=990e12, bytes_per_second=3.3e12).ridge
        300.0
        """
        return self.peak_flops / self.bytes_per_second

    def reach(self, intensity: float) -> float:
        """Return the FLOP/s that both ceilings allow."""
        return min(self.peak_flops, intensity * self.bytes_per_second)


def measured_roof(ceiling: Ceiling, timed: Sequence[TimedGemm]) -> Figure:
    """Return a machine's roof with the products that ran under it, named by rows."""
    first, last = timed[0], timed[-1]
    title = (
        f"{_rows(first)}: {100 * first.flops / ceiling.peak_flops:.0f} % of the peak. "
        f"{_rows(last)}: {100 * last.flops / ceiling.peak_flops:.0f} %"
    )
    fig, axes = canvas(title, x=X_LABEL, y="speed of the product", height=340)
    ends = (timed[0].gemm.intensity / 2, timed[-1].gemm.intensity * 3)
    speeds = [each.flops for each in timed]
    levels = [*speeds, ceiling.peak_flops]
    _scale(axes, ends, (min(levels) / 2, max(levels) * 1.8))
    _draw_roof(axes, ceiling, ends, colour=ROOF, width=2.0)
    _name_peaks(axes, [ceiling])
    across = [each.gemm.intensity for each in timed]
    axes.plot(across, speeds, "o-", color=PRODUCT, markersize=5, linewidth=1.2)
    for each in timed:
        place = (each.gemm.intensity, each.flops)
        axes.annotate(
            _rows(each),
            place,
            xytext=(5, -5),
            textcoords="offset points",
            va="top",
            fontsize=8.5,
            color=PRODUCT,
            bbox=dict(PLATE),
        )
    return fig


def product_under_roofs(
    product: Gemm, ceiling: Ceiling, others: Sequence[Ceiling]
) -> Figure:
    """Return a product on one machine's roof, with other machines' roofs in grey."""
    seconds = (
        product.n_flops / ceiling.peak_flops,
        product.n_bytes / ceiling.bytes_per_second,
    )
    fig, axes = canvas(_title(*seconds), x=X_LABEL, y="speed within reach", height=380)
    peaks = [each.peak_flops for each in (ceiling, *others)]
    reach = ceiling.reach(product.intensity)
    ends = (min(0.2, product.intensity / 3), max(2e4, product.intensity * 3))
    _scale(axes, ends, (min(*peaks, reach) / 30, max(peaks) * 8))
    for other in others:
        _draw_roof(axes, other, ends, colour=GREY, width=1.2)
    _draw_roof(axes, ceiling, ends, colour=ROOF, width=2.5)
    _name_peaks(axes, [ceiling, *others])
    axes.axvline(ceiling.ridge, color=ROOF, linestyle=":", linewidth=1.2)
    _name_sides(axes, ceiling.ridge)
    axes.plot(product.intensity, reach, "D", color=PRODUCT, markersize=9, zorder=5)
    _name_product(axes, product, (product.intensity, reach), ridge=ceiling.ridge)
    return fig


def _name_product(
    axes: Axes, product: Gemm, place: tuple[float, float], *, ridge: float
) -> None:
    """Name a product on the side where no roof's name stands."""
    is_right = place[0] > ridge
    axes.annotate(
        f"{product.m:,} × {product.k:,} × {product.n:,}",
        place,
        xytext=(-4, 9) if is_right else (11, -11),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="bottom" if is_right else "top",
        color=PRODUCT,
        fontweight="bold",
        bbox=dict(PLATE),
    )


def _title(arithmetic: float, traffic: float) -> str:
    longer, shorter = max(arithmetic, traffic), min(arithmetic, traffic)
    times = f"{spell_ratio(longer / shorter)} as long as"
    if arithmetic > traffic:
        return f"Compute-bound: the arithmetic takes {times} the traffic"
    return f"Memory-bound: the traffic takes {times} the arithmetic"


def _rows(timed: TimedGemm) -> str:
    return f"{timed.gemm.m:,} row{'s' if timed.gemm.m > 1 else ''}"


def _scale(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Make both axes logarithmic, with a label at each decade."""
    axes.set(xscale="log", yscale="log", xlim=x, ylim=y)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(10, numticks=12))
        axis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: rate(value, "FLOP/s"))
    )


def _draw_roof(
    axes: Axes,
    ceiling: Ceiling,
    ends: tuple[float, float],
    *,
    colour: str,
    width: float,
) -> None:
    """Draw the slope of the traffic and the level of the arithmetic."""
    across = sorted((ends[0], min(max(ceiling.ridge, ends[0]), ends[1]), ends[1]))
    up = [ceiling.reach(place) for place in across]
    axes.plot(across, up, color=colour, linewidth=width)


def _name_peaks(axes: Axes, ceilings: Sequence[Ceiling]) -> None:
    """Name each roof to the right of it, the first in colour, moved apart if close."""
    lowest = 0.0
    for ceiling in sorted(ceilings, key=lambda each: each.peak_flops):
        place = max(ceiling.peak_flops, lowest)
        lowest = place * APART
        axes.annotate(
            f" {ceiling.name} {rate(ceiling.peak_flops, 'FLOP/s')}",
            (1, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            color=ROOF if ceiling is ceilings[0] else "#666666",
        )


def _name_sides(axes: Axes, ridge: float) -> None:
    """Say what the limit is on either side of the ridge."""
    for text, side, shift in (
        ("memory-bound ", "right", -2),
        ("compute-bound", "left", 6),
    ):
        axes.annotate(
            text,
            (ridge, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(shift, 0),
            textcoords="offset points",
            ha=side,
            color=ROOF,
            fontsize=9,
        )
