"""The cache explorer's figure: bytes per token, and one accelerator's memory."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from labkit.workbook.figures.charts import Part
from labkit.workbook.figures.style import COLOURS, PIXELS_PER_INCH, STYLE, WIDTH
from labkit.workbook.spelling import spell

HEIGHT = 400
"""Pixels of the whole figure."""

MARGINS: Mapping[str, float] = MappingProxyType(
    {"left": 0.3, "right": 0.98, "top": 0.92, "bottom": 0.13, "hspace": 0.42}
)
"""Shares of the figure; the left one has room for the longest name."""

CUT = 3
"""Devices after which the bar of memory is cut: a longer one would hide the limit."""


def spell_bytes(n_bytes: float) -> str:
    """Return bytes in GB, or in TB where there are thousands of GB.

    >>> spell_bytes(9.21e9), spell_bytes(655.4e9), spell_bytes(35.56e12)
    ('9.21 GB', '655 GB', '35.6 TB')
    """
    if n_bytes >= 1e12:
        return f"{spell(n_bytes / 1e12)} TB"
    return f"{spell(n_bytes / 1e9)} GB"


def mark_place(fig: Figure, at: float, text: str) -> None:
    """Mark a place on the horizontal axis by a dotted line, and write beside it."""
    axes = fig.axes[0]
    axes.axvline(at, color=COLOURS["ink"], linestyle=":", linewidth=1.5)
    axes.annotate(
        text,
        (at, 0.04),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        va="bottom",
    )


def cache_figure(
    per_token: Sequence[Part],
    memory: Sequence[Part],
    *,
    title: str,
    capacity: float,
    device: str,
) -> Figure:
    """Return bars of bytes per token above one stacked bar of a device's memory.

    Args:
        per_token: bytes that one token keeps, by design or model; log scale.
        memory: what lies on the device, in bytes.
        title: the finding.
        capacity: the device's memory, in bytes.
        device: its name.
    """
    with mpl.rc_context(dict(STYLE)):
        size = (WIDTH / PIXELS_PER_INCH, HEIGHT / PIXELS_PER_INCH)
        fig = Figure(figsize=size, dpi=PIXELS_PER_INCH)
        fig.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        # Fixed margins: working them out anew at each move takes a third of the time.
        upper, lower = fig.subplots(2, height_ratios=(4, 1), gridspec_kw=dict(MARGINS))
    _draw_per_token(upper, per_token)
    _draw_memory(lower, memory, capacity=capacity, device=device)
    return fig


def _draw_per_token(axes: Axes, parts: Sequence[Part]) -> None:
    amounts = [part.amount for part in parts]
    colours = [COLOURS[part.meaning] for part in parts]
    drawn = axes.barh([part.name for part in parts], amounts, color=colours)
    axes.bar_label(drawn, [f"{amount:,.0f}" for amount in amounts], padding=4)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(amounts) / 3, max(amounts) * 5)
    axes.set_xticks([])
    axes.minorticks_off()
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel("cache per token (bytes, log scale)")


def _draw_memory(
    axes: Axes, parts: Sequence[Part], *, capacity: float, device: str
) -> None:
    left, total = 0.0, sum(part.amount for part in parts)
    is_cut = total > CUT * capacity
    end = CUT * capacity if is_cut else 1.05 * max(total, capacity)
    for part in parts:
        label = f"{part.name} {spell_bytes(part.amount)}"
        shown = min(part.amount, end - left)
        colour = COLOURS[part.meaning]
        axes.barh(device, shown / 1e9, left=left / 1e9, color=colour, label=label)
        left += shown
    # Its white edge keeps the line visible on dark bars.
    edge = [withStroke(linewidth=4, foreground="white")]
    axes.axvline(
        capacity / 1e9, color=COLOURS["ink"], ls="--", linewidth=1.5, path_effects=edge
    )
    axes.set_xlim(0, end / 1e9)
    about = f"memory (GB); dashed: all {spell(capacity / 1e9)} of it"
    if is_cut:
        _break(axes)
        about += f"; the bar goes on to {spell_bytes(total)}"
    axes.set_xlabel(about)
    axes.grid(visible=False, axis="y")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=3,
        columnspacing=1.5,  # room for three small numbers
        frameon=False,
        borderpad=0,
    )


def _break(axes: Axes) -> None:
    """Mark that a bar goes on past the axis: two slanted gaps near its end."""
    for place in (0.955, 0.97):
        across = (place, place + 0.01)
        axes.plot(across, (0, 1), color="white", linewidth=3, transform=axes.transAxes)
