"""The kinds of figure this book uses, each a pure function of its values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from labkit.workbook.figures.style import COLOURS, SERIES, WIDTH, canvas
from labkit.workbook.spelling import spell

Points = Sequence[tuple[float, float]]

DARK = ("weights", "communication", "ink")
"""Meanings whose colour needs white letters on it."""

LETTER_WIDTH = 7.5
"""Pixels that one letter of a direct label takes, with some air."""

STYLES = ("-", "--", "-.", ":", "-", "--")
"""Strokes of the curves, so that colour is never the only difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A named amount, drawn in the colour of its meaning (a key of `COLOURS`)."""

    name: str
    amount: float
    meaning: str = "weights"


def bars(parts: Sequence[Part], *, title: str, x: str, log: bool = False) -> Figure:
    """Return horizontal bars, the first on top, each with its amount beside it."""
    fig, axes = canvas(title, x=x, height=110 + 34 * len(parts), grid="x")
    amounts = [part.amount for part in parts]
    colours = [COLOURS[part.meaning] for part in parts]
    drawn = axes.barh([part.name for part in parts], amounts, color=colours)
    axes.bar_label(drawn, [spell(amount) for amount in amounts], padding=4)
    axes.invert_yaxis()
    if log:
        axes.set_xscale("log")
        axes.set_xlim(min(amounts) / 3, max(amounts) * 4)
    else:
        axes.set_xlim(0, (max(amounts) or 1) * 1.15)
    _write_ticks(axes, log="x" if log else "")
    return fig


def stacks(
    rows: Mapping[str, Sequence[Part]],
    *,
    title: str,
    x: str,
    limit: float | None = None,
    limit_name: str = "",
) -> Figure:
    """Return one stacked bar per row, its parts in order, the total at its end.

    A part is named on the bar where there is room; the key below names all of them
    where there is not.

    Args:
        rows: parts by the name of the row; a part keeps its colour in all rows.
        title: the finding.
        x: what the parts measure, with the unit.
        limit: draws a line to stay below, for example a device's memory.
        limit_name: what the limit is.
    """
    fig, axes = canvas(title, x=x, height=160 + 40 * len(rows), grid="x")
    totals = [sum(part.amount for part in row) for row in rows.values()]
    longest = max([*totals, limit or 0]) or 1
    unnamed = False
    for name, row in rows.items():
        unnamed |= _stack(axes, name, row, letters=0.85 * WIDTH / longest)
    if limit is not None:
        axes.axvline(limit, color=COLOURS["ink"], linestyle="--", linewidth=1.2)
        note = f"dashed: {limit_name}, {spell(limit)}"
        axes.set_title(note, fontsize=9, fontweight="normal", loc="right")
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.12)
    _write_ticks(axes)
    if unnamed:
        fig.legend(loc="outside lower left", ncols=6, frameon=False, handlelength=1)
    return fig


def _stack(axes: Axes, name: str, row: Sequence[Part], *, letters: float) -> bool:
    """Draw one row; return whether a part was too narrow to carry its name.

    Args:
        axes: where to draw.
        name: of the row.
        row: its parts.
        letters: pixels per unit of amount.
    """
    known = set(axes.get_legend_handles_labels()[1])
    left, unnamed = 0.0, False
    for part in row:
        label = None if part.name in known else part.name
        colour = COLOURS[part.meaning]
        axes.barh(name, part.amount, left=left, color=colour, label=label, height=0.7)
        if part.amount * letters > LETTER_WIDTH * len(part.name):
            ink = "white" if part.meaning in DARK else COLOURS["ink"]
            middle = left + part.amount / 2
            axes.text(middle, name, part.name, color=ink, ha="center", va="center")
        else:
            unnamed |= part.amount > 0
        left += part.amount
    axes.text(left, name, f" {spell(left)}", va="center", fontweight="bold")
    return unnamed


def lines(
    series: Mapping[str, Points], *, title: str, x: str, y: str, log: str = ""
) -> Figure:
    """Return curves, each named where it ends.

    Args:
        series: points by the curve's name, at most six curves.
        title: the finding.
        x: label of the horizontal axis, with its unit.
        y: label of the vertical axis, with its unit.
        log: the axes with a logarithmic scale: "", "x", "y" or "xy".

    Raises:
        ValueError: more curves than there are colours.
    """
    if len(series) > len(SERIES):
        raise ValueError(
            f"a figure holds at most {len(SERIES)} curves, one per colour; "
            f"got {len(series)}. Split it in two."
        )
    fig, axes = canvas(title, x=x, y=y, height=330)
    looks = zip(series.values(), SERIES, STYLES, strict=False)
    for points, colour, style in looks:
        across, up = zip(*points, strict=True)
        mark = "o" if len(points) <= 12 else None
        axes.plot(across, up, style, color=colour, marker=mark, markersize=4)
    for axis in log:
        axes.set(**{f"{axis}scale": "log"})
    places = sorted({point[0] for points in series.values() for point in points})
    if "x" in log and len(places) <= 10:
        axes.xaxis.set_major_locator(FixedLocator(places))
    _write_ticks(axes, log=log)
    _name_ends(axes, series)
    return fig


def _name_ends(axes: Axes, series: Mapping[str, Points]) -> None:
    """Name each curve at its last point, moved apart where two would overlap."""
    axes.autoscale_view()  # limits are otherwise set only when the figure is drawn
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = {name: to_axes.transform(points[-1]) for name, points in series.items()}
    colours = dict(zip(series, SERIES, strict=False))
    lowest = -1.0
    for name, (across, up) in sorted(ends.items(), key=lambda item: item[1][1]):
        lowest = max(up, lowest + 0.07)
        axes.annotate(
            f" {name}",
            (across, lowest),
            xycoords="axes fraction",
            color=colours[name],
            va="center",
        )


def _write_ticks(axes: Axes, *, log: str = "") -> None:
    """Write numbers in full, thousands separated; on log axes only the decades."""
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name == "y" and axes.get_yaxis().have_units():
            continue  # bars: the axis holds names
        if name in log and not isinstance(axis.get_major_locator(), FixedLocator):
            axis.set_major_locator(LogLocator(10))
        if name in log:
            axis.set_minor_formatter(NullFormatter())
            axis.set_tick_params(which="minor", length=0)
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
