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
        memory: what lies on the device, in GB.
        title: the finding.
        capacity: the device's memory, in GB.
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
    left = 0.0
    for part in parts:
        colour, label = COLOURS[part.meaning], f"{part.name} {spell(part.amount)}"
        axes.barh(device, part.amount, left=left, color=colour, label=label)
        left += part.amount
    # Its white edge keeps the line visible on dark bars.
    edge = [withStroke(linewidth=4, foreground="white")]
    axes.axvline(
        capacity, color=COLOURS["ink"], ls="--", linewidth=1.5, path_effects=edge
    )
    axes.set_xlim(0, max(left, capacity) * 1.05)
    axes.set_xlabel(f"memory of one device (GB); dashed: all {spell(capacity)} of it")
    axes.grid(visible=False, axis="y")
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderpad=0
    )
