"""Who works how much: experts step by step, GPUs side by side.

    load_map(loads, change=100, title=…)             each expert's share, over the steps
    bias_curves({"γ = 0.001": history}, title=…)     how fast a bias heals
    load_view(history, {"placed": gpus}, title=…)    a bias at work, and the GPUs after

All loads are drawn by their mean; `history` is that of a `Crowd`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from labkit.workbook.figures.charts import Points, lines
from labkit.workbook.figures.precision import panels
from labkit.workbook.figures.recompute import PLATE
from labkit.workbook.figures.style import COLOURS, SERIES

MOST = 4
"""Times the mean load from which on a map's colour stays the same."""

MAP_MARGINS = {"left": 0.09, "right": 0.93, "top": 0.89, "bottom": 0.12, "hspace": 0.12}
VIEW_MARGINS = {
    "left": 0.09,
    "right": 0.985,
    "top": 0.82,
    "bottom": 0.15,
    "wspace": 0.2,
}


def load_map(
    loads: Float[np.ndarray, "t e"], *, title: str, change: int, note: str
) -> Figure:
    """Return a map of every expert's load over the steps, above the busiest's curve.

    Args:
        loads: tokens of each expert, by step.
        title: the finding.
        change: the step from which on something is different.
        note: what.
    """
    by_mean = loads / loads.mean(axis=1, keepdims=True)
    fig, (upper, lower) = panels(
        title,
        2,
        1,
        height=430,
        sharex=True,
        gridspec_kw=MAP_MARGINS | {"height_ratios": (2, 1)},
    )
    n_steps, n_experts = by_mean.shape
    edges = (0.5, n_steps + 0.5, n_experts - 0.5, -0.5)
    shown = upper.imshow(
        by_mean.T,
        aspect="auto",
        cmap="Blues",
        vmin=0,
        vmax=MOST,
        extent=edges,
        interpolation="nearest",
    )
    upper.grid(visible=False)
    upper.set_ylabel("expert")
    upper.set_yticks(range(0, n_experts, max(n_experts // 4, 1)))
    place = fig.add_axes((0.945, 0.46, 0.014, 0.43))
    bar = fig.colorbar(shown, cax=place, ticks=range(MOST + 1))
    bar.ax.set_yticklabels([*map(str, range(MOST)), f"{MOST}+"], fontsize=8.5)
    bar.ax.set_title("× mean", fontsize=8.5)
    lower.plot(range(1, n_steps + 1), by_mean.max(axis=1), color=SERIES[1])
    lower.axhline(1, color=COLOURS["ink"], linestyle=":", linewidth=1)
    lower.set(ylabel="busiest\n(× mean)", xlabel="step")
    lower.set_ylim(0, None)
    lower.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    for axes, ink in ((upper, SERIES[1]), (lower, COLOURS["ink"])):
        axes.axvline(change + 0.5, color=ink, linestyle="--", linewidth=1.3)
    lower.annotate(
        note,
        (change + 0.5, 0.04),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        fontsize=9,
        bbox=dict(PLATE),
    )
    return fig


def bias_curves(curves: Mapping[str, Points], *, title: str) -> Figure:
    """Return the busiest expert's load over the steps, a curve for each bias.

    Args:
        curves: pairs of a step and the busiest expert's load by the mean, by name.
        title: the finding.
    """
    y = "busiest expert (× mean, log scale)"
    fig = lines(curves, title=title, x="step of the bias", y=y, log="y")
    _write_factors(fig.axes[0])
    return fig


def load_view(
    history: Points, gpus: Mapping[str, Sequence[float]], *, title: str
) -> Figure:
    """Return the busiest expert over the steps, beside all GPUs from the busiest on.

    Args:
        history: pairs of a step and the busiest expert's load by the mean.
        gpus: loads of the GPUs by the mean, for two ways to place experts; the first is
            the background.
        title: the finding.
    """
    fig, (left, right) = panels(
        title,
        1,
        2,
        height=330,
        gridspec_kw=VIEW_MARGINS | {"width_ratios": (2, 3)},
    )
    _draw_history(left, history)
    for place, (name, loads) in enumerate(gpus.items()):
        _draw_gpus(right, name, sorted(loads, reverse=True), is_first=not place)
    right.axhline(1, color=COLOURS["ink"], linestyle=":", linewidth=1)
    right.set_title("tokens of each GPU (× mean)", fontsize=9.5, fontweight="normal")
    right.set_xlabel("GPUs, the busiest first")
    right.set_xlim(0, max(map(len, gpus.values())))
    right.set_ylim(0, 1.35 * max(max(loads) for loads in gpus.values()))
    right.grid(visible=False, axis="x")
    return fig


def _draw_gpus(axes: Axes, name: str, loads: list[float], *, is_first: bool) -> None:
    """Draw GPUs as grey steps, or as a line above them, and name the slowest."""
    colour = COLOURS["idle"] if is_first else SERIES[0]
    base = 0 if is_first else None
    axes.stairs(loads, baseline=base, fill=is_first, color=colour, linewidth=2.2)
    axes.text(
        0.99,
        0.97 if is_first else 0.885,
        f"{name}: the slowest has {loads[0]:.2f}",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=9.5,
        color="#666666" if is_first else colour,
        fontweight="normal" if is_first else "bold",
        bbox=dict(PLATE),
    )


def _write_factors(axes: Axes) -> None:
    """Write the factors 1, 2, 5 and so on at a logarithmic axis."""
    axes.yaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 40]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_history(axes: Axes, history: Points) -> None:
    """Draw the busiest expert's load on a scale of factors, from 1 on."""
    axes.plot(*zip(*history, strict=True), color=SERIES[1])
    axes.set_yscale("log")
    axes.set_ylim(0.9, 45)
    _write_factors(axes)
    axes.set_xlabel("step of the bias")
    axes.set_title("busiest expert (× mean)", fontsize=9.5, fontweight="normal")
    for point, side, shift in ((history[0], "left", 4), (history[-1], "right", -4)):
        axes.annotate(
            f"{point[1]:.1f}",
            point,
            xytext=(shift, 6),
            textcoords="offset points",
            ha=side,
            fontsize=9.5,
        )
