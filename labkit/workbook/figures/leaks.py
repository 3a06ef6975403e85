"""What lives from step to step, within a step, and how long memory lasts."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from labkit.workbook.figures.charts import Part
from labkit.workbook.figures.style import COLOURS, PIXELS_PER_INCH, STYLE, WIDTH, canvas
from labkit.workbook.spelling import spell

COLUMNS = 4
GROWING, STILL = COLOURS["communication"], COLOURS["weights"]
HILL, FLOOR = "#8CCBB8", "#F5D48F"
"""Activations and gradients, light enough for dark letters."""

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


def spell_size(n_bytes: float) -> str:
    """Return bytes in the largest unit that leaves one digit before the point.

    >>> spell_size(6_532_656), spell_size(512), spell_size(12_345)
    ('6.53 MB', '512 bytes', '12.3 kB')
    """
    size, unit = next((u for u in UNITS if n_bytes >= u[0]), UNITS[-1])
    number = spell(n_bytes / size)
    return f"{number.removesuffix('.0')} {unit}"


def growth_panels(
    live: Mapping[str, Sequence[int]], *, title: str, n_warm_up: int = 2
) -> Figure:
    """Return a small chart for each run: what has been added since its warm-up.

    Args:
        live: bytes that live at the end of each step, by the name of the run.
        title: the finding.
        n_warm_up: first steps that do not count.
    """
    n_rows = -(-len(live) // COLUMNS)
    with mpl.rc_context(dict(STYLE)):
        size = (WIDTH / PIXELS_PER_INCH, (60 + 165 * n_rows) / PIXELS_PER_INCH)
        fig = Figure(figsize=size, dpi=PIXELS_PER_INCH, layout="constrained")
        panels = fig.subplots(n_rows, COLUMNS, sharex=True, squeeze=False).flat
        fig.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        fig.supxlabel("step", fontsize=10)
        for axes, (name, levels) in zip(panels, live.items(), strict=False):
            _draw_growth(axes, name, levels, n_warm_up)
    return fig


def _draw_growth(axes: Axes, name: str, levels: Sequence[int], n_warm_up: int) -> None:
    base = levels[n_warm_up - 1]
    added = [level - base for level in levels[n_warm_up - 1 :]]
    steps = range(n_warm_up, len(levels) + 1)
    top = max(added)
    size, unit = next((u for u in UNITS if top >= u[0]), UNITS[-1])
    colour, mark = (GROWING, "o") if top else (STILL, "s")
    axes.plot(steps, [n / size for n in added], color=colour, marker=mark, ms=3)
    each = top / (len(added) - 1)
    note = f"+{spell_size(each)} a step" if top else "no byte more"
    axes.set_title(f"{name}\n", fontsize=9, loc="left")
    axes.text(0, 1.03, note, transform=axes.transAxes, fontsize=8.5, color=colour)
    axes.set_ylabel(unit, fontsize=8.5, labelpad=1)
    axes.set_ylim(bottom=-0.05 * (top / size or 1), top=1.1 * (top / size or 1))
    axes.tick_params(labelsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=top == 0))


def two_runs(
    live: Mapping[str, Sequence[int]], *, title: str, notes: Sequence[str]
) -> Figure:
    """Return the level of live bytes of two runs, the first still, the second not.

    Args:
        live: bytes that live at the end of each step, by the name of the run.
        title: the finding.
        notes: what to write beside the end of each curve.
    """
    fig, axes = canvas(title, x="step", y="live at the end of the step (MB)")
    looks = zip(live.values(), notes, (STILL, GROWING), ("s", "o"), strict=True)
    for levels, note, colour, mark in looks:
        levels = [0, *levels]
        axes.plot([n / 1e6 for n in levels], color=colour, marker=mark, ms=4)
        end = (len(levels) - 1, levels[-1] / 1e6)
        axes.annotate(note, end, (8, 0), textcoords="offset points", va="center")
    axes.set_xlim(-0.3, 1.45 * len(next(iter(live.values()))))
    axes.set_xticks(range(len(next(iter(live.values()))) + 1))
    axes.set_ylim(bottom=0)
    return fig


def within_step(
    levels: Sequence[Sequence[int]], *, title: str, floor: int, floor_name: str
) -> Figure:
    """Return what lives within a step, allocation by allocation.

    Args:
        levels: live bytes after each event, a sequence for each of two or more
            micro-batches.
        title: the finding.
        floor: bytes that stay from one micro-batch to the next.
        floor_name: what they are.
    """
    fig, axes = canvas(
        title, x="allocations and frees, in order", y="made in the step, live (MB)"
    )
    start, top = 0, max(max(part) for part in levels) / 1e6
    for number, part in enumerate(levels, start=1):
        places = range(start, start + len(part))
        heights = [level / 1e6 for level in part]
        if number > 1:  # in the first one gradients are still being made
            axes.fill_between(places, floor / 1e6, heights, color=HILL, linewidth=0)
            axes.fill_between(places, 0, floor / 1e6, color=FLOOR, linewidth=0)
        axes.plot(places, heights, color=COLOURS["ink"], linewidth=1)
        axes.axvline(start, color="#CCCCCC", linewidth=0.8)
        middle = start + len(part) / 2
        axes.text(middle, 1.06 * top, f"micro-batch {number}", ha="center")
        start += len(part)
    axes.axhline(floor / 1e6, color=COLOURS["gradients"], linestyle="--")
    middle = len(levels[0]) + len(levels[1]) / 2
    low = floor / 1e6 + 0.16 * (top - floor / 1e6)  # where the hill is wide
    axes.text(middle, low, "comes and goes", ha="center")
    note = f"{floor_name} stay: {spell_size(floor)}"
    axes.text((len(levels[0]) + start) / 2, floor / 2e6, note, ha="center")
    axes.set_xlim(0, start)
    axes.set_ylim(0, 1.15 * top)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return fig


def runway(parts: Sequence[Part], *, title: str, n_steps: int, chosen: str) -> Figure:
    """Return how many steps memory lasts with each fault, on a log scale.

    Args:
        parts: steps by fault; the first on top.
        title: the finding.
        n_steps: of the whole run, which a dashed line marks.
        chosen: the fault to write in bold.
    """
    with mpl.rc_context(dict(STYLE)):
        size = (WIDTH / PIXELS_PER_INCH, 2.6)
        fig = Figure(figsize=size, dpi=PIXELS_PER_INCH)
        fig.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        # Fixed margins: working them out at each move takes a third of the time.
        axes = fig.add_axes((0.29, 0.21, 0.69, 0.64))
    left = 0.5  # so that one step, and none, are bars too
    for number, part in enumerate(parts):
        axes.barh(
            number,
            max(part.amount, 0.6) - left,
            left=left,
            color=COLOURS[part.meaning],
            alpha=1 if part.name == chosen else 0.45,
        )
        weight = "bold" if part.name == chosen else "normal"
        at = max(part.amount, 0.6) * 1.25
        axes.text(at, number, f"{part.amount:,.0f}", va="center", fontweight=weight)
    axes.set_yticks(range(len(parts)), [part.name for part in parts])
    for label, part in zip(axes.get_yticklabels(), parts, strict=True):
        label.set_fontweight("bold" if part.name == chosen else "normal")
    axes.set_xscale("log")
    axes.set_xlim(left, max(n_steps, *(part.amount for part in parts)) * 60)
    axes.invert_yaxis()
    axes.axvline(n_steps, color=COLOURS["ink"], linestyle="--", linewidth=1.3)
    axes.set_xlabel(f"steps until memory is full (dashed: all {n_steps:,} of the run)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xticks([10**n for n in range(0, 13, 3) if 10**n < axes.get_xlim()[1]])
    axes.minorticks_off()
    axes.grid(visible=False, axis="y")
    return fig
