"""What narrow numbers lose: formats on a line, errors by tile, sums by their length.

    number_formats(formats, title=…)     how far values stand apart, how far they reach
    errors_by_tile(reports, title=…)     three errors against what makes a tensor hard
    accumulation(series, title=…)        a sum's error against its length

`formats` are of `labkit.precision.FORMATS`, `reports` maps a curve's name to pairs of a
size and its `QuantizationReport`, `series` a name to pairs of a length and an error.
"""

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labkit.precision.errors import QuantizationReport
from labkit.precision.formats import Format
from labkit.workbook.figures.charts import Points, lines
from labkit.workbook.figures.style import (
    PIXELS_PER_INCH,
    SERIES,
    STYLE,
    WIDTH,
)

Reports = Sequence[tuple[float, QuantizationReport]]
"""What a tensor lost, by the size of what makes it hard."""

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

WIDTHS = (6.5, 5, 3.8, 2.7, 1.7, 0.9)
"""Of curves: one that lies on another leaves its edges in sight."""

PANELS: Mapping[str, str] = MappingProxyType(
    {
        "relative_error": "error of the whole (%)",
        "worst_row": "error of the worst token (%)",
        "underflow": "values that became zero (%)",
    }
)
"""Fields of a report that are drawn, by the label of their axis."""


def panels(
    title: str,
    n_rows: int,
    n_columns: int,
    *,
    height: int,
    **more: Any,  # noqa: ANN401
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure in the book's style, and its axes, row by row.

    Args:
        title: the finding, as a sentence.
        n_rows: of axes.
        n_columns: of axes.
        height: pixels on the page.
        **more: for `Figure.subplots`, such as `gridspec_kw` with fixed margins, in
            shares of the figure: working them out takes a third of a drawing's time.
    """
    with mpl.rc_context(dict(STYLE)):
        size = (WIDTH / PIXELS_PER_INCH, height / PIXELS_PER_INCH)
        fig = Figure(figsize=size, dpi=PIXELS_PER_INCH)
        fig.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        axes = fig.subplots(n_rows, n_columns, squeeze=False, **more)
        return fig, list(axes.flat)


def number_formats(formats: Sequence[Format], *, title: str) -> Figure:
    """Return where the values of formats lie between 1 and 3, and how far they reach.

    Args:
        formats: one row each, the first on top; at most six.
        title: the finding.
    """
    margins = {"left": 0.09, "right": 0.97, "top": 0.9, "bottom": 0.13, "hspace": 0.55}
    fig, (upper, lower) = panels(
        title, 2, 1, height=190 + 56 * len(formats), gridspec_kw=margins
    )
    for row, (fmt, colour) in enumerate(zip(formats, SERIES, strict=False)):
        values = values_between(fmt, 1, 3)
        width = 1.2 if len(values) < 50 else 0.6
        upper.vlines(
            values, row - 0.38, row + 0.38, color=colour, linewidth=width, snap=False
        )
        _draw_range(lower, row, fmt, colour)
    names = [fmt.name.upper() for fmt in formats]
    for axes in (upper, lower):
        axes.set_yticks(range(len(formats)), names)
        axes.set_ylim(len(formats) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
    upper.set_xlim(0.985, 3.015)
    upper.set_xticks([1, 1.5, 2, 2.5, 3])
    upper.set_xlabel("every value that there is from 1 to 3")
    lower.set_xlim(-140, 134)
    lower.set_xticks(range(-128, 129, 32))
    lower.xaxis.set_major_formatter(FuncFormatter(lambda at, _: power_of_two(at)))
    lower.set_xlabel("from the smallest value to the largest; pale: with fewer digits")
    return fig


def power_of_two(exponent: float) -> str:
    """Return a power of two as it is written on an axis: mathematical type is slow.

    >>> power_of_two(-12)
    '2⁻¹²'
    """
    return f"2{f'{exponent:.0f}'.translate(RAISED)}"


def values_between(fmt: Format, low: float, high: float) -> list[float]:
    """Return all values of a format from `low`, a power of two, up to `high`.

    >>> from labkit.precision.formats import FORMATS
    >>> values_between(FORMATS["e5m2"], 1, 3)
    [1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0]
    """
    n, values, at = 2**fmt.mantissa_bits, [], float(low)
    while at <= high:
        values += [at * (1 + step / n) for step in range(n)]
        at *= 2
    return [value for value in values if value <= high]


def _draw_range(axes: Axes, row: int, fmt: Format, colour: str) -> None:
    """Draw a format's range, pale where mantissas are short, and say what it is."""
    ends = (fmt.smallest, fmt.smallest_normal, fmt.largest)
    least, normal, most = (math.log2(end) for end in ends)
    axes.barh(row, most - normal, left=normal, color=colour, height=0.62)
    axes.barh(row, normal - least, left=least, color=colour, alpha=0.4, height=0.62)
    n, largest = 2**fmt.mantissa_bits, f"{fmt.largest:,.6g}"
    is_wide = fmt.largest > 1e9
    if is_wide:
        largest = f"{fmt.largest:.1e}".replace("e+", " · 10^")
        largest = re.sub(r"10\^(\d+)", r"10$^{\1}$", largest)
    axes.text(
        0 if is_wide else most + 2,
        row,
        f"{n} values per power of two, up to {largest}",
        ha="center" if is_wide else "left",
        va="center",
        fontsize=9,
    )


def errors_by_tile(
    reports: Mapping[str, Reports],
    *,
    title: str,
    x: str = "outlier, by the others' size",
) -> Figure:
    """Return three errors of a tensor against what makes it hard, a curve per tile.

    Args:
        reports: pairs of a size, above 0, and what the tensor lost, by a curve's name;
            at most six curves.
        title: the finding.
        x: what the sizes are, with their unit.
    """
    margins = {"left": 0.09, "right": 0.985, "top": 0.83, "bottom": 0.3, "wspace": 0.3}
    fig, row = panels(title, 1, 3, height=320, gridspec_kw=margins)
    for axes, (field, name) in zip(row, PANELS.items(), strict=True):
        looks = zip(reports.items(), SERIES, WIDTHS, strict=False)
        for (curve, pairs), colour, width in looks:
            sizes = [size for size, _ in pairs]
            errors = [100 * getattr(report, field) for _, report in pairs]
            axes.plot(sizes, errors, color=colour, label=curve, linewidth=width)
        axes.set_xscale("log")
        axes.set_title(name, fontsize=9.5, fontweight="normal")
        axes.set_ylim(bottom=0)
        _decades(axes)
    row[1].set_xlabel(x)
    handles, names = row[0].get_legend_handles_labels()
    fig.legend(handles, names, loc="lower center", ncols=5, frameon=False, fontsize=9.5)
    return fig


def _decades(axes: Axes) -> None:
    """Write no more than four powers of ten below a small panel."""
    axes.xaxis.set_major_locator(LogLocator(10, numticks=4))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_tick_params(which="minor", length=0)


def accumulation(
    series: Mapping[str, Points],
    *,
    title: str,
    y: str = "error of the sum (%)",
) -> Figure:
    """Return a sum's error against its length, both logarithmic, a curve per way.

    Args:
        series: pairs of the products in a sum and its error, above 0, by the way of
            summing; at most six.
        title: the finding.
        y: what the errors are, with their unit.
    """
    return lines(series, title=title, x="products in the sum, K", y=y, log="xy")
