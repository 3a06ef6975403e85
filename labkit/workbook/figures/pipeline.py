"""A pipeline's step: what each rank does when, and the most that it keeps meanwhile."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from labkit.parallel.pipeline import Span, Timeline
from labkit.parallel.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT
from labkit.workbook.figures.style import COLOURS, PIXELS_PER_INCH, STYLE, WIDTH
from labkit.workbook.spelling import spell

LOOKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        FORWARD: (COLOURS["activations"], "forward"),
        BACKWARD: (COLOURS["gradients"], "backward"),
        INPUT: (COLOURS["gradients"], "backward"),
        WEIGHT: (COLOURS["weights"], "its part for weights, where apart"),
    }
)
"""Colour and name of each kind of work. What waits is as grey as elsewhere."""

WAITING = "#DDDDDD"
LIGHTER = 0.5
"""How far a rank's later chunks are from the colour of its first to white."""

ROW, ENDS = 30, 118
"""Pixels of a rank, and of all that is above and below."""

LEFT, SPLIT, MIDDLE, RIGHT = 0.07, 0.745, 0.785, 0.93
"""Shares of the width: the timeline lies up to `SPLIT`, what is kept from `MIDDLE`."""

LEAST = 13
"""Pixels that a pass must have to carry the number of its micro-batch."""

Rectangle = tuple[float, float, float, float]
"""Left, bottom, right, top."""


def schedule_figure(
    timeline: Timeline,
    *,
    title: str,
    kept: Sequence[float],
    kept_name: str,
    x: str = "time (forward passes of a rank)",
) -> Figure:
    """Return ranks as rows: their passes in time, and beside them what they keep.

    Micro-batches are numbered where there is room. Of an overlapped pair the forward
    is the upper half.

    Args:
        timeline: the step.
        title: the finding.
        kept: the most that each rank keeps.
        kept_name: what that is, with its unit.
        x: what time is counted in.
    """
    n_ranks = len(timeline.spans)
    height = ENDS + max(ROW * min(n_ranks, 8), 14 * n_ranks)
    size = (WIDTH / PIXELS_PER_INCH, height / PIXELS_PER_INCH)
    with mpl.rc_context(dict(STYLE)):
        fig = Figure(figsize=size, dpi=PIXELS_PER_INCH)
        fig.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        bottom, top = 78 / height, 1 - 36 / height
        axes = fig.add_axes((LEFT, bottom, SPLIT - LEFT, top - bottom))
        beside = fig.add_axes((MIDDLE, bottom, RIGHT - MIDDLE, top - bottom))
        kinds = _draw_spans(axes, timeline)
        _write_numbers(axes, timeline, height * (top - bottom))
        _draw_kept(beside, kept, kept_name)
        axes.set_xlabel(x)
        _name_ranks(axes, n_ranks)
        _draw_key(fig, kinds, is_chunked=_is_chunked(timeline))
    return fig


def _draw_spans(axes: Axes, timeline: Timeline) -> list[str]:
    """Draw all passes of a kind as one path; return the kinds that there are."""
    n_ranks = len(timeline.spans)
    waiting = [(0, rank - 0.4, timeline.seconds, rank + 0.4) for rank in range(n_ranks)]
    axes.add_artist(PathPatch(_boxes(waiting), facecolor=WAITING, edgecolor="none"))
    boxes: dict[tuple[str, bool], list[Rectangle]] = {}
    first = _first_chunks(timeline)
    for rank, span in _spans(timeline):
        for place, action in enumerate(span.step):
            # Rows count downwards: the first of a pair is above.
            halves = np.linspace(rank - 0.4, rank + 0.4, len(span.step) + 1)
            box = (span.start, halves[place], span.stop, halves[place + 1])
            is_later = action.stage != first[rank]
            boxes.setdefault((action.kind, is_later), []).append(box)
    for (kind, is_later), found in boxes.items():
        colour = _lighter(LOOKS[kind][0]) if is_later else LOOKS[kind][0]
        looks = {"facecolor": colour, "edgecolor": "white"}
        width = 0.6 if len(found) < 150 else 0.15
        axes.add_artist(PathPatch(_boxes(found), linewidth=width, **looks))
    axes.set(xlim=(0, timeline.seconds), ylim=(n_ranks - 0.5, -0.5))
    axes.grid(visible=False)
    return [kind for kind in LOOKS if any(kind == drawn for drawn, _ in boxes)]


def _spans(timeline: Timeline) -> Iterator[tuple[int, Span]]:
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            yield rank, span


def _first_chunks(timeline: Timeline) -> list[int]:
    """Return for each rank the stage that it works on first."""
    return [spans[0].step[0].stage for spans in timeline.spans]


def _is_chunked(timeline: Timeline) -> bool:
    """Return whether a rank works on several stages."""
    first = _first_chunks(timeline)
    return any(
        action.stage != first[rank]
        for rank, span in _spans(timeline)
        for action in span.step
    )


def _lighter(colour: str) -> str:
    return to_hex([part + LIGHTER * (1 - part) for part in to_rgb(colour)])


def _boxes(rectangles: Sequence[Rectangle]) -> Path:
    """Return rectangles as one path, which is drawn much quicker than many."""
    left, bottom, right, top = np.array(rectangles, dtype=float).T
    corners = [(left, bottom), (right, bottom), (right, top), (left, top)]
    corners.append(corners[0])
    vertices = np.array(corners).transpose(2, 0, 1).reshape(-1, 2)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(vertices, codes * len(rectangles))


def _write_numbers(axes: Axes, timeline: Timeline, height: float) -> None:
    """Write which micro-batch a pass is of, all numbers as one path."""
    n_ranks = len(timeline.spans)
    across = timeline.seconds / (WIDTH * (SPLIT - LEFT))  # time units of a pixel
    up = n_ranks / height
    paths = []
    for rank, span in _spans(timeline):
        n_parts = len(span.step)
        if span.stop - span.start < LEAST * across or 0.8 / up < 11 * n_parts:
            continue
        for place, action in enumerate(span.step):
            number = _number(action.micro_batch)
            middle = (span.start + span.stop) / 2
            center = (middle, rank - 0.4 + 0.8 * (place + 0.5) / n_parts)
            paths.append(Path(number.vertices * (across, -up) + center, number.codes))
    if paths:
        whole = Path.make_compound_path(*paths)
        axes.add_artist(PathPatch(whole, facecolor="black", linewidth=0))


@lru_cache(maxsize=128)
def _number(value: int) -> Path:
    """Return a number as outlines in pixels, its middle at zero."""
    path = TextPath((0, 0), str(value), size=9.5, prop=FontProperties("DejaVu Sans"))
    return Path(path.vertices - path.get_extents().get_points().mean(0), path.codes)


def _draw_kept(axes: Axes, kept: Sequence[float], name: str) -> None:
    ranks = range(len(kept))
    axes.barh(ranks, kept, height=0.8, color=COLOURS["activations"])
    most = max(kept) or 1
    is_crowded = len(kept) > 8
    for rank, amount in enumerate(kept):
        axes.text(
            amount + 0.03 * most,
            rank,
            spell(amount, digits=2),
            va="center_baseline",
            fontsize=8 if is_crowded else 9,
        )
    axes.set(xlim=(0, 1.3 * most), ylim=(len(kept) - 0.5, -0.5), xlabel=name)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(3))
    axes.grid(visible=False, axis="y")


def _name_ranks(axes: Axes, n_ranks: int) -> None:
    every = 1 if n_ranks <= 16 else 4
    ranks = range(0, n_ranks, every)
    axes.set_yticks(ranks, [f"rank {rank}" if n_ranks < 9 else rank for rank in ranks])
    if n_ranks >= 9:
        axes.set_ylabel("rank", labelpad=2)
    axes.tick_params(axis="y", length=0, labelsize=9)


def _draw_key(fig: Figure, kinds: Sequence[str], *, is_chunked: bool) -> None:
    """Name the colours; two chunks of a rank are told apart by their tone."""
    looks = dict.fromkeys(LOOKS[kind] for kind in kinds)  # two kinds look alike
    patches = [Patch(color=colour, label=name) for colour, name in looks]
    patches.append(Patch(color=WAITING, label="waits"))
    if is_chunked:
        fig.text(0.985, 0.03, "lighter: other chunk", ha="right", fontsize=9)
    fig.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(0.005, 0.0),
        ncols=5,
        frameon=False,
        handlelength=1,
        handletextpad=0.4,
        fontsize=9,
        columnspacing=1.2,
    )
