"""What lives on a rank, part by part: a column for each instant or pipeline stage."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from labkit.memory.report import PARTS
from labkit.workbook.figures.cache import spell_bytes
from labkit.workbook.figures.style import COLOURS, PIXELS_PER_INCH, STYLE, WIDTH
from labkit.workbook.spelling import spell

LOOKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "weights": ("weights", ""),
        "master": ("optimizer", "xxx"),
        "gradients": ("gradients", ""),
        "moments": ("optimizer", ""),
        "activations": ("activations", ""),
        "logits": ("activations", "///"),
        "dispatch": ("communication", "///"),
        "communication": ("communication", ""),
        "temporaries": ("activations", "..."),
    }
)
"""Meaning of each part's colour, and the hatch that tells apart two of one colour."""

HEIGHT = 360
"""Pixels of the whole figure."""

TOP, BOTTOM, LEFT, RIGHT = 0.78, 0.14, 0.085, 0.985
"""Shares of the figure. Fixed: to work them out at each move takes time."""

MANY = 20
"""Columns beyond which there is no room to write each name and total."""

LOW, FAR = 0.08, 4
"""A limit that is less or more of the highest column is written down, not drawn."""

UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12}

FROM = {"MB": 0, "GB": 1e9, "TB": 1e13}
"""Bytes of the highest column from which all are in this unit."""

Columns = Mapping[str, Mapping[str, float]]
"""Bytes by part, by the name of the column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A height to stay below."""

    n_bytes: float
    name: str


def columns_figure(
    columns: Columns,
    *,
    title: str,
    x: str,
    limit: Limit | None = None,
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Return stacked columns, the total of each above it.

    Args:
        columns: bytes by part of `PARTS`, by the name of the column.
        title: the finding.
        x: what the columns are.
        limit: a dashed line, for example a device's memory.
        marks: bytes to mark by a short line across a column, such as what was
            predicted for it.
    """
    with mpl.rc_context(dict(STYLE)):
        size = (WIDTH / PIXELS_PER_INCH, HEIGHT / PIXELS_PER_INCH)
        fig = Figure(figsize=size, dpi=PIXELS_PER_INCH)
        fig.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        axes = fig.add_axes((LEFT, BOTTOM, RIGHT - LEFT, TOP - BOTTOM))
        shown = [part for part in PARTS if any(part in c for c in columns.values())]
        highest = max(sum(column.values()) for column in columns.values())
        unit = [name for name, least in FROM.items() if highest >= least][-1]
        heights = [
            {part: n_bytes / UNITS[unit] for part, n_bytes in column.items()}
            for column in columns.values()
        ]
        _draw_parts(axes, heights, shown)
        note = _draw_limit(axes, limit, highest or UNITS[unit], unit)
        _write_totals(axes, [sum(column.values()) for column in heights])
        for place, name in enumerate(columns):
            if marks and name in marks:
                _draw_mark(axes, place, marks[name] / UNITS[unit])
        _write_axes(axes, list(columns), x + note)
        _draw_key(fig, shown, "predicted" if marks else "")
    return fig


def _draw_parts(
    axes: Axes, columns: list[Mapping[str, float]], shown: list[str]
) -> None:
    """Draw each part as one path of boxes: quicker than a bar for each."""
    levels = [
        [0.0, *accumulate(column.get(part, 0) for part in shown)] for column in columns
    ]
    for number, part in enumerate(shown):
        boxes = [
            _box(place, level[number], level[number + 1])
            for place, level in enumerate(levels)
            if level[number + 1] > level[number]
        ]
        path = Path.make_compound_path(*boxes)
        axes.add_artist(PathPatch(path, **_looks(part)))


def _box(place: int, low: float, high: float) -> Path:
    left, right = place - 0.4, place + 0.4
    corners = [(left, low), (right, low), (right, high), (left, high), (left, low)]
    return Path(corners, closed=True)


def _looks(part: str) -> dict[str, object]:
    meaning, hatch = LOOKS[part]
    return {
        "facecolor": COLOURS[meaning],
        "edgecolor": "white",
        "linewidth": 0.4,
        "hatch": hatch,
    }


def _draw_limit(axes: Axes, limit: Limit | None, highest: float, unit: str) -> str:
    """Draw the limit and return "", or return a note where it cannot be drawn."""
    top, note = 1.12 * highest, ""
    if limit is not None:
        name = f"{limit.name}, {spell_bytes(limit.n_bytes)}"
        if limit.n_bytes > FAR * highest:
            note = f"; far above: {name}"
        elif limit.n_bytes < LOW * highest:
            note = f"; near 0: {name}"
        else:
            top = max(top, 1.12 * limit.n_bytes)
            _draw_line(axes, limit.n_bytes / UNITS[unit], name)
    axes.set_ylim(0, top / UNITS[unit])
    axes.set_ylabel(f"memory ({unit})")
    return note


def _draw_line(axes: Axes, height: float, name: str) -> None:
    """Draw a dashed line across, visible on any column, with its name at the right."""
    ink, edge = COLOURS["ink"], [withStroke(linewidth=4, foreground="white")]
    axes.axhline(height, color=ink, ls="--", lw=1.5, path_effects=edge)
    axes.annotate(
        name,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 4),
        textcoords="offset points",
        ha="right",
        path_effects=edge,
        zorder=4,
    )


def _write_totals(axes: Axes, totals: list[float]) -> None:
    """Write each total above its column; of very many only the highest."""
    is_crowded = len(totals) > MANY
    for place, total in enumerate(totals):
        if is_crowded and place != totals.index(max(totals)):
            continue
        axes.annotate(
            spell(total),
            (place, total),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            zorder=5,
        )


def _draw_mark(axes: Axes, place: int, height: float) -> None:
    """Draw a short line across a column; its white edge keeps it visible."""
    ends, edge = (place - 0.48, place + 0.48), [withStroke(linewidth=4, foreground="w")]
    ink = COLOURS["ink"]
    axes.plot(ends, (height, height), color=ink, lw=2, path_effects=edge, zorder=6)


def _write_axes(axes: Axes, names: list[str], x: str) -> None:
    every = -(-len(names) // MANY)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_xticks(range(0, len(names), every), names[::every])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(x)
    axes.grid(visible=False, axis="x")


def _draw_key(fig: Figure, shown: list[str], mark: str) -> None:
    handles = [Patch(label=part, **_looks(part)) for part in shown]
    if mark:
        ink = COLOURS["ink"]
        handles.append(Line2D([], [], color=ink, lw=2, label=mark))
    fig.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(LEFT - 0.012, 0.935),
        ncols=5,
        frameon=False,
        borderpad=0,
        handlelength=1.6,
        columnspacing=1.4,
        fontsize=9,
    )
