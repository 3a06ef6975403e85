"""One model beside published ones: parameters, cache and FLOPs per token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.workbook.figures.style import (
    COLOURS,
    PIXELS_PER_INCH,
    SERIES,
    STYLE,
    WIDTH,
)
from labkit.workbook.spelling import spell

OURS, OTHERS = SERIES[1], SERIES[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Landmark:
    """A model on the map."""

    name: str
    total_billion: float
    active_billion: float
    """Equal to the total where every parameter works on every token."""

    cache_bytes: float
    """Cache per token, in BF16."""

    train_gflop: float
    """To train on one token, in a context of 4,096."""


PANELS = (
    "parameters (billions)\nring: stored · dot: per token",
    "cache (bytes per token)\nin BF16",
    "training (GFLOP per token)\nin a context of 4,096",
)

NAMES, PANELS_WIDTH = 130, (214, 188, 184)
"""Pixels of the column of names, and of each panel: the first holds two values."""

SCALE, LEFT = 86, 12
"""Pixels of a panel's logarithmic scale, and before it; values need the rest."""

NOTE = (
    "Positions are logarithmic. Each panel has a scale of its own, from the smallest "
    "value in it to the largest."
)

ROW, TOP = 28, 66
"""Pixels of a row, and above the first one."""


def landscape(models: Sequence[Landmark], *, title: str) -> Figure:
    """Return three panels with a row per model, the first one picked out by colour.

    Each panel has its own logarithmic scale without numbers: every mark carries its
    value, and a note below says so.
    """
    height = TOP + ROW * len(models) + 46
    size = (WIDTH / PIXELS_PER_INCH, height / PIXELS_PER_INCH)
    with mpl.rc_context(dict(STYLE)):
        # One bare axes in pixels: three real ones take twice the time to draw.
        fig = Figure(figsize=size, dpi=PIXELS_PER_INCH)
        axes = fig.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
        axes.set_axis_off()
        axes.text(7, 20, title, fontsize=11.5, fontweight="bold")
        for place, model in enumerate(models):
            name = {"ha": "right", "va": "center", **_looks(place)}
            axes.text(NAMES - 12, _height(place), model.name, **name)
        columns = [(m.cache_bytes, m.cache_bytes) for m in models]
        work = [(m.train_gflop, m.train_gflop) for m in models]
        sizes = [(m.total_billion, m.active_billion) for m in models]
        left = NAMES
        panels = zip(PANELS, PANELS_WIDTH, (sizes, columns, work), strict=True)
        for words, width, values in panels:
            _panel(axes, left, words, values)
            left += width
        axes.text(7, height - 15, NOTE, fontsize=8.5, color="#555555")
    return fig


def _looks(place: int) -> dict[str, str]:
    """Return how the words of a row look: ours stands out."""
    if place:
        return {"color": COLOURS["ink"], "fontweight": "normal"}
    return {"color": OURS, "fontweight": "bold"}


def _height(place: int) -> float:
    return TOP + ROW * (place + 0.9)


def _panel(
    axes: Axes, left: float, title: str, values: Sequence[tuple[float, float]]
) -> None:
    """Draw one panel: per row a ring for the first value, a dot for the second."""
    axes.text(left, 34, title, fontsize=9, va="top", linespacing=1.3)
    low = min(map(min, values))
    decades = max(math.log10(max(map(max, values)) / low), 1.0)
    for place, (outer, inner) in enumerate(values):
        y, colour = _height(place), OTHERS if place else OURS
        ring, dot = (
            left + LEFT + SCALE * math.log10(value / low) / decades
            for value in (outer, inner)
        )
        axes.plot([left, dot], [y, y], color="#DDDDDD", linewidth=0.8, zorder=0)
        text = spell(outer)
        if outer != inner:
            axes.plot([dot, ring], [y, y], color=colour, linewidth=1.5)
            axes.plot(ring, y, "o", color=colour, markerfacecolor="white")
            text += f" · {spell(inner)}"
        axes.plot(dot, y, "o" if place else "D", color=colour)
        axes.text(ring + 9, y, text, va="center", fontsize=8.5, **_looks(place))
