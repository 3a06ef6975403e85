"""A precision plan as a map of layers and operators, and what follows from it.

consequences(bars, title=…)              shares of what all BF16 takes
precision_map(grid, bars, title=…)       the same below the map
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from labkit.workbook.figures.precision import panels
from labkit.workbook.figures.style import COLOURS, SERIES


class Look(NamedTuple):
    """The colours of a cell, and what they mean."""

    colour: str
    ink: str
    name: str


LOOKS: Mapping[str, Look] = MappingProxyType(
    {
        "fp8": Look("#0072B2", "#FFFFFF", "multiplied in FP8"),
        "emulated": Look("#56B4E9", "#222222", "in FP8, multiplied as BF16"),
        "stored": Look("#C6E2F5", "#222222", "kept or sent in FP8"),
        "bf16": Look("#E4E4E4", "#222222", "BF16"),
        "fp32": Look("#F5D58A", "#222222", "FP32"),
    }
)
"""From narrow to wide: the darker, the narrower."""

BAR_PIXELS, ROW_PIXELS = 34, 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Consequence:
    """Something that a plan takes, by what all BF16 takes, in percent."""

    name: str
    percent: float
    unedited: float
    """By the policy as it is."""

    text: str
    """Written at the end of the bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A map: words and looks by column and row; places without an operator are left."""

    columns: Sequence[str]
    rows: Sequence[str]
    cells: Mapping[tuple[str, str], tuple[str, str]]
    """Words of a cell, and a key of `LOOKS`."""


def consequences(bars: Sequence[Consequence], *, title: str) -> Figure:
    """Return what a plan takes, by what all BF16 would; a tick is at its policy's."""
    height = 84 + BAR_PIXELS * len(bars)
    margins = {"left": 0.24, "right": 0.98, "top": 1 - 34 / height}
    fig, (axes,) = panels(
        title,
        1,
        1,
        height=height,
        gridspec_kw=margins | {"bottom": 50 / height},
    )
    _draw_bars(axes, bars)
    return fig


def precision_map(grid: Grid, bars: Sequence[Consequence], *, title: str) -> Figure:
    """Return the map of a plan, and below it what the plan takes."""
    above, below = ROW_PIXELS * len(grid.rows), BAR_PIXELS * len(bars)
    heads, between, foot = 58, 62, 50
    height = heads + above + between + below + foot
    margins = {"left": 0.24, "right": 0.98, "top": 1 - heads / height}
    margins |= {"bottom": foot / height, "hspace": 2 * between / (above + below)}
    fig, (upper, lower) = panels(
        title, 2, 1, height=height, height_ratios=(above, below), gridspec_kw=margins
    )
    _draw_grid(upper, grid)
    _draw_bars(lower, bars)
    return fig


def _draw_bars(axes: Axes, bars: Sequence[Consequence]) -> None:
    for row, bar in enumerate(bars):
        axes.barh(row, bar.percent, color=SERIES[0], height=0.6)
        axes.plot(bar.unedited, row, "|", color=SERIES[1], markersize=20, mew=2.5)
        end = max(bar.percent, bar.unedited, 100.0)
        axes.text(end + 2, row, bar.text, va="center", fontsize=9.5)
    axes.axvline(100, color=COLOURS["ink"], linestyle="--", linewidth=1.2, zorder=0)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    longest = max(100.0, *(max(bar.percent, bar.unedited) for bar in bars))
    axes.set_xlim(0, longest * 1.4)
    axes.set_xticks(range(0, int(longest) + 1, 20))
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("by what all BF16 takes (%); upright strokes: the policy as it is")


def _draw_grid(axes: Axes, grid: Grid) -> None:
    n_columns, n_rows = len(grid.columns), len(grid.rows)
    for (column, row), (words, look) in grid.cells.items():
        at = (grid.columns.index(column), grid.rows.index(row))
        colour, ink, _ = LOOKS[look]
        axes.add_patch(Rectangle(at, 0.97, 0.92, facecolor=colour))
        middle = (at[0] + 0.485, at[1] + 0.48)
        axes.text(*middle, words, color=ink, ha="center", va="center", fontsize=8.5)
    axes.set(xlim=(0, n_columns), ylim=(n_rows, 0))
    axes.set_yticks([row + 0.48 for row in range(n_rows)], grid.rows)
    axes.set_xticks([place + 0.485 for place in range(n_columns)], grid.columns)
    axes.tick_params(length=0, top=False, bottom=False)
    axes.tick_params(labeltop=True, labelbottom=False, labelsize=9.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(visible=False)
    used = {look for _, look in grid.cells.values()}
    axes.legend(
        handles=[
            Patch(color=look.colour, label=look.name)
            for name, look in LOOKS.items()
            if name in used
        ],
        loc="upper left",
        bbox_to_anchor=(0, 0),
        ncols=4,
        frameon=False,
        fontsize=9,
        handlelength=1.2,
    )
