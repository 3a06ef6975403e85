"""What narrow numbers lose: formats on a line, errors by tile, sums by their length.

    number_formats(formats, title=…)     how far values stand apart, how far they reach
    errors_by_tile(reports, title=…)     three errors against what makes a tensor hard
    accumulation(series, title=…)        a sum's error against its length

`formats` are of `labkit.precision.FORMATS`, `reports` maps a curve's name to pairs of a
size and its `QuantizationReport`, `series` a name to pairs of a length and an error.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from labkit.precision.errors import QuantizationReport
from labkit.precision.formats import Format
from labkit.workbook.figures.charts import STYLES, Points, lines
from labkit.workbook.figures.style import (
    PIXELS_PER_INCH,
    SERIES,
    STYLE,
    WIDTH,
)

Reports = Sequence[tuple[float, QuantizationReport]]
"""What a tensor lost, by the size of what makes it hard."""

LEAST_PERCENT = 1e-4
"""Errors below this are drawn here: a logarithmic axis has no zero."""

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
    """Return a figure in the book's style, and its axes, of one row or one column.

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
        return fig, list(fig.subplots(n_rows, n_columns, **more))


def number_formats(formats: Sequence[Format], *, title: str) -> Figure:
    """Return where the values of formats lie between 1 and 4, and how far they reach.

    Args:
        formats: one row each, the first on top.
        title: the finding.
    """
    margins = {"left": 0.13, "right": 0.97, "top": 0.86, "bottom": 0.13, "hspace": 0.62}
    fig, (upper, lower) = panels(
        title, 2, 1, height=190 + 56 * len(formats), gridspec_kw=margins
    )
    for row, (fmt, colour) in enumerate(zip(formats, SERIES, strict=False)):
        values = values_between(fmt, 1, 4)
        upper.vlines(values, row - 0.38, row + 0.38, color=colour, linewidth=0.9)
        _draw_range(lower, row, fmt, colour)
    names = [fmt.name.upper() for fmt in formats]
    for axes in (upper, lower):
        axes.set_yticks(range(len(formats)), names)
        axes.set_ylim(len(formats) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
    upper.set_xlim(0.97, 4.03)
    upper.set_xticks([1, 2, 3, 4])
    upper.set_xlabel("each value that there is between 1 and 4")
    lower.set_xlabel("from the smallest value to the largest, as powers of two")
    lower.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"2$^{{{at:.0f}}}$"))
    return fig


def values_between(fmt: Format, low: float, high: float) -> list[float]:
    """Return all normal values of a format from `low` to `high`, both powers of two.

    >>> from labkit.precision.formats import FORMATS
    >>> values_between(FORMATS["e5m2"], 1, 4)
    [1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0]
    """
    n, values, at = 2**fmt.mantissa_bits, [], low
    while at < high:
        values += [at * (1 + step / n) for step in range(n)]
        at *= 2
    return [float(value) for value in (*values, high)]


def _draw_range(axes: Axes, row: int, fmt: Format, colour: str) -> None:
    """Draw a format's range; pale where mantissas are short."""
    ends = (fmt.smallest, fmt.smallest_normal, fmt.largest)
    least, normal, most = (float(np.log2(end)) for end in ends)
    axes.barh(row, most - normal, left=normal, color=colour, height=0.5)
    axes.barh(row, normal - least, left=least, color=colour, alpha=0.35, height=0.5)
    steps = 2**fmt.mantissa_bits
    text = f" {steps} values per power of two, up to {fmt.largest:,.6g}"
    axes.text(most, row, text, va="center", fontsize=9)


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
        looks = zip(reports.items(), SERIES, STYLES, strict=False)
        for (curve, pairs), colour, style in looks:
            sizes = [size for size, _ in pairs]
            errors = [100 * getattr(report, field) for _, report in pairs]
            axes.plot(sizes, errors, style, color=colour, label=curve)
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
    x = "products in the sum, K"
    fig = lines(series, title=title, x=x, y=y, log="xy")
    places = sorted({point[0] for points in series.values() for point in points})
    fig.axes[0].xaxis.set_major_locator(FixedLocator(places))
    return fig
