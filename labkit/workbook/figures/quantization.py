"""Magnitudes of a tensor, what its tiles can say of them, and what they lose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from labkit.workbook.figures.precision import panels, power_of_two
from labkit.workbook.figures.style import COLOURS, SERIES

KEPT, LOST = COLOURS["cache"], SERIES[1]

HEIGHT = 400

UNSEEN = 0.01
"""Percent of the values, the smallest, that the axis leaves out."""
COLUMNS = (
    *((0.02, "left"), (0.4, "right"), (0.63, "right")),
    *((0.8, "right"), (0.86, "left")),
)
"""Where the columns of the table are, in shares of its width, and their side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """Values of a tensor other than zero, and what became of them."""

    logs: Float[np.ndarray, "n"]
    """Magnitudes, as powers of two."""

    is_lost: Bool[np.ndarray, "n"]
    """Which of them become zero."""

    marks: Mapping[str, float]
    """Magnitudes to point at, by what they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """From the smallest value of a tile to its largest, as powers of two."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TileLosses:
    """A row of the table: what tiles of one kind lose, in percent."""

    name: str
    n_scales: int
    worst_token: float
    lost: float
    will_do: bool
    is_chosen: bool


def magnitudes(
    values: Values,
    *,
    reaches: Sequence[Reach],
    table: Sequence[TileLosses],
    title: str,
) -> Figure:
    """Return how many values there are of each magnitude, and what tiles make of them.

    Args:
        values: of a tensor.
        reaches: of tiles, drawn above the values.
        table: what each kind of tile loses, below.
        title: the finding.
    """
    margins = {"left": 0.09, "right": 0.985, "top": 0.91, "bottom": 0.0, "hspace": 0.38}
    fig, (axes, below) = panels(
        title, 2, 1, height=HEIGHT, height_ratios=(3, 2), gridspec_kw=margins
    )
    _draw_values(axes, values)
    _draw_reaches(axes, reaches)
    _draw_marks(axes, values.marks)
    _draw_table(below, table)
    return fig


def _draw_values(axes: Axes, values: Values) -> None:
    """Draw a histogram, a bar for each power of two, the lost ones in their colour."""
    logs, is_lost = values.logs, values.is_lost
    edges = np.arange(np.floor(logs.min()), np.floor(logs.max()) + 2)
    lost, kept = (
        100 / len(logs) * np.histogram(part, edges)[0]
        for part in (logs[is_lost], logs[~is_lost])
    )
    is_seen = np.cumsum(lost + kept) > UNSEEN  # the tail would take half of the axis
    left, lost, kept = edges[:-1][is_seen], lost[is_seen], kept[is_seen]
    axes.bar(left, lost, 0.92, align="edge", color=LOST)
    axes.bar(left, kept, 0.92, bottom=lost, align="edge", color=KEPT)
    axes.set_xlim(left[0] - 1, edges[-1] + 1)
    axes.set_ylim(0, (lost + kept).max())
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: power_of_two(at)))
    axes.set_ylabel("share of values (%)")
    axes.set_xlabel("magnitude of a value")
    axes.legend(
        handles=[
            Patch(color=KEPT, label="kept"),
            Patch(color=LOST, label="become zero"),
        ],
        loc="upper right",
        bbox_to_anchor=(1, -0.12),
        ncols=2,
        frameon=False,
        fontsize=9,
        handlelength=1.2,
    )


def _draw_reaches(axes: Axes, reaches: Sequence[Reach]) -> None:
    """Draw lines above the values, each over what a scale can say."""
    top = axes.get_ylim()[1]
    axes.set_ylim(0, top * (1.12 + 0.2 * len(reaches)))
    low, high = axes.get_xlim()
    for row, reach in enumerate(reversed(reaches)):
        at = top * (1.12 + 0.2 * row)
        ends = (max(reach.low, low), min(reach.high, high))
        axes.plot(ends, (at, at), color=COLOURS["ink"], linewidth=2.5)
        caps = [end for end in (reach.low, reach.high) if low <= end <= high]
        axes.plot(caps, [at] * len(caps), "|", color=COLOURS["ink"], markersize=9)
        axes.annotate(
            reach.name,
            (sum(ends) / 2, at),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
        )


def _draw_marks(axes: Axes, marks: Mapping[str, float]) -> None:
    """Point at magnitudes, with words that stay inside."""
    low, high = axes.get_xlim()
    for name, at in marks.items():
        is_far = (at - low) / (high - low) > 0.8
        axes.annotate(
            name,
            (at, 0),
            xytext=(12 if is_far else 0, 22),
            textcoords="offset points",
            ha="right" if is_far else "center",
            fontsize=9,
            arrowprops={"arrowstyle": "->", "color": COLOURS["ink"]},
        )


def _draw_table(axes: Axes, table: Sequence[TileLosses]) -> None:
    """Write a line for each kind of tile, the chosen one bold.

    A column is one text, its bold line another: each text takes two milliseconds.
    """
    axes.set_axis_off()
    lines = [("one scale for", "scales", "worst token's error", "become zero", "")]
    lines += [
        (
            f"{'▶ ' if each.is_chosen else '    '}{each.name}",
            f"{each.n_scales:,}",
            f"{each.worst_token:.1f} %",
            f"{each.lost:.1f} %",
            "✓ will do" if each.will_do else "✗ will not",
        )
        for each in table
    ]
    bold = [False, *(each.is_chosen for each in table)]
    for (at, side), words in zip(COLUMNS, zip(*lines, strict=True), strict=True):
        for weight in ("normal", "bold"):
            shown = (
                word if is_bold == (weight == "bold") else ""
                for word, is_bold in zip(words, bold, strict=True)
            )
            axes.text(
                at,
                1,
                "\n".join(shown),
                ha=side,
                va="top",
                fontweight=weight,
                fontsize=9.5,
                linespacing=1.5,
            )
