"""Memory against time: policies as points, the best that can be had as a line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from labkit.workbook.figures.style import (
    COLOURS,
    PIXELS_PER_INCH,
    SERIES,
    STYLE,
    WIDTH,
)

Meaning = Literal["policy", "mixture", "chosen", "claim"]

HEIGHT = 400
"""Pixels of the figure."""

EDGES = (70, 22, 46, 54)
"""Pixels to the left, right, top and bottom of the axes: fixed, so that names can be
placed before anything is drawn, and a move of a control is answered at once."""

LETTER, BOLD, LINE = 6.6, 7.5, 15
"""Pixels that a letter of a name takes, plain or bold, and its height."""

HEAVY = ("chosen", "claim")
"""Kinds of points whose names are bold."""

POINTS = 72 / PIXELS_PER_INCH
"""Of a pixel on the page."""

LOOKS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "policy": {"marker": "o", "color": SERIES[0], "markersize": 7},
        "mixture": {"marker": "s", "color": COLOURS["activations"], "markersize": 5},
        "chosen": {"marker": "D", "color": SERIES[1], "markersize": 10},
        "claim": {"marker": "X", "color": COLOURS["ink"], "markersize": 11},
    }
)
"""A marker and a colour for each kind of point."""


PLATE: Mapping[str, object] = MappingProxyType(
    {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5}
)
"""Behind a name that lines may cross."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A way to train, by what it costs and what it holds."""

    name: str
    """Written beside it; "" leaves it without a name."""

    time: float
    memory: float
    meaning: Meaning = "policy"
    is_best: bool = False
    """Whether the line of the best passes through it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A height to compare with: a device's memory, or what lasts anyway."""

    name: str
    memory: float
    is_limit: bool = True


class _Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "_Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )


def frontier(
    places: Sequence[Place],
    *,
    title: str,
    x: str,
    y: str,
    levels: Sequence[Level] = (),
) -> Figure:
    """Return policies in a plane whose lower left corner everybody wants.

    Args:
        places: the points, each with its name beside it.
        title: the finding.
        x: what the time is, with its unit.
        y: what the memory is, with its unit.
        levels: drawn across, if they are near the points.
    """
    size = (WIDTH / PIXELS_PER_INCH, HEIGHT / PIXELS_PER_INCH)
    with mpl.rc_context(dict(STYLE)):
        fig = Figure(figsize=size, dpi=PIXELS_PER_INCH)
        fig.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        left, right, top, bottom = EDGES
        share = (1 - (left + right) / WIDTH, 1 - (top + bottom) / HEIGHT)
        axes = fig.add_axes((left / WIDTH, bottom / HEIGHT, *share))
        axes.set(xlabel=x, ylabel=y)
    _scale(axes, places, levels)
    best = sorted((x for x in places if x.is_best), key=lambda place: place.time)
    across, up = [place.time for place in best], [place.memory for place in best]
    axes.plot(across, up, color=COLOURS["activations"], linewidth=1.5, zorder=1)
    for level in levels:
        if level.memory <= axes.get_ylim()[1]:
            _draw_level(axes, level)
    for place in places:
        axes.plot(place.time, place.memory, linestyle="", **LOOKS[place.meaning])
    _name_places(axes, places)
    _point_to_the_better(axes)
    return fig


def _scale(axes: Axes, places: Sequence[Place], levels: Sequence[Level]) -> None:
    """Set limits with room around the points; memory starts at zero."""
    times = [place.time for place in places]
    memories = [place.memory for place in places]
    low, high = min(0.0, *times), max(*times, 0.0)
    width = (high - low) or 1.0
    axes.set_xlim(low - 0.06 * width, high + 0.24 * width)
    most = max(memories)
    near = (level.memory for level in levels if level.memory <= 1.6 * most)
    most = max([most, *near])
    axes.set_ylim(0, 1.12 * most or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(8))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _draw_level(axes: Axes, level: Level) -> None:
    colour = COLOURS["ink"] if level.is_limit else "#777777"
    style = "--" if level.is_limit else ":"
    axes.axhline(level.memory, color=colour, linestyle=style, linewidth=1.3, zorder=1)
    axes.annotate(
        level.name,
        (0.995, level.memory),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3 if level.is_limit else -3),
        textcoords="offset points",
        ha="right",
        va="bottom" if level.is_limit else "top",
        fontsize=9,
        color=colour,
    )


def _point_to_the_better(axes: Axes) -> None:
    axes.annotate(
        "↙ better: less memory, less time",
        (0.012, 0.02),
        xycoords="axes fraction",
        fontsize=9,
        color="#666666",
        va="bottom",
    )


def _name_places(axes: Axes, places: Sequence[Place]) -> None:
    """Name each point on a side where no other name and no point is."""
    pixels = {id(place): _pixels(axes, place) for place in places}
    taken = [_around(at, 7) for at in pixels.values()]
    taken.append(_Box(0, 0, 205, 22))  # the words in the corner
    taken += _along([pixels[id(place)] for place in places if place.is_best])
    order = ("chosen", "claim", "policy", "mixture")
    for place in sorted(places, key=lambda place: order.index(place.meaning)):
        if not place.name:
            continue
        at = pixels[id(place)]
        is_heavy = place.meaning in HEAVY
        width = len(place.name) * (BOLD if is_heavy else LETTER)
        box = _free_box(at, width, taken)
        taken.append(box)
        axes.annotate(
            place.name,
            (place.time, place.memory),
            xytext=(
                (box.left - at[0]) * POINTS,
                ((box.bottom + box.top) / 2 - at[1]) * POINTS,
            ),
            textcoords="offset points",
            va="center_baseline",
            fontsize=9.5,
            color=LOOKS[place.meaning]["color"],
            fontweight="bold" if is_heavy else "normal",
            bbox=dict(PLATE),
        )


def _pixels(axes: Axes, place: Place) -> tuple[float, float]:
    """Return where a point is, in pixels from the lower left corner of the axes."""
    (x0, x1), (y0, y1) = (
        map(float, ends) for ends in (axes.get_xlim(), axes.get_ylim())
    )
    left, right, top, bottom = EDGES
    across = (place.time - x0) / (x1 - x0) * (WIDTH - left - right)
    return across, (place.memory - y0) / (y1 - y0) * (HEIGHT - top - bottom)


def _along(corners: Sequence[tuple[float, float]]) -> list[_Box]:
    """Return small boxes all along the line through these points."""
    boxes = []
    for (x0, y0), (x1, y1) in pairwise(sorted(corners)):
        n = int(max(abs(x1 - x0), abs(y1 - y0)) / 4) + 1
        shares = (i / n for i in range(n + 1))
        boxes += [_around((x0 + t * (x1 - x0), y0 + t * (y1 - y0)), 2) for t in shares]
    return boxes


def _around(at: tuple[float, float], radius: float) -> _Box:
    x, y = at
    return _Box(x - radius, y - radius, x + radius, y + radius)


def _free_box(at: tuple[float, float], width: float, taken: Sequence[_Box]) -> _Box:
    """Return where a name of this width fits: right of its point, if it can."""
    left, right, top, bottom = EDGES
    frame = _Box(0, 0, WIDTH - left - right, HEIGHT - top - bottom)
    tried = [_Box(*side) for side in _sides(at, width)]
    for box in tried:
        is_inside = (
            box.left >= frame.left
            and box.right <= frame.right
            and box.bottom >= frame.bottom
            and box.top <= frame.top
        )
        if is_inside and not any(box.overlaps(other) for other in taken):
            return box
    return tried[0]


def _sides(
    at: tuple[float, float], width: float
) -> list[tuple[float, float, float, float]]:
    """Return rectangles around a point, the best side first, farther ones last."""
    x, y = at
    half = LINE / 2
    sides = []
    for up in (0, LINE, -LINE, 1.8 * LINE, -1.8 * LINE, 2.6 * LINE, -2.6 * LINE):
        for start in (x + 14, x - 14 - width, x - width / 2):
            if up == 0 and start == x - width / 2:
                continue
            sides.append((start, y + up - half, start + width, y + up + half))
    return sides
